"""Small GGUF files, good ones and others, made with the library that defines the format."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

WIDTH, HEADS, LAYERS, FEED = 32, 4, 2, 48
UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6

PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
PIECES += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
PIECES += [(f"▁{letter}", NORMAL) for letter in "abcdefghijklmnopqrstuvwxyz"]

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"

METADATA: dict[str, Any] = {
    "general.name": "tiny",
    "llama.context_length": 512,
    "llama.embedding_length": WIDTH,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": FEED,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": WIDTH // HEADS,
    "llama.vocab_size": len(PIECES),
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [text for text, _ in PIECES],
    "tokenizer.ggml.scores": [0.0] * len(PIECES),
    "tokenizer.ggml.token_type": [kind for _, kind in PIECES],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
"""A Llama with a SentencePiece vocabulary of bytes and letters. Whole numbers are written in 32 bits."""


def write_gguf(path: Path, changes: dict[str, Any] | None = None, *, weight: float | None = None) -> Path:
    """Write a tiny model. `changes` are other metadata, None for none; `weight` is what all weights are instead."""
    told = METADATA | (changes or {})
    writer = GGUFWriter(path, told.pop("general.architecture", "llama"))
    for name, value in told.items():
        if isinstance(value, bool | str | bytes):
            kind = GGUFValueType.BOOL if isinstance(value, bool) else GGUFValueType.STRING
            writer.add_key_value(name, value, kind)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.normal(0, 0.1, shape) if weight is None else np.full(shape, weight)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", len(PIECES), WIDTH)
    for layer in range(LAYERS):
        for part in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{part}.weight", WIDTH)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", WIDTH, WIDTH)
        for part in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{part}.weight", FEED, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, FEED)
    add("output_norm.weight", WIDTH)
    add("output.weight", len(PIECES), WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
