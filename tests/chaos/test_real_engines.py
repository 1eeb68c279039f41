"""A real model whose worker is killed: the answer goes on, and is the one that it would have been."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from asking import reasons_of, text_of, tokens_of, usage_of
from models import packaged_gguf, smollm2_folder
from servers import wait_until
from worker_processes import Office, Start, WorkerProcess

from shared.domain import ChatMessage, ChatPrompt, SamplingParams

MODELS: dict[str, Callable[[], Path]] = {"llama.cpp": packaged_gguf, "transformers": smollm2_folder}
QUESTION = ChatPrompt((ChatMessage(role="user", content="Write a long story about a river and a mill."),))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(seed=1, temperature=0.0)},
    "seeded": {"sampling": SamplingParams(seed=3, temperature=0.8, top_p=0.9)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", MODELS)
def test_the_answer_of_a_killed_worker_is_the_one_it_would_have_been(
    start: Start, client: "redis.Redis", engine: str, way: str
) -> None:
    office = Office(client, model="real")
    fields: Any = {"prompts": (QUESTION,), "max_tokens": 48, **WAYS[way]}

    def fresh_worker() -> WorkerProcess:
        """One that holds nothing of the prompt, so that each attempt computes it in the same pieces."""
        worker = start("--ctx", "512", "--slots", "2", model=f"real={MODELS[engine]()}")
        office.ready(worker)
        return worker

    first = fresh_worker()
    office.submit("whole", **fields)
    whole = office.result("whole", limit_s=60)
    first.kill()
    doomed = fresh_worker()
    office.submit("cut", **fields)
    wait_until(lambda: len(tokens_of(office.events("cut"))) > 8, limit_s=60, what="some text")
    doomed.kill()
    fresh_worker()
    cut = office.result("cut", limit_s=60)

    assert {entry.id.attempt for entry in office.entries("cut")} == {1, 2}
    assert text_of(cut) == text_of(whole)
    assert tokens_of(cut) == tokens_of(whole)
    assert reasons_of(cut) == reasons_of(whole)
    assert usage_of(cut).completion == usage_of(whole).completion
