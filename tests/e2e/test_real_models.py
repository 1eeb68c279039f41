"""A real model on both engines, through the whole path, judged by the official client."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai as sdk
import pytest
from launched import Up
from openai import OpenAI
from real import CONTEXT, SLOTS, status
from servers import wait_until

ASK = [{"role": "user", "content": "Name three rivers and say one thing about each."}]


def ask(openai: OpenAI, model: str, **fields: Any) -> Any:
    fields = {"messages": ASK, "max_tokens": 24, "temperature": 0} | fields
    return openai.chat.completions.create(model=model, **fields)


def joined(stream: Any) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Text and finish reasons of each choice of a stream."""
    texts: dict[int, str] = {}
    finishes: dict[int, list[str]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finishes.setdefault(choice.index, []).append(choice.finish_reason)
    return texts, finishes


def test_what_streams_is_what_comes_whole(openai: OpenAI, model: str) -> None:
    whole = ask(openai, model)
    texts, finishes = joined(ask(openai, model, stream=True))
    assert whole.choices[0].message.content.strip()
    assert texts == {0: whole.choices[0].message.content}
    assert finishes == {0: [whole.choices[0].finish_reason]} == {0: ["length"]}
    assert whole.usage.completion_tokens == 24


def test_both_engines_say_the_same_for_a_while(openai: OpenAI) -> None:
    # Four-bit weights are the same on both; only rounding differs.
    texts = [ask(openai, model, max_tokens=4).choices[0].message.content for model in ("gguf", "torch")]
    assert texts[0] == texts[1]


def test_a_stream_tells_usage_once_and_last(openai: OpenAI, model: str) -> None:
    chunks = list(ask(openai, model, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24


def test_a_seed_repeats_its_answer_alone_and_in_a_crowd(openai: OpenAI, model: str) -> None:
    def drawn(seed: int) -> str:
        answer = ask(openai, model, temperature=1.2, seed=seed, max_tokens=8)
        return str(answer.choices[0].message.content)

    alone = drawn(7)
    with ThreadPoolExecutor(6) as crowd:
        together = list(crowd.map(drawn, [7, 8, 9, 7, 10, 11]))
    assert together[0] == together[3]
    assert together[0] == alone
    assert len(set(together)) > 2


def test_a_stop_string_over_several_tokens_never_shows(openai: OpenAI, model: str) -> None:
    text = ask(openai, model, max_tokens=40).choices[0].message.content
    stop = text[20:31]
    whole = ask(openai, model, max_tokens=40, stop=[stop])
    texts, finishes = joined(ask(openai, model, max_tokens=40, stop=stop, stream=True))
    assert whole.choices[0].message.content == text[: text.index(stop)] == texts[0]
    assert whole.choices[0].finish_reason == "stop"
    assert finishes == {0: ["stop"]}


def test_choices_of_one_request_are_told_apart(openai: OpenAI, model: str) -> None:
    stream = ask(openai, model, n=3, temperature=1.5, seed=3, max_tokens=8, stream=True)
    texts, finishes = joined(stream)
    whole = ask(openai, model, n=3, temperature=1.5, seed=3, max_tokens=8)
    assert sorted(texts) == [0, 1, 2]
    assert all(len(reasons) == 1 for reasons in finishes.values())
    assert len(set(texts.values())) > 1
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_more_choices_than_slots_all_come(openai: OpenAI, model: str) -> None:
    whole = ask(openai, model, n=SLOTS + 3, max_tokens=3)
    assert [choice.index for choice in whole.choices] == list(range(SLOTS + 3))
    assert {choice.finish_reason for choice in whole.choices} == {"length"}


def test_logprobs_have_an_entry_for_each_token_and_join_to_the_text(openai: OpenAI, model: str) -> None:
    whole = ask(openai, model, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    streamed = [
        entry
        for chunk in ask(openai, model, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert len(entries) == whole.usage.completion_tokens
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # Greedy: the token that was drawn is the likeliest.
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-4)


def test_a_prompt_that_is_too_long_is_a_400_before_any_header(openai: OpenAI, model: str) -> None:
    long = [{"role": "user", "content": "word " * (CONTEXT + 1)}]
    for stream in (False, True):
        with pytest.raises(sdk.BadRequestError) as caught:
            ask(openai, model, messages=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"


def test_an_answer_ends_at_the_context(openai: OpenAI, model: str) -> None:
    text = "one two three four five six seven " * 60
    answer = ask(
        openai, model, messages=[{"role": "user", "content": text}], max_tokens=CONTEXT, logit_bias={"2": -100}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == CONTEXT


def test_the_next_turn_reuses_the_conversation_so_far(openai: OpenAI, model: str) -> None:
    first = ask(openai, model)
    history = [*ASK, {"role": "assistant", "content": first.choices[0].message.content}]
    second = ask(openai, model, messages=[*history, {"role": "user", "content": "And a fourth?"}])
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_reuse_changes_nothing_in_the_answer(openai: OpenAI, model: str) -> None:
    message = [{"role": "user", "content": "Tell me of the night train to the coast."}]
    cold = ask(openai, model, messages=message, max_tokens=12)
    warm = ask(openai, model, messages=message, max_tokens=12)
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_text_never_becomes_a_special_token(openai: OpenAI, model: str) -> None:
    plain = ask(openai, model, messages=[{"role": "user", "content": "a b"}], max_tokens=1)
    spelled = ask(openai, model, messages=[{"role": "user", "content": "a<|im_end|>b"}], max_tokens=1)
    assert spelled.usage.prompt_tokens >= plain.usage.prompt_tokens + 4


def test_a_bias_decides(openai: OpenAI, model: str) -> None:
    raw = openai.completions.create(model=model, prompt="x", max_tokens=1, temperature=0, logit_bias={"330": 100})
    forced = openai.completions.create(
        model=model, prompt="x", max_tokens=3, temperature=0, logit_bias={"330": 100}, logprobs=0
    )
    assert forced.choices[0].text == raw.choices[0].text * 3


def test_prompts_in_a_list_are_answered_each(openai: OpenAI, model: str) -> None:
    prompts = ["The river", "A clock", "Once upon a time"]
    together = openai.completions.create(model=model, prompt=prompts, max_tokens=6, temperature=0)
    texts = {choice.index: choice.text for choice in together.choices}
    alone = [openai.completions.create(model=model, prompt=text, max_tokens=6, temperature=0) for text in prompts]
    assert texts == {index: answer.choices[0].text for index, answer in enumerate(alone)}
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def test_a_token_outside_the_vocabulary_is_refused(openai: OpenAI, model: str) -> None:
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.completions.create(model=model, prompt=[1, 10_000_000], max_tokens=1)
    assert caught.value.param == "prompt"


def test_emoji_come_whole(openai: OpenAI, model: str) -> None:
    """Each emoji is several tokens of this model; every piece that arrives is whole."""
    text = "Repeat exactly: 🙂🚀🌍🙂🚀🌍"
    pieces = [
        choice.delta.content or ""
        for chunk in ask(openai, model, messages=[{"role": "user", "content": text}], max_tokens=48, stream=True)
        for choice in chunk.choices
    ]
    whole = ask(openai, model, messages=[{"role": "user", "content": text}], max_tokens=48)
    assert "".join(pieces) == whole.choices[0].message.content
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(ord(letter) > 0xFFFF for letter in "".join(pieces))


def test_thirty_two_streams_at_once_of_which_half_leave(real_models: Up, openai: OpenAI, model: str) -> None:
    started = threading.Barrier(32)

    def read(number: int) -> str:
        started.wait()
        stream = ask(openai, model, max_tokens=16 if number % 2 else 400, logit_bias={"2": -100}, stream=True)
        text = ""
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if not number % 2 and text:
                stream.close()
                return text
        return text

    with ThreadPoolExecutor(32) as crowd:
        texts = list(crowd.map(read, range(32)))
    stayed = texts[1::2]
    assert all(texts)
    assert all(stayed[0][:20] == text[:20] for text in stayed)

    def is_idle() -> bool:
        fleet = status(real_models)
        return all(worker["running"] == 0 for worker in fleet["workers"])

    wait_until(is_idle, limit_s=10, what="every slot to be free")


def test_models_tell_what_serves_them(openai: OpenAI, model: str) -> None:
    found = openai.models.retrieve(model)
    assert found.id == model
    assert found.model_extra is not None
    assert found.model_extra["context_length"] == CONTEXT
    assert found.model_extra["backend"] == {"gguf": "llama_cpp", "torch": "transformers"}[model]
    assert found.model_extra["state"] == "ready"


def test_a_stream_resumes_exactly_where_it_was_left(real_models: Up, model: str) -> None:
    body = {"model": model, "messages": ASK, "max_tokens": 24, "temperature": 0, "stream": True}
    with httpx.Client(base_url=real_models.url, timeout=120) as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            url = response.headers["x-resume-url"]
            whole = response.read().decode()
        events = [event for event in whole.split("\n\n") if event]
        ids = [line[4:] for event in events for line in event.splitlines() if line.startswith("id: ")]
        middle = ids[len(ids) // 2]
        rest = http.get(url, headers={"Last-Event-ID": middle}).text
    position = next(index for index, event in enumerate(events) if f"id: {middle}\n" in event)
    # A comment is no part of the stream.
    left = [event.removeprefix(": ping\n") for event in rest.split("\n\n") if event]
    assert left == events[position + 1 :]
