"""GGUF models on llama.cpp, through the low-level batch interface of llama-cpp-python.

All slots are computed by one `llama_decode` per step. Every slot is its own stream of the key-value
cache (`llama_cpp_streams`), so a sequence attends to its own cells only; a prefix is shared by copying
a slot's state, which costs far less than computing it again.
"""

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from shared.errors import ModelLoadError
from shared.fleet import StateKind
from shared.settings import source
from workers.backends.llama_cpp_streams import Streams
from workers.backends.protocol import Description, Logits, SlotWork, StepError
from workers.detokenise import ByteDetokeniser, Detokeniser
from workers.model_files import check_model_files

BATCH_TOKENS = 512
"""Most tokens that one step computes."""

ERROR_LEVEL = 4
"""`GGML_LOG_LEVEL_ERROR` of llama.cpp, which the Python package does not name."""

_errors: deque[str] = deque(maxlen=16)
"""What llama.cpp has complained of lately. It says why it failed on its log only: first why, and then that it did."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _: object) -> None:
    if level == ERROR_LEVEL:
        _errors.append(text.decode("utf-8", "replace").strip())


def _reason(otherwise: str) -> str:
    """Why what has just been tried has failed."""
    return _errors[0] if _errors else otherwise


def load(path: Path, *, slots: int, context: int, device: str, threads: int) -> "LlamaCppBackend":
    """Load a GGUF file. `context` is tokens per slot, 0 for the trained length; `threads` 0 is one per core.

    Raises:
        ModelLoadError: the file is not a usable model, or the device is not there.
    """
    check_model_files(path)
    llama_cpp.llama_log_set(_keep_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    has_gpu = bool(llama_cpp.llama_supports_gpu_offload())
    if device in ("cuda", "mps") and not has_gpu:
        raise ModelLoadError(f"{source('device')}: this machine has no {device}, or this llama.cpp is built without it")
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0 if device == "cpu" or not has_gpu else 999
    _errors.clear()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise ModelLoadError(f"model {path}: llama.cpp cannot load it: {_reason('no reason given')}")
    trained = llama_cpp.llama_model_n_ctx_train(model)
    per_slot = min(context, trained) if context else trained
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = per_slot * slots
    params.n_seq_max = slots
    params.n_batch = params.n_ubatch = max(BATCH_TOKENS, slots)
    params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
    params.kv_unified = False
    params.no_perf = True
    llama_context = llama_cpp.llama_init_from_model(model, params)
    if not llama_context:
        llama_cpp.llama_model_free(model)
        raise ModelLoadError(
            f"model {path}: no room for {slots} slots of {per_slot} tokens: {_reason('out of memory')}"
        )
    return LlamaCppBackend(model, llama_context, slots=slots, on_gpu=model_params.n_gpu_layers > 0)


class LlamaCppTokenizer:
    """The vocabulary of a loaded model. Reads only, so any thread may use it."""

    def __init__(self, model: ctypes.c_void_p) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        template = llama_cpp.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode() if template else None
        self.bos_token: int | None = None
        if llama_cpp.llama_vocab_get_add_bos(self._vocab):
            self.bos_token = llama_cpp.llama_vocab_bos(self._vocab)
        self._pieces: list[bytes] = [self._piece(token) for token in range(self.size)]
        self._ends = frozenset(token for token in range(self.size) if llama_cpp.llama_vocab_is_eog(self._vocab, token))
        # Not those that a vocabulary calls user-defined: they are text, such as runs of spaces, in any case.
        self._specials = [
            self._text(token)
            for token in range(self.size)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token)
            & (llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN)
        ]

    @property
    def special_texts(self) -> dict[str, str]:
        named = {
            "bos_token": llama_cpp.llama_vocab_bos(self._vocab),
            "eos_token": llama_cpp.llama_vocab_eos(self._vocab),
        }
        return {name: self._text(token) if token >= 0 else "" for name, token in named.items()}

    @property
    def special_tokens(self) -> Sequence[str]:
        return self._specials

    def encode(self, text: str, *, special: bool) -> list[int]:
        raw = text.encode()
        room = len(raw) + 8
        tokens = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), tokens, room, False, special)
        if count < 0:
            room = -count
            tokens = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), tokens, room, False, special)
        return list(tokens[:count])

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:
        return ByteDetokeniser(self.token_bytes)

    def _text(self, token: int) -> str:
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        """A token's bytes; empty for control tokens, which have no text of their own."""
        size = 64
        buffer = ctypes.create_string_buffer(size)
        count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, -count, 0, False)
        return buffer.raw[: max(count, 0)]


