"""The transformers engine alone against transformers' own `generate`: tokens per second and ratios.

    python -m bench.engine_transformers [--sequences 8] [--tokens 48] [--rounds 3]

No server, no queue: what a step loop over the backend gives, next to static batching with the same
prompts, model, number format and threads. The two take turns, and the best round of each counts,
so that what else runs on the machine weighs little. Prefill is part of the time, for both alike.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import smollm2_folder
from workers.backends.protocol import Backend, SlotWork
from workers.backends.transformers import load

PROMPT = "<|im_start|>user\nTell me what the number {} means to people.<|im_end|>\n<|im_start|>assistant\n"


@click.command()
@click.option("--sequences", default=8, show_default=True, help="how many run together")
@click.option("--tokens", default=48, show_default=True, help="how long each answer is")
@click.option("--rounds", default=3, show_default=True, help="of which the best counts")
def main(sequences: int, tokens: int, rounds: int) -> None:
    """Print the table."""
    folder = smollm2_folder()
    backend = load(folder, slots=sequences, context=1024, device="cpu", dtype="float32", threads=0)
    plain, plain_tokenizer = plain_model(folder)
    prompts = [PROMPT.format(number) for number in range(sequences)]
    ways: dict[str, Callable[[], int]] = {
        f"this engine, {sequences} sequences": lambda: run_engine(backend, prompts, tokens),
        f"generate, static batch of {sequences}": lambda: run_generate(plain, plain_tokenizer, prompts, tokens),
        "this engine, 1 sequence": lambda: run_engine(backend, prompts[:1], tokens),
        "generate, 1 sequence": lambda: run_generate(plain, plain_tokenizer, prompts[:1], tokens),
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            made = way()
            best[name] = max(best[name], made / (time.perf_counter() - started))
    for name, speed in best.items():
        print(f"{name:<36}{speed:8.1f} tok/s")
    together, static, single, bare = best.values()
    print(f"engine / generate: {together / static:.2f} together, {single / bare:.2f} alone")


def plain_model(folder: Path) -> tuple[Any, Any]:
    """transformers' own model, which never ends an answer early, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def run_generate(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> int:
    """Greedy answers in one static batch; how many tokens were made."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokens * len(prompts)


def run_engine(backend: Backend, prompts: list[str], tokens: int) -> int:
    """Greedy answers step by step; how many tokens were made."""
    parts = [backend.tokenizer.encode(prompt, special=True) for prompt in prompts]
    lengths = [0] * len(prompts)
    for slot in range(len(prompts)):
        backend.start(slot, keep=0, source=slot)
    for _ in range(tokens):
        logits = backend.step([SlotWork(slot, lengths[slot], part, True) for slot, part in enumerate(parts)])
        lengths = [length + len(part) for length, part in zip(lengths, parts, strict=True)]
        parts = [[int(token)] for token in logits.argmax(axis=1)]
    return tokens * len(prompts)


if __name__ == "__main__":
    main()
