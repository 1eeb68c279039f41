"""Whether files look like a model, as far as that shows without loading them."""

from pathlib import Path

from shared.errors import ModelLoadError

GGUF_SUFFIX = ".gguf"
GGUF_MAGIC = b"GGUF"
CONFIG_NAME = "config.json"
WEIGHTS_PATTERN = "*.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Weights in these are read by running what is written there."""


def check_model_files(path: Path) -> None:
    """See whether a .gguf file or a model folder is one, and can be read.

    Raises:
        ModelLoadError: it is not, or cannot; in one line.
    """
    try:
        if not path.exists():
            raise ModelLoadError(f"{path} does not exist")
        if path.is_dir():
            _check_folder(path)
        elif path.suffix == GGUF_SUFFIX:
            _check_gguf(path)
        else:
            raise ModelLoadError(f"{path} is neither a {GGUF_SUFFIX} file nor a model folder")
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def weight_files(path: Path) -> list[Path]:
    """The files with the weights: of a folder, or the one file."""
    return sorted(path.glob(WEIGHTS_PATTERN)) if path.is_dir() else [path]


def _check_gguf(path: Path) -> None:
    if _first_bytes(path, len(GGUF_MAGIC)) != GGUF_MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file")


def _check_folder(path: Path) -> None:
    files = sorted(entry.name for entry in path.iterdir())
    if CONFIG_NAME not in files:
        gguf = next((name for name in files if name.endswith(GGUF_SUFFIX)), "")
        hint = f"; for a GGUF model name the file, like {path / gguf}" if gguf else ""
        raise ModelLoadError(f"the folder {path} has no {CONFIG_NAME}{hint}")
    weights = weight_files(path)
    if not weights:
        pickle = next((name for name in files if name.endswith(PICKLE_SUFFIXES)), "")
        reason = f"{pickle} can hold code, and is not loaded" if pickle else "other formats are not loaded"
        raise ModelLoadError(f"the folder {path} has no .safetensors weights; {reason}")
    for file in (path / CONFIG_NAME, *weights):
        if not _first_bytes(file, 1):
            raise ModelLoadError(f"{file} is empty")


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
