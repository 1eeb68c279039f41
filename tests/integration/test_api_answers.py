"""Answers of the real server, judged with the official client."""

from collections.abc import Callable

import openai
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd

StartWorker = Callable[..., ScriptedWorker]

HELLO = [{"role": "user", "content": "hello"}]


def openai_client(front_end: FrontEnd) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0, timeout=20)


def test_a_whole_chat_answer_is_what_the_worker_said(front_end: FrontEnd, start_worker: StartWorker) -> None:
    start_worker(say_words("Good", " day"))

    with openai_client(front_end) as client:
        answer = client.chat.completions.create(model="scripted", messages=HELLO)

    assert answer.choices[0].message.content == "Good day"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 9


def test_a_streamed_chat_answer_joins_to_the_same_text(front_end: FrontEnd, start_worker: StartWorker) -> None:
    start_worker(say_words("Good", " day"))

    with openai_client(front_end) as client:
        chunks = list(client.chat.completions.create(model="scripted", messages=HELLO, stream=True))

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Good day"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
