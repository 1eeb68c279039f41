"""Prompts to tokens: templates, and what text from users never becomes."""

import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import wait_until

from shared.domain import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from shared.errors import ErrorCode, ModelLoadError, RequestError
from workers.detokenise import ByteDetokeniser, Detokeniser
from workers.prompt import PromptEncoder

SPECIALS = {"<s>": 1000, "<|im_start|>": 1001, "<|im_end|>": 1002, "<|im|>": 1003}
VOCABULARY = 2000
CONTEXT = 1000


class CharTokenizer:
    """One token per character, and the special ones."""

    special_texts: ClassVar[dict[str, str]] = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    special_tokens: Sequence[str] = tuple(SPECIALS)

    def __init__(self, template: str | None = None, bos: int | None = None) -> None:
        self.chat_template = template
        self.bos_token = bos

    def encode(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return [ord(char) % 1000 for char in text]
        tokens = []
        for piece in re.split(f"({'|'.join(map(re.escape, SPECIALS))})", text):
            tokens += [SPECIALS[piece]] if piece in SPECIALS else [ord(char) % 1000 for char in piece]
        return tokens

    def is_end(self, token: int) -> bool:
        return token == SPECIALS["<|im_end|>"]

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:  # noqa: ARG002
        return ByteDetokeniser(self.token_bytes)


def chat(*contents: str, role: str = "user") -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage(role=role, content=content) for content in contents))


@cache
def encoder_of(template: str | None, bos: int | None) -> PromptEncoder:
    return PromptEncoder(CharTokenizer(template, bos))


def encode_chat(prompt: ChatPrompt, template: str | None = None, bos: int | None = None) -> list[int]:
    return encoder_of(template, bos).encode(prompt, vocabulary=VOCABULARY, most_tokens=CONTEXT)


def plain(text: str) -> list[int]:
    return CharTokenizer().encode(text, special=False)


CONTENT = st.lists(st.sampled_from([*SPECIALS, "<|im_", "start|>", "a", "\n", "\ue000", "\ue001", ":0", "🙂"])).map(
    "".join
)


@settings(deadline=None)
@given(CONTENT)
def test_text_in_a_message_never_becomes_a_special_token(content: str) -> None:
    tokens = encode_chat(chat(content))

    start, end = SPECIALS["<|im_start|>"], SPECIALS["<|im_end|>"]
    expected = [start, *plain("user\n"), *plain(content), end, *plain("\n"), start, *plain("assistant\n")]
    assert tokens == expected


@settings(deadline=None)
@given(CONTENT)
def test_neither_does_a_message_s_name(name: str) -> None:
    prompt = ChatPrompt((ChatMessage(role="user", content="x", name=name),))

    tokens = encode_chat(prompt, "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}")

    assert tokens == plain(f"{name}:x")


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"],
)
@pytest.mark.parametrize("content", ["hi", "<s>hi"])
def test_a_prompt_has_exactly_one_bos_if_the_model_wants_one(template: str, content: str) -> None:
    assert encode_chat(chat(content), template, bos=1000) == [1000, *plain(content)]


def test_a_raw_prompt_has_exactly_one_bos_too() -> None:
    encoder = PromptEncoder(CharTokenizer(bos=1000))

    assert encoder.encode(TextPrompt("hi"), vocabulary=VOCABULARY, most_tokens=CONTEXT) == [1000, *plain("hi")]
    assert encoder.encode(TextPrompt("<s><s>hi"), vocabulary=VOCABULARY, most_tokens=CONTEXT) == [1000, *plain("hi")]


def test_a_prompt_of_tokens_is_taken_as_it_is() -> None:
    encoder = PromptEncoder(CharTokenizer(bos=1000))

    assert encoder.encode(TokenPrompt((5, 1001, VOCABULARY - 1)), vocabulary=VOCABULARY, most_tokens=CONTEXT) == [
        5,
        1001,
        VOCABULARY - 1,
    ]


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(RequestError) as caught:
        PromptEncoder(CharTokenizer()).encode(TokenPrompt((1, token)), vocabulary=VOCABULARY, most_tokens=CONTEXT)

    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "prompt")
    assert str(token) in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(TextPrompt("a" * CONTEXT * 300), "prompt"), (chat(*["a" * CONTEXT] * 300), "messages")],
    ids=["text", "messages"],
)
def test_a_text_that_cannot_fit_is_refused_without_being_tokenised(prompt: TextPrompt | ChatPrompt, param: str) -> None:
    class NeverAsked(CharTokenizer):
        def encode(self, text: str, *, special: bool) -> list[int]:  # noqa: ARG002
            raise AssertionError

    with pytest.raises(RequestError) as caught:
        PromptEncoder(NeverAsked()).encode(prompt, vocabulary=VOCABULARY, most_tokens=CONTEXT)

    assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, param)


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokenPrompt(())])
def test_a_prompt_without_tokens_is_refused(prompt: TextPrompt | TokenPrompt) -> None:
    with pytest.raises(RequestError) as caught:
        PromptEncoder(CharTokenizer()).encode(prompt, vocabulary=VOCABULARY, most_tokens=CONTEXT)

    assert caught.value.param == "prompt"


