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
from shared.settings import source
from workers.backends.protocol import Backend
from workers.backends.transformers_batched import BatchedBackend
from workers.backends.transformers_linear import can_pack, pack
from workers.backends.transformers_probe import NotBatchableError, Probe, batchable_context
from workers.backends.transformers_sequential import SequentialBackend
from workers.backends.transformers_tokenizer import TransformersTokenizer
from workers.model_files import check_model_files

logger = logging.getLogger("tokenmill.worker")

UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, SafetensorError)
"""What transformers raises for files it cannot make sense of; it has no error of its own for that."""


def load(path: Path, *, slots: int, context: int, device: str, dtype: str, threads: int) -> Backend:
    """Load the model in the folder `path`: safetensors weights, no code from the folder, nothing fetched.

    `context` 0 means what the model was trained for, which is also the most; `threads` 0 leaves
    PyTorch's choice, one per core. `device` is auto, cpu, cuda or mps, `dtype` auto, float32 or
    bfloat16; auto is bfloat16 on cuda and float32 elsewhere. A model that cannot be batched has one
    slot, whatever `slots` says.

    Raises:
        ModelLoadError: the folder, the device or the model cannot be used.
    """
    check_model_files(path)
    place = _device(device)
    number_format = _dtype(dtype, place)
    if threads:
        torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    config = _config(path)
    limit = _context(config, context, path)
    model = _model(path, config, number_format, place)
    tokenizer = _tokenizer(path, model)
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
        raise ModelLoadError(f"model {path}: it cannot be run: {_one_line(error)}") from error
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


def _config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except UNUSABLE as error:
        raise ModelLoadError(f"model {path}: its config.json cannot be used: {_one_line(error)}") from error


def _context(config: Any, wanted: int, path: Path) -> int:
    """The most tokens a slot may hold: what is wanted, but not more than the model was trained for."""
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if trained is None:
        if not wanted:
            raise ModelLoadError(f"model {path}: it does not say its context length; set {source('ctx')}")
        return wanted
    return min(wanted, int(trained)) if wanted else int(trained)


def _model(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"model {path}: its weights do not fit on {device.type}") from error
    except UNUSABLE as error:
        raise ModelLoadError(f"model {path}: it cannot be loaded: {_one_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would fill them with random numbers and only warn.
        raise ModelLoadError(f"model {path}: its weights lack {len(missing)} tensors, such as {missing[0]}")
    return model.eval()


def _tokenizer(path: Path, model: Any) -> TransformersTokenizer:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except UNUSABLE as error:
        raise ModelLoadError(f"model {path}: its tokenizer cannot be loaded: {_one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelLoadError(f"model {path}: its tokenizer has no tokenizer.json, which is the only kind that is run")
    ends: set[int] = set()
    for found in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ends.update(found if isinstance(found, list) else [] if found is None else [found])
    return TransformersTokenizer(tokenizer, ends)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
