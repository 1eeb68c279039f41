"""Bodies that clients send, as examples. Each is taken by a server that serves the model which comes with it."""

from typing import Any

MODEL = "smollm2"

HELLO = {"role": "user", "content": "Say hello in French."}

CHATS: dict[str, dict[str, Any]] = {
    "whole": {"model": MODEL, "messages": [HELLO], "max_completion_tokens": 16},
    "streamed": {
        "model": MODEL,
        "messages": [HELLO],
        "max_completion_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "several turns": {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are brief."},
            HELLO,
            {"role": "assistant", "content": "Bonjour !"},
            {"role": "user", "content": [{"type": "text", "text": "And in German?"}]},
        ],
        "max_completion_tokens": 16,
    },
    "sampled": {
        "model": MODEL,
        "messages": [HELLO],
        "max_completion_tokens": 16,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"11": -5},
        "seed": 7,
        "stop": ["\n\n"],
        "n": 2,
    },
    "with logprobs": {
        "model": MODEL,
        "messages": [HELLO],
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "in the background": {"model": MODEL, "messages": [HELLO], "max_completion_tokens": 16, "service_tier": "flex"},
}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "whole": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16},
    "streamed": {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "several prompts": {"model": MODEL, "prompt": ["Once upon a time", "The mill"], "max_tokens": 16, "stop": "\n"},
    "tokens": {"model": MODEL, "prompt": [10, 11, 12], "max_tokens": 16, "temperature": 0},
    "several prompts of tokens": {"model": MODEL, "prompt": [[10, 11, 12], [13]], "max_tokens": 4, "logprobs": 2},
}
