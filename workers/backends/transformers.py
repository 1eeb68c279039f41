"""Models in transformers' folder format: loads one and decides, by trying, how it can be run.

A model with plain causal attention runs batched (`transformers_batched`). That this gives what the
model itself would give is proved at load on two short sequences; a model that fails the proof runs
one sequence at a time (`transformers_sequential`), and the log says why.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from shared.errors import ModelLoadError
from shared.logs import one_line
from shared.settings import source
from workers.backends.protocol import Backend
from workers.backends.transformers_batched import BatchedBackend
from workers.backends.transformers_linear import can_pack, pack
from workers.backends.transformers_probe import NotBatchableError, Probe, batchable_context
from workers.backends.transformers_sequential import SequentialBackend
from workers.backends.transformers_tokenizer import TransformersTokenizer
from workers.model_files import check_model_files

NAME_CODE = ("config.json", "tokenizer_config.json")
AUTO_MAP = '"auto_map"'
"""In these files, under this name, a model says which Python code to import."""

MOST_OF_A_REASON = 200

logger = logging.getLogger("tokenmill.worker")

UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, SafetensorError)
"""What transformers raises for files it cannot make sense of; it has no error of its own for that."""


def load(
    path: Path, *, slots: int, context: int, device: str, dtype: str, threads: int, trust_remote_code: bool = False
) -> Backend:
    """Load the model in the folder `path`: safetensors weights, nothing fetched.

    Python code in the folder is run with `trust_remote_code` only; without it, a model that this transformers knows by
    itself is run by that, and another is refused. `context` 0 means what the model was trained for, which is also the
    most; `threads` 0 leaves PyTorch's choice, one per core. `device` is auto, cpu, cuda or mps, `dtype` auto, float32
    or bfloat16; auto is bfloat16 on cuda and float32 elsewhere. A model that cannot be batched has one slot, whatever
    `slots` says.

    Raises:
        ModelLoadError: the folder, the device or the model cannot be used.
    """
    check_model_files(path)
    place = _device(device)
    number_format = _dtype(dtype, place)
    if threads:
        torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    folder = _Folder(path, trust_remote_code)
    config = folder.config()
    limit = _context(config, context, path)
    model = folder.model(config, number_format, place)
    tokenizer = folder.tokenizer(model)
    return _fit(model, tokenizer, path, slots=slots, context=limit)


def _fit(model: Any, tokenizer: TransformersTokenizer, path: Path, *, slots: int, context: int) -> Backend:
    """The best backend that provably runs the model."""
    try:
        probe = Probe(model)
        if can_pack(model):
            pack(model)
        try:
            batched = BatchedBackend(
                model,
                tokenizer,
                slots=slots,
                context=batchable_context(model.config, context),
                vocabulary=probe.vocabulary,
                gather=model.device.type != "cpu",
            )
            probe.check_batched(batched)
        except NotBatchableError as reason:
            logger.warning("model %s runs one sequence at a time: %s", path, reason)
        else:
            return batched
        probe.restore_attention()
        sequential = SequentialBackend(model, tokenizer, context=context, vocabulary=probe.vocabulary)
        probe.check_sequential(sequential)
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"model {path}: no room on {model.device.type} for {slots} slots of {context} tokens; "
            f"lower {source('slots')} or {source('ctx')}"
        ) from error
    except UNUSABLE as error:
        raise ModelLoadError(f"model {path}: it cannot be run: {one_line(error)}") from error
    return sequential


def _device(name: str) -> torch.device:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available[name]:
        raise ModelLoadError(f"{source('device')}: this machine or this PyTorch has no {name}")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _context(config: Any, wanted: int, path: Path) -> int:
    """The most tokens a slot may hold: what is wanted, but not more than the model was trained for."""
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if trained is None:
        if not wanted:
            raise ModelLoadError(f"model {path}: it does not say its context length; set {source('ctx')}")
        return wanted
    return min(wanted, int(trained)) if wanted else int(trained)


class _Folder:
    """What is in a model's folder; each part is read by transformers, and refused in one line where it cannot be."""

    def __init__(self, path: Path, trust_remote_code: bool) -> None:
        self._path = path
        self._options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        self._hint = ""
        if not trust_remote_code and _names_code(path):
            logger.warning("model %s: the Python code that comes with it is not run", path)
            self._hint = f"; Python code that comes with a model is run only with {source('trust_remote_code')}"

    def config(self) -> Any:
        try:
            return AutoConfig.from_pretrained(self._path, **self._options)
        except UNUSABLE as error:
            raise self._refusal("its config.json cannot be used", error) from error

    def model(self, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                self._path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **self._options,
            )
            model.to(device)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(f"model {self._path}: its weights do not fit on {device.type}") from error
        except UNUSABLE as error:
            raise self._refusal("it cannot be loaded", error) from error
        missing = sorted(report["missing_keys"])
        if missing:
            # transformers would fill them with random numbers and only warn.
            raise ModelLoadError(f"model {self._path}: its weights lack {len(missing)} tensors, such as {missing[0]}")
        return model.eval()

    def tokenizer(self, model: Any) -> TransformersTokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path, **self._options)
        except UNUSABLE as error:
            raise self._refusal("its tokenizer cannot be loaded", error) from error
        if not tokenizer.is_fast:
            raise ModelLoadError(
                f"model {self._path}: its tokenizer has no tokenizer.json, which is the only kind that is run"
            )
        ends: set[int] = set()
        for found in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
            ends.update(found if isinstance(found, list) else [] if found is None else [found])
        return TransformersTokenizer(tokenizer, ends)

    def _refusal(self, what: str, error: Exception) -> ModelLoadError:
        return ModelLoadError(f"model {self._path}: {what}: {one_line(error)[:MOST_OF_A_REASON]}{self._hint}")


def _names_code(path: Path) -> bool:
    """Whether the folder's files say that Python code belongs to the model."""
    texts = [file.read_text(errors="replace") for name in NAME_CODE if (file := path / name).is_file()]
    return any(AUTO_MAP in text for text in texts)
