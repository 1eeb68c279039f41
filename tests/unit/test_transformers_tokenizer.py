"""The transformers tokenizer: special tokens, bytes, and characters that span tokens."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("transformers")

from models import smollm2_folder
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workers.backends.transformers_tokenizer import TransformersTokenizer
from workers.detokenise import ByteDetokeniser, WindowDetokeniser

pytestmark = pytest.mark.torch

IM_END = 2
EMOJI = "Ok 👩🏽‍🚀 naïve 漢字!"


@pytest.fixture(scope="module")
def smollm2() -> TransformersTokenizer:
    return TransformersTokenizer(AutoTokenizer.from_pretrained(smollm2_folder()), [IM_END])


@pytest.fixture(scope="module")
def sentencepiece() -> TransformersTokenizer:
    """A vocabulary as Llama 2 has it: words with a leading ▁, and bytes for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁", "o", "k"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    rust = RustTokenizer(BPE(vocabulary, [], byte_fallback=True, ignore_merges=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rust.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return TransformersTokenizer(fast, [2])


def detokenised(tokenizer: TransformersTokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    detokeniser = tokenizer.detokeniser(prompt)
    return [detokeniser.push(token) for token in tokens]


def test_text_from_users_never_becomes_a_special_token(smollm2: TransformersTokenizer) -> None:
    for text in smollm2.special_tokens:
        tokens = smollm2.encode(f"a{text}b", special=False)
        assert not {smollm2.encode(each, special=True)[0] for each in smollm2.special_tokens} & set(tokens)
        assert "".join(detokenised(smollm2, [], tokens)) == f"a{text}b"


def test_template_text_becomes_special_tokens_and_nothing_is_added(smollm2: TransformersTokenizer) -> None:
    assert smollm2.encode("<|im_start|>", special=True) == [1]
    assert smollm2.encode("a<|im_end|>", special=True)[-1] == IM_END


def test_what_templates_need_is_there(smollm2: TransformersTokenizer) -> None:
    assert "add_generation_prompt" in (smollm2.chat_template or "")
    assert smollm2.special_texts["eos_token"] == "<|im_end|>"
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(smollm2.special_tokens)


def test_of_several_templates_the_default_one_is_taken() -> None:
    fast = AutoTokenizer.from_pretrained(smollm2_folder())
    fast.chat_template = {"tool_use": "tools", "default": "plain"}
    assert TransformersTokenizer(fast, []).chat_template == "plain"


def test_a_first_token_is_wanted_only_where_the_tokenizer_adds_one(
    smollm2: TransformersTokenizer, sentencepiece: TransformersTokenizer
) -> None:
    assert smollm2.bos_token is None
    assert sentencepiece.bos_token == 1
    assert 1 not in sentencepiece.encode("Hello", special=True)


def test_end_tokens_end_an_answer(smollm2: TransformersTokenizer) -> None:
    assert smollm2.is_end(IM_END)
    assert not smollm2.is_end(IM_END + 50)


def test_the_bytes_of_tokens_join_to_the_text(smollm2: TransformersTokenizer) -> None:
    tokens = smollm2.encode(EMOJI, special=False)
    assert b"".join(map(smollm2.token_bytes, tokens)) == EMOJI.encode()


def test_every_token_of_the_vocabulary_has_bytes_except_special_ones(smollm2: TransformersTokenizer) -> None:
    fast = AutoTokenizer.from_pretrained(smollm2_folder())
    special = {token for token, entry in fast.added_tokens_decoder.items() if entry.special}
    without = {token for token in range(len(fast)) if not smollm2.token_bytes(token)}
    assert without == special


def test_a_token_beyond_the_vocabulary_has_no_bytes(smollm2: TransformersTokenizer) -> None:
    assert smollm2.token_bytes(49_152 + 7) == b""


def test_an_emoji_split_over_tokens_comes_out_whole(smollm2: TransformersTokenizer) -> None:
    tokens = smollm2.encode(EMOJI, special=False)
    assert len(tokens) > len(EMOJI) / 2
    pieces = detokenised(smollm2, smollm2.encode("Say it: ", special=False), tokens)
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_have_no_text(smollm2: TransformersTokenizer) -> None:
    tokens = smollm2.encode("yes<|im_end|>", special=True)
    assert "".join(detokenised(smollm2, [], tokens)) == "yes"


def test_byte_level_vocabularies_decode_by_bytes_and_others_by_window(
    smollm2: TransformersTokenizer, sentencepiece: TransformersTokenizer
) -> None:
    assert isinstance(smollm2.detokeniser([]), ByteDetokeniser)
    assert isinstance(sentencepiece.detokeniser([]), WindowDetokeniser)


def test_sentencepiece_words_keep_their_space_and_bytes_join_to_characters(
    sentencepiece: TransformersTokenizer,
) -> None:
    prompt = sentencepiece.encode(" Hello", special=False)
    answer = sentencepiece.encode(" world ok 👍", special=False)
    pieces = detokenised(sentencepiece, prompt, answer)
    assert "".join(pieces) == " world ok 👍"
    assert "👍" in pieces
    assert b"".join(map(sentencepiece.token_bytes, answer)) == " world ok 👍".encode()


def test_threads_that_encode_both_ways_do_not_disturb_each_other(smollm2: TransformersTokenizer) -> None:
    def encode(number: int) -> Any:
        return smollm2.encode("x<|im_end|>", special=number % 2 == 0)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(encode, range(400)))
    assert found == [encode(number) for number in range(400)]
