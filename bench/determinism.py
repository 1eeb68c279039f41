"""Is an answer that is carried on the same as one that was never cut?

The first attempt computed an answer's tokens one by one; a second could compute them at once. Engines round
differently for different shapes, and a near tie between two tokens may fall the other way. This cuts greedy
answers of a real model after every so many tokens, carries each on both ways, and counts those that end the
same; likewise for answers that were computed beside others.
"""

import argparse
from collections.abc import Callable, Sequence

from bench.load import prompt as question
from tests.models import open_model, packaged_gguf, smollm2_folder
from workers.backends.llama_cpp import load as load_gguf
from workers.backends.protocol import Backend, SlotWork

PROMPT = "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
SLOTS = 4

ENGINES: dict[str, Callable[[], Backend]] = {
    "llama.cpp": lambda: load_gguf(packaged_gguf(), slots=SLOTS, context=512, device="cpu", threads=0),
    "transformers, float32": lambda: open_model(smollm2_folder(), slots=SLOTS, dtype="float32"),
}


def main() -> None:
    """Print one line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=8, help="cut after so many tokens, and twice as many, ...")
    options = parser.parse_args()
    for name, load in ENGINES.items():
        backend = load()
        prompts = [
            backend.tokenizer.encode(PROMPT.format(text=question(number, 0)), special=True)
            for number in range(options.prompts)
        ]
        wholes = [answers(backend, [prompt], options.tokens)[0] for prompt in prompts]
        cuts = range(options.every, options.tokens, options.every)
        at_once = one_by_one = 0
        for prompt, whole in zip(prompts, wholes, strict=True):
            for cut in cuts:
                at_once += answers(backend, [prompt + whole[:cut]], options.tokens - cut) == [whole[cut:]]
                one_by_one += answers(backend, [prompt], options.tokens, given=whole[:cut]) == [whole]
        beside = [
            answer
            for first in range(0, len(prompts), SLOTS)
            for answer in answers(backend, prompts[first : first + SLOTS], options.tokens)
        ]
        same = sum(one == whole for one, whole in zip(beside, wholes, strict=True))
        count = len(prompts) * len(cuts)
        print(
            f"{name}: the same are {at_once} of {count} carried on at once, {one_by_one} of {count} token by token, "
            f"{same} of {len(prompts)} beside others",
            flush=True,
        )
        backend.close()


def answers(backend: Backend, prompts: Sequence[list[int]], count: int, given: Sequence[int] = ()) -> list[list[int]]:
    """`count` tokens after each prompt, computed together: those `given`, then the likeliest; ends are passed over."""
    held = [list(prompt) for prompt in prompts]
    done = [0] * len(held)
    for slot in range(len(held)):
        backend.start(slot, keep=0, source=slot)
    for position in range(count):
        rows = backend.step([SlotWork(slot, done[slot], held[slot][done[slot] :], True) for slot in range(len(held))])
        for slot, tokens in enumerate(held):
            done[slot] = len(tokens)
            tokens.append(given[position] if position < len(given) else int(rows[slot].argmax()))
    return [tokens[len(prompt) :] for tokens, prompt in zip(held, prompts, strict=True)]


if __name__ == "__main__":
    main()
