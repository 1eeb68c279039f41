"""Prompts to tokens: the chat template, and what text from users may never become.

Text in a message that spells a special token is taken out before the template is rendered and put back as
ordinary text after it, so a user can write `<|im_end|>` and end nothing.
"""

import re
import secrets
from collections.abc import Sequence

from shared.domain import ChatMessage, ChatPrompt, Prompt, TextPrompt
from shared.errors import ErrorCode, RequestError
from workers.backends.protocol import Tokenizer
from workers.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Used for models that bring no template of their own."""


MOST_CHARACTERS_PER_TOKEN = 256
"""Beyond any token of the vocabularies in use: the longest are runs of spaces, of up to 128 or so."""


class PromptEncoder:
    """Turns prompts into tokens for one model. Used by the intake thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        specials = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None
        # Nobody outside can write a mark, since nobody outside knows it.
        self._mark = f"\ue000{secrets.token_hex(8)}"
        self._template = ChatTemplate(tokenizer.chat_template or CHATML, dict(tokenizer.special_texts))

    def check(self) -> None:
        """See whether the model's chat template is of any use.

        Raises:
            ModelLoadError: it is not; in one line.
        """
        self._template.check()

    def close(self) -> None:
        """End what renders the template."""
        self._template.close()

    def encode(self, prompt: Prompt, *, vocabulary: int, most_tokens: int) -> list[int]:
        """The tokens of a prompt; with exactly one BOS if the model wants one.

        There may be more than `most_tokens`; but a text that is certainly longer is not tokenised to count them, which
        takes seconds for some megabytes while everybody else's prompt waits.

        Raises:
            RequestError: the template refuses the conversation, a token is outside the
                vocabulary, nothing is left to continue, or the text is far too long.
        """
        if isinstance(prompt, ChatPrompt):
            tokens = self._encode_chat(prompt.messages, most_tokens)
        elif isinstance(prompt, TextPrompt):
            self._check_length(len(prompt.text), most_tokens, param="prompt")
            tokens = self._with_bos(self._tokenizer.encode(prompt.text, special=True))
        else:
            tokens = list(prompt.tokens)
            outside = [token for token in tokens if not 0 <= token < vocabulary]
            if outside:
                raise RequestError(
                    ErrorCode.INVALID_REQUEST,
                    f"Token {outside[0]} is outside the model's vocabulary of {vocabulary}.",
                    param="prompt",
                )
        if not tokens:
            raise RequestError(ErrorCode.INVALID_REQUEST, "The prompt has no tokens to continue.", param="prompt")
        return tokens

    def _encode_chat(self, messages: Sequence[ChatMessage], most_tokens: int) -> list[int]:
        spelled: list[str] = []
        disarmed = [self._disarm(message, spelled) for message in messages]
        rendered = self._template.render(disarmed, most_characters=most_tokens * MOST_CHARACTERS_PER_TOKEN)
        self._check_length(rendered.characters, most_tokens, param="messages")
        tokens: list[int] = []
        for index, part in enumerate(re.split(f"{self._mark}:([0-9]{{1,9}})\ue001", rendered.text)):
            if index % 2:
                # A template sees the marks, and could make others of them.
                tokens += self._tokenizer.encode("".join(spelled[int(part) : int(part) + 1]), special=False)
            elif part:
                tokens += self._tokenizer.encode(part, special=True)
        return self._with_bos(tokens)

    def _check_length(self, characters: int, most_tokens: int, *, param: str) -> None:
        if characters > most_tokens * MOST_CHARACTERS_PER_TOKEN:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"This model's context is {most_tokens} tokens, prompt and answer together. "
                f"The prompt has {characters} characters: shorten it.",
                param=param,
            )

    def _disarm(self, message: ChatMessage, spelled: list[str]) -> dict[str, str]:
        def mark(match: re.Match[str]) -> str:
            spelled.append(match[0])
            return f"{self._mark}:{len(spelled) - 1}\ue001"

        def clean(text: str) -> str:
            return self._specials.sub(mark, text) if self._specials else text

        # Templates know the older name of this role only.
        role = "system" if message.role == "developer" else message.role
        fields = {"role": role, "content": clean(message.content)}
        if message.name is not None:
            fields["name"] = clean(message.name)
        return fields

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token
        if bos is None:
            return tokens
        first = next((index for index, token in enumerate(tokens) if token != bos), len(tokens))
        return [bos, *tokens[first:]]