def test_a_model_with_a_bos_continues_an_empty_prompt() -> None:
    assert PromptEncoder(CharTokenizer(bos=1000)).encode(
        TextPrompt(""), vocabulary=VOCABULARY, most_tokens=CONTEXT
    ) == [1000]


def test_the_developer_role_is_the_system_role() -> None:
    assert encode_chat(chat("x", role="developer"), "{{ messages[0].role }}") == plain("system")


def test_a_template_has_the_usual_names() -> None:
    template = (
        "{%- for m in messages %}\n    {%- if loop.first %}{% continue %}{% endif %}\n{{ m | tojson }}{% endfor %}"
        "{{ eos_token }}{% if strftime_now('%Y')|length == 4 %}!{% endif %}"
    )

    assert encode_chat(chat("a", "é"), template) == [
        *plain('{"role": "user", "content": "é"}'),
        SPECIALS["<|im_end|>"],
        *plain("!"),
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_the_request_s_error_and_breaks_out_of_nothing(template: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        encode_chat(chat("x"), template)

    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "messages")


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long range": "{{ range(10**9) | list }}",
    "a long text": "{{ 'x' * 10**10 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a great number": "{{ 10 ** (10 ** 9 * messages | length) }}",
    "padding": "{{ 'x'.center(10**10) }}",
    "formatting": "{{ '%10000000000d' % 1 }}",
    "a filter": "{{ 'x' | center(10**10) }}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "much output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "filler text": "{{ lipsum(n=99999999) }}",
    "half a character": "{{ '\\ud800' }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "attributes": "{{ messages | map(attribute='__class__') | list | tojson }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os.system('true') }}",
}
"""What a template may try that came with somebody's model."""


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_template_that_is_a_bomb_for_some_ends_their_request_and_nobody_else_s(bomb: str) -> None:
    template = "{% if messages[0].content == 'bomb' %}" + bomb + "{% endif %}{{ messages[0].content }}"
    encoder = PromptEncoder(CharTokenizer(template))
    encoder.check()

    with pytest.raises(RequestError, match="chat template") as caught:
        encoder.encode(chat("bomb"), vocabulary=VOCABULARY, most_tokens=CONTEXT)

    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "messages")
    assert encoder.encode(chat("next"), vocabulary=VOCABULARY, most_tokens=CONTEXT) == plain("next")
    encoder.close()


@pytest.mark.parametrize("template", ["{% for %}", *BOMBS.values(), "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_a_template_of_no_use_is_found_at_load(template: str) -> None:
    encoder = PromptEncoder(CharTokenizer(template))

    with pytest.raises(ModelLoadError, match="the model's chat template") as caught:
        encoder.check()

    assert "\n" not in str(caught.value)
    encoder.close()


def test_a_template_that_makes_up_marks_finds_nothing_behind_them() -> None:
    template = "{{ messages[0].content | replace(':0', ':7') }}{{ messages[0].content }}"

    assert encode_chat(chat("<s>"), template) == plain("<s>")


def test_a_template_s_process_that_was_ended_is_replaced() -> None:
    before = set(psutil.Process().children())
    encoder = PromptEncoder(CharTokenizer("{{ messages[0].content }}"))
    encoder.check()
    (process,) = set(psutil.Process().children()) - before
    process.kill()
    process.wait(10)

    assert encoder.encode(chat("next"), vocabulary=VOCABULARY, most_tokens=CONTEXT) == plain("next")
    encoder.close()


def test_a_template_s_process_ends_with_its_worker() -> None:
    script = (
        "import os, psutil\n"
        "from workers.chat_template import ChatTemplate\n"
        "ChatTemplate('x', {}).check()\n"
        "template = ChatTemplate('x', {}); template.check()\n"
        "print(*[child.pid for child in psutil.Process().children()], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    left = [int(pid) for pid in done.stdout.split()]
    assert left
    wait_until(lambda: not any(map(psutil.pid_exists, left)), what="the end of the process")