class LlamaCppBackend:
    """A GGUF model with its slots."""

    def __init__(self, model: ctypes.c_void_p, context: ctypes.c_void_p, *, slots: int, on_gpu: bool) -> None:
        self._model = model
        self._context = context
        self._streams = Streams(context, slots)
        self.tokenizer = LlamaCppTokenizer(model)
        self._batch_room = int(llama_cpp.llama_n_batch(context))
        self._batch = llama_cpp.llama_batch_init(self._batch_room, 0, 1)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape=(self._batch_room,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape=(self._batch_room,))
        self._wants = np.ctypeslib.as_array(self._batch.logits, shape=(self._batch_room,))
        np.ctypeslib.as_array(self._batch.n_seq_id, shape=(self._batch_room,))[:] = 1
        self._rows_at = (0, 0)
        self._logits: Logits = np.empty((0, self.tokenizer.size), np.float32)
        cannot_cut = (
            llama_cpp.llama_model_is_recurrent(model)
            or llama_cpp.llama_model_is_hybrid(model)
            or llama_cpp.llama_model_n_swa(model) > 0
        )
        self.description = Description(
            context=int(llama_cpp.llama_n_ctx_seq(context)),
            slots=slots,
            vocabulary=self.tokenizer.size,
            device="gpu" if on_gpu else "cpu",
            state_kind=StateKind.RECURRENT if cannot_cut else StateKind.TRIMMABLE,
            # Its kernels for one token and for many round differently (`bench/determinism.py`).
            exact_prefill=False,
        )

    def start(self, slot: int, *, keep: int, source: int) -> None:
        if source != slot and keep:
            self._streams.copy(source, slot)
        self._streams.keep(slot, keep)

    def step(self, work: Sequence[SlotWork]) -> Logits:
        self._streams.gather({item.slot for item in work})
        order = sorted(range(len(work)), key=lambda index: self._streams.of(work[index].slot))
        self._fill_batch([work[index] for index in order])
        _errors.clear()
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            for item in work:
                self._streams.clear(item.slot)
            raise StepError(f"llama_decode returned {status}: {_reason('no reason given')}")
        with_logits = [index for index in order if work[index].wants_logits]
        if not with_logits:
            return np.empty((0, self.tokenizer.size), np.float32)
        logits = self._rows(len(with_logits))
        if with_logits == sorted(with_logits):
            return logits
        return logits[np.argsort(with_logits)]

    def _rows(self, count: int) -> Logits:
        """The first so many rows of llama.cpp's logits.

        The buffer is nearly always the same, and making an array of a pointer takes 40 us of a step: after a pass of
        the model nothing of it is in the CPU's caches.
        """
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.addressof(pointer.contents)
        if (address, count) != self._rows_at:
            self._rows_at = (address, count)
            self._logits = np.ctypeslib.as_array(pointer, shape=(count, self.tokenizer.size))
        return self._logits

    def _fill_batch(self, work: Sequence[SlotWork]) -> None:
        count = 0
        for item in work:
            end = count + len(item.tokens)
            self._tokens[count:end] = item.tokens
            self._positions[count:end] = np.arange(item.start, item.start + len(item.tokens))
            self._wants[count:end] = 0
            self._wants[end - 1] = item.wants_logits
            stream = self._streams.of(item.slot)
            for index in range(count, end):
                self._batch.seq_id[index][0] = stream
            count = end
        self._batch.n_tokens = count

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
