"""One choice in the making: from drawn tokens to chunks of text that may leave.

Tokens wait until their text is let out: whole characters only, and nothing that could be the start
of a stop string. So the tokens of all chunks are exactly those behind the text that was sent.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from shared.domain import ChosenLogprob, Chunk, FinishReason, TokenLogprob
from workers.backends.protocol import Tokenizer
from workers.detokenise import Detokeniser
from workers.sampling import LogprobRow, Row, Sampler
from workers.scheduler.scheduler import Sequence
from workers.stopping import StopMatcher


@dataclass(slots=True)
class _HeldToken:
    token: int
    text: str
    logprob: ChosenLogprob | None


class Answer:
    """A choice of a request: its sequence, its sampler, and what has not been let out yet."""

    def __init__(
        self,
        *,
        choice: int,
        sequence: Sequence,
        sampler: Sampler,
        detokeniser: Detokeniser,
        stops: StopMatcher,
        tokenizer: Tokenizer,
        max_tokens: int,
        logprobs: int | None,
        vocabulary: int,
    ) -> None:
        self.choice = choice
        self.sequence = sequence
        self.finish: FinishReason | None = None
        self.sent_tokens = 0
        self._sampler = sampler
        self._detokeniser = detokeniser
        self._stops = stops
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self._vocabulary = vocabulary
        self._drawn = 0
        self._held: deque[_HeldToken] = deque()
        # Characters that may leave and have not; below zero after a replay, where some left that would be held now.
        self._let_out = 0

    def replay(self, chunks: Iterable[Chunk], finish: FinishReason | None) -> bool:
        """Take over what an earlier attempt has let out, before the first draw.

        Returns whether the tokens stand for the very text that was let out with them: if not, another
        model made them, and the answer cannot be carried on.
        """
        text = sent = ""
        for chunk in chunks:
            sent += chunk.text
            for token in chunk.tokens:
                if not 0 <= token < self._vocabulary:
                    return False
                self._sampler.drawn(token)
                self.sequence.tokens.append(token)
                piece = self._detokeniser.push(token)
                text += piece
                self._let_out += len(self._stops.push(piece)) - len(piece)
                self._drawn += 1
                self.sent_tokens += 1
        # Less text than tokens is let out only at the end: a stop string begins inside the last token, and may go on in
        # tokens that were not.
        unsent = len(text) - len(sent)
        self.finish = finish
        if finish is None and (self._stops.stopped or 0 < unsent <= -self._let_out):
            self.finish = FinishReason.STOP
        elif finish is None and self._drawn >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        return text.startswith(sent) and (unsent == 0 or self.finish is FinishReason.STOP)

    def draw(self, logits: Row) -> Chunk | None:
        """Draw the next token and return what may leave now, if anything; may set `finish`.

        `logits` (shape [vocabulary]) is consumed.
        """
        row = LogprobRow(logits, self._logprobs) if self._logprobs is not None else None
        token = self._sampler.draw(logits)
        if self._tokenizer.is_end(token):
            self.finish = FinishReason.STOP
            return self._release(self._stops.flush(), at_end=True)
        self._drawn += 1
        self.sequence.tokens.append(token)
        text = self._detokeniser.push(token)
        self._held.append(_HeldToken(token, text, self._chosen(row, token, text) if row else None))
        out = self._stops.push(text)
        if self._stops.stopped:
            self.finish = FinishReason.STOP
        elif self._drawn >= self._max_tokens:
            self.finish = FinishReason.LENGTH
            out += self._stops.flush()
        return self._release(out, at_end=self.finish is not None)

    def _release(self, out: str, *, at_end: bool) -> Chunk | None:
        """The chunk with the tokens that `out` completes, and their text.

        Only whole tokens leave, so that the log's tokens always stand for exactly the log's text;
        the one exception is a last token in which a stop string begins: it leaves with the part of
        its text before that.
        """
        self._let_out += len(out)
        text = ""
        tokens: list[int] = []
        logprobs: list[ChosenLogprob] = []
        while self._held and (len(self._held[0].text) <= self._let_out or (at_end and self._let_out > 0)):
            held = self._held.popleft()
            part = held.text[: self._let_out]
            self._let_out -= len(part)
            text += part
            tokens.append(held.token)
            if held.logprob:
                logprobs.append(held.logprob if part == held.text else _cut(held.logprob, part))
        if not tokens:
            return None
        self.sent_tokens += len(tokens)
        return Chunk(self.choice, text, tuple(tokens), tuple(logprobs))

    def _chosen(self, row: LogprobRow, token: int, text: str) -> ChosenLogprob:
        values = row.of(token)
        chosen = TokenLogprob(text, tuple(self._tokenizer.token_bytes(token)), values.chosen)
        return ChosenLogprob(chosen, tuple(self._alternative(other, value) for other, value in values.top))

    def _alternative(self, token: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TokenLogprob(raw.decode("utf-8", "backslashreplace"), tuple(raw), logprob)


def _cut(logprob: ChosenLogprob, text: str) -> ChosenLogprob:
    token = msgspec.structs.replace(logprob.token, text=text, bytes_=tuple(text.encode()))
    return msgspec.structs.replace(logprob, token=token)
