"""Model files that are broken, or made to harm: a worker says what is wrong in one line and ends."""

import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_files import METADATA, write_gguf
from launched import Up
from worker_processes import Office, Start

from shared.errors import ModelLoadError
from workers.backends.llama_cpp_trial import try_out

pytestmark = pytest.mark.gguf

LARGEST = 2**32 - 1

LIES: dict[str, dict[str, Any]] = {
    "no layers": {"llama.block_count": 0},
    "a billion layers": {"llama.block_count": LARGEST},
    "no heads": {"llama.attention.head_count": 0},
    "more heads than width": {"llama.attention.head_count": 33},
    "a billion heads": {"llama.attention.head_count": LARGEST},
    "no heads of keys": {"llama.attention.head_count_kv": 0},
    "no width": {"llama.embedding_length": 0},
    "another width": {"llama.embedding_length": LARGEST},
    "wide keys": {"llama.attention.key_length": LARGEST},
    "turns of more than there is": {"llama.rope.dimension_count": LARGEST},
    "experts": {"llama.expert_count": LARGEST, "llama.expert_used_count": LARGEST},
    "no context": {"llama.context_length": 0},
    "another architecture": {"general.architecture": "nothing"},
    "an architecture of another shape": {"general.architecture": "mamba"},
    "text for a number": {"llama.block_count": "two"},
    "a list for a number": {"llama.block_count": [1, 2, 3]},
    "no such alignment": {"general.alignment": 3},
    "no alignment": {"general.alignment": 0},
    "no tokens": {"tokenizer.ggml.tokens": None},
    "numbers for tokens": {"tokenizer.ggml.tokens": [1, 2, 3]},
    "few scores": {"tokenizer.ggml.scores": [0.0]},
    "few kinds": {"tokenizer.ggml.token_type": [1]},
    "one text for all": {"tokenizer.ggml.tokens": ["same"] * len(METADATA["tokenizer.ggml.tokens"])},
    "another tokenizer": {"tokenizer.ggml.model": "nothing"},
    "a tokenizer without its merges": {"tokenizer.ggml.model": "gpt2"},
    "a begin that is no token": {"tokenizer.ggml.bos_token_id": LARGEST},
    "an end that is no token": {"tokenizer.ggml.eos_token_id": 10**6},
    "a template of bytes": {"tokenizer.chat_template": b"\xff\xfe"},
}
"""What a file says of itself, and is not so."""

HARMLESS = {"a begin that is no token", "an end that is no token"}
"""Lies that llama.cpp sees through, or that only make a model worse."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with which nothing is wrong."""
    return write_gguf(tmp_path_factory.mktemp("good") / "good.gguf").read_bytes()


def refusal(path: Path) -> str:
    """What is said of a file that cannot be used: a line."""
    with pytest.raises(ModelLoadError) as caught:
        try_out(path, threads=1)
    (line,) = str(caught.value).splitlines()
    assert str(path) in line
    return line


def patched(good: bytes, offset: int, form: str, value: Any) -> bytes:
    return good[:offset] + struct.pack(form, value) + good[offset + struct.calcsize(form) :]


def test_a_good_file_is_good(tmp_path: Path) -> None:
    try_out(write_gguf(tmp_path / "good.gguf"), threads=1)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.1, 0.2, 0.3, 0.5, 0.8, 0.999])
def test_a_file_that_ends_early_is_refused(good: bytes, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(good[: int(len(good) * share)])

    assert refusal(path)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (0, "4s", b"GGML"),
        (4, "<I", 0),
        (4, "<I", 99),
        (4, ">I", 3),
        (8, "<Q", 2**63),
        (8, "<Q", 10**9),
        (16, "<Q", 2**63),
        (16, "<Q", 10**9),
        (24, "<Q", 2**63),
        (24, "<Q", 10**12),
    ],
    ids=["magic", "version 0", "version", "order", "tensors", "many tensors", "pairs", "many pairs", "key", "long key"],
)  # fmt: skip
def test_a_file_whose_beginning_makes_no_sense_is_refused(
    good: bytes, tmp_path: Path, offset: int, form: str, value: Any
) -> None:
    path = tmp_path / "changed.gguf"
    path.write_bytes(patched(good, offset, form, value))

    assert refusal(path)


@pytest.mark.parametrize("changes", LIES.values(), ids=LIES)
def test_a_file_that_lies_is_refused_or_does_no_harm(
    tmp_path: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path = write_gguf(tmp_path / "lie.gguf", changes)
    if request.node.callspec.id in HARMLESS:
        try_out(path, threads=1)
    else:
        assert refusal(path)


@pytest.mark.parametrize("seed", range(8))
def test_a_file_with_a_few_changed_bytes_is_refused_or_does_no_harm(good: bytes, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    changed = bytearray(good)
    header = good.index(b"token_embd.weight")
    for _ in range(random.choice([1, 4, 32])):
        changed[random.randrange(header + 200)] = random.randrange(256)
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    said = "fine"
    try:
        try_out(path, threads=1)
    except ModelLoadError as error:
        said = str(error)

    assert len(said.splitlines()) == 1


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    assert "no numbers" in refusal(write_gguf(tmp_path / "nan.gguf", weight=float("nan")))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.block_count": LARGEST}, "model "),
        ({"tokenizer.chat_template": "{% for %}"}, "chat template cannot be used"),
        ({"tokenizer.chat_template": "{{ 'x' * 10**10 }}"}, "chat template"),
    ],
    ids=["lie", "no template", "bomb"],
)
def test_a_worker_with_a_hostile_file_ends_with_one_line(
    start: Start, office: Office, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = write_gguf(tmp_path / "hostile.gguf", changes)
    worker = start(model=f"fake={path}")

    assert worker.end() == 1
    (line,) = worker.output.splitlines()
    assert said in line
    assert office.workers() == []


def test_up_with_a_hostile_file_says_so_and_ends(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "hostile.gguf", LIES["no heads"])
    up = Up(tmp_path, "--model", f"tiny={path}")
    try:
        assert up.end() == 1
    finally:
        up.clean()

    errors = [line for line in up.output().splitlines() if line.startswith("tokenmill: error: ")]
    assert f"model {path}: " in errors[0]
    assert errors[1:] == ["tokenmill: error: worker tiny exited with status 1 before it was ready"]
    assert "Traceback" not in up.output()
