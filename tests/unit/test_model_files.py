"""What the files of a model must look like before anything loads them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ModelLoadError
from workers.model_files import check_model_files, weight_files
from workers.models import engine_of, require_installed, resolve

GGUF = b"GGUF\x03\x00\x00\x00"
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that holds what it must."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def as_a_stranger() -> Iterator[None]:
    """Without root's right to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_model_files(path)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_gguf_file_and_a_model_folder_are_models(folder: Path) -> None:
    file = folder / "model.gguf"
    file.write_bytes(GGUF)

    check_model_files(file)
    check_model_files(folder)

    assert weight_files(file) == [file]
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_a_file_that_only_has_the_name_of_a_model_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"this is no model"):
        (tmp_path / "x.gguf").write_bytes(content)
        assert refusal(tmp_path / "x.gguf") == f"{tmp_path / 'x.gguf'} is not a GGUF file"


@pytest.mark.parametrize(
    ("file", "said"), [("config.json", "has no config.json"), ("model.safetensors", "has no .safetensors weights")]
)
def test_a_folder_without_a_part_of_a_model_is_refused(folder: Path, file: str, said: str) -> None:
    (folder / file).unlink()

    assert said in refusal(folder)


def test_a_folder_with_pickled_weights_says_why_it_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    assert refusal(folder).endswith("no .safetensors weights; pytorch_model.bin can hold code, and is not loaded")


def test_a_folder_with_a_gguf_file_says_how_to_name_that(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(GGUF)

    assert refusal(tmp_path).endswith(f"for a GGUF model name the file, like {tmp_path / 'x.gguf'}")


def test_an_empty_file_in_a_folder_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")

    assert refusal(folder) == f"{folder / 'model.safetensors'} is empty"


@pytest.mark.parametrize("kind", ["file", "folder", "inside"])
def test_what_may_not_be_read_is_one_line(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    place = tmp_path / "models"
    place.mkdir()
    file = place / "x.gguf"
    file.write_bytes(GGUF)
    for parent in (place, tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    (file if kind == "file" else place).chmod(0)
    request.getfixturevalue("as_a_stranger")
    try:
        said = refusal(place if kind == "folder" else file)
    finally:
        if os.geteuid() != 0 and os.getuid() == 0:
            os.seteuid(0)
        place.chmod(0o755)

    assert said.endswith("cannot be read: Permission denied")


def test_a_name_too_long_for_a_file_is_one_line() -> None:
    assert "cannot be read" in refusal(Path("/" + "x" * 300))


def test_the_location_is_told_with_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"^model {tmp_path}: the folder"):
        resolve(str(tmp_path))


def test_each_location_has_one_engine() -> None:
    locations = {"fake:pace=1": "fake", "a.gguf": "llama_cpp", "hf:o/r:f.gguf": "llama_cpp", "hf:o/r": "transformers"}

    assert {location: engine_of(location) for location in locations} == locations


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())

    require_installed("llama_cpp")
    with pytest.raises(ModelLoadError, match=r"not installed: torch$"):
        require_installed("transformers")
