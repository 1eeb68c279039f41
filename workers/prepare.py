"""From a request to answers in the making: tokens, limits, samplers."""

from collections.abc import Iterable

from shared.domain import (
    Accepted,
    ChatPrompt,
    Chunk,
    Done,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Prompt,
)
from shared.errors import ErrorCode, RequestError
from workers.answer import Answer
from workers.attempt import Attempt
from workers.backends.protocol import Backend
from workers.prompt import PromptEncoder
from workers.sampling import Sampler
from workers.scheduler.scheduler import Sequence
from workers.stopping import StopMatcher


def prepare(attempt: Attempt, encoder: PromptEncoder, backend: Backend) -> None:
    """Fill in the attempt's answers and the length of its prompts.

    Raises:
        RequestError: a prompt cannot be encoded or leaves no room for an answer.
    """
    request = attempt.request
    prompts = [_encode(prompt, encoder, backend) for prompt in request.prompts]
    attempt.prompt_tokens = sum(map(len, prompts))
    attempt.answers = [
        _answer(request, choice, prompts[choice // request.n], backend) for choice in range(request.choices)
    ]


def carry_on(attempt: Attempt, past: Iterable[Event]) -> list[Event]:
    """Take over what earlier attempts have written, and return what is to be written before the first step.

    Raises:
        RequestError: `worker_lost` when this worker's model is not the one that wrote it.
    """
    chunks: dict[int, list[Chunk]] = {}
    finished: dict[int, FinishReason] = {}
    events: list[Event] = [Accepted(attempt.prompt_tokens)]
    for event in past:
        match event:
            case Accepted():
                events = []
            case Chunk(choice):
                chunks.setdefault(choice, []).append(event)
            case Finished(choice, reason):
                finished[choice] = reason
    for answer in attempt.answers:
        before = finished.get(answer.choice)
        if not answer.replay(chunks.get(answer.choice, ()), before):
            raise RequestError(
                ErrorCode.WORKER_LOST,
                "The worker that ran this request died, and the model has changed since. The request can be retried.",
            )
        if answer.finish is not None and before is None:
            events.append(Finished(answer.choice, answer.finish))
    if attempt.is_finished:
        events.append(Done(attempt.usage))
    return events


def _encode(prompt: Prompt, encoder: PromptEncoder, backend: Backend) -> list[int]:
    context = backend.description.context
    tokens = encoder.encode(prompt, vocabulary=backend.description.vocabulary, most_tokens=context)
    if len(tokens) >= context:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's context is {context} tokens, prompt and answer together. "
            f"The prompt has {len(tokens)} tokens: shorten it.",
            param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
        )
    return tokens


def _answer(request: GenerationRequest, choice: int, prompt: list[int], backend: Backend) -> Answer:
    room = backend.description.context - len(prompt)
    return Answer(
        choice=choice,
        sequence=Sequence(list(prompt), len(prompt)),
        sampler=Sampler(request.sampling, choice=choice, prompt=prompt, vocabulary=backend.description.vocabulary),
        detokeniser=backend.tokenizer.detokeniser(prompt),
        stops=StopMatcher(request.stop),
        tokenizer=backend.tokenizer,
        max_tokens=min(room, request.max_tokens or room),
        logprobs=request.logprobs,
        vocabulary=backend.description.vocabulary,
    )
