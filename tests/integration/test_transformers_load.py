"""Model folders, settings and devices that the transformers backend takes or refuses, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from models import SMALL, open_model, save_small
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM
from traps import Touch, pickled

from shared.errors import ModelLoadError

pytestmark = pytest.mark.torch


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save_small(LlamaForCausalLM(LlamaConfig(**SMALL)), tmp_path / "small")


@pytest.mark.parametrize(("wanted", "found"), [(0, 128), (100_000, 128), (77, 77)])
def test_the_context_is_never_longer_than_the_model_was_trained_for(small: Path, wanted: int, found: int) -> None:
    assert open_model(small, context=wanted).description.context == found


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_model(folder, **options)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "said"),
    [("config.json", "no config.json"), ("model.safetensors", "no .safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_a_missing_file_is_named(small: Path, file: str, said: str) -> None:
    (small / file).unlink()
    line = refusal(small)
    assert said in line
    assert str(small) in line


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_one_line(small: Path, file: str) -> None:
    (small / file).write_bytes(b"\x10\x00\x00\x00{ not what it should be")
    assert str(small) in refusal(small)


def test_weights_that_are_not_all_there_are_refused(small: Path) -> None:
    config = LlamaConfig(**(SMALL | {"num_hidden_layers": 5}))
    config.save_pretrained(small)
    assert "lack" in refusal(small)


def test_a_model_that_cannot_go_on_from_its_state_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 49_152, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    model = RwkvForCausalLM(RwkvConfig(**sizes, context_length=128, eos_token_id=2))
    assert "no cache" in refusal(save_small(model, tmp_path))


def test_an_unknown_architecture_is_refused(small: Path) -> None:
    (small / "config.json").write_text('{"model_type": "perpetuum_mobile"}')
    assert "perpetuum_mobile" in refusal(small)


def test_a_device_that_is_not_there_is_refused(small: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "TOKENMILL_DEVICE" in refusal(small, device="cuda")


def test_a_context_must_be_given_for_a_model_that_does_not_say_its_own(tmp_path: Path) -> None:
    sizes = {"vocab_size": 49_152, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    model = MambaForCausalLM(MambaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=2))
    assert "TOKENMILL_CTX" in refusal(save_small(model, tmp_path), context=0)


# -- code that comes with a model --

CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM
pathlib.Path({trap!r}).touch()

class {name}Config(LlamaConfig):
    model_type = {type!r}

class {name}Model(LlamaForCausalLM):
    config_class = {name}Config
"""


@pytest.fixture
def bring_code(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Gives the small model code of its own; returns the file that exists once the code has run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def bring(model_type: str) -> Path:
        trap = tmp_path / "trap"
        name = f"own_{model_type}"
        (small / f"{name}.py").write_text(CODE.format(trap=str(trap), name="Own", type=model_type))
        told = json.loads((small / "config.json").read_text())
        told["model_type"] = model_type
        told["auto_map"] = {"AutoConfig": f"{name}.OwnConfig", "AutoModelForCausalLM": f"{name}.OwnModel"}
        (small / "config.json").write_text(json.dumps(told))
        return trap

    return bring


def test_a_model_that_needs_code_of_its_own_is_refused(small: Path, bring_code: Callable[[str], Path]) -> None:
    trap = bring_code("perpetuum_mobile")

    line = refusal(small)

    assert "TOKENMILL_TRUST_REMOTE_CODE" in line
    assert str(small) in line
    assert not trap.exists()


def test_a_model_that_is_known_runs_without_the_code_that_it_brings(
    small: Path, bring_code: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    trap = bring_code("llama")

    assert open_model(small).description.vocabulary == 49_152
    assert "the Python code that comes with it is not run" in caplog.text
    assert not trap.exists()


def test_code_of_a_model_runs_where_that_is_asked_for(small: Path, bring_code: Callable[[str], Path]) -> None:
    trap = bring_code("perpetuum_mobile")

    assert open_model(small, trust_remote_code=True).description.vocabulary == 49_152
    assert trap.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_not_read(small: Path, tmp_path: Path, name: str) -> None:
    (small / "model.safetensors").unlink()
    (small / name).write_bytes(pickled(Touch(tmp_path / "trap")))

    assert f"{name} can hold code, and is not loaded" in refusal(small)
    assert not (tmp_path / "trap").exists()


def test_pickled_files_beside_the_weights_are_not_read(small: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl"):
        (small / name).write_bytes(pickled(Touch(tmp_path / "trap")))

    assert open_model(small).description.vocabulary == 49_152
    assert not (tmp_path / "trap").exists()
