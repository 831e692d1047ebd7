"""Request fields to sampling parameters, every range checked."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.api.wire import ChatRequest, CompletionRequest, GenerationRequest
from headrace.engines.protocol import Tokenizer
from headrace.errors import RequestError
from headrace.messages.engine import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
_MAX_TOKENS = 2**31 - 1
_SEED_RANGE = (-(2**63), 2**63 - 1)


def sampling_params(request: GenerationRequest, tokenizer: Tokenizer) -> SamplingParams:
    """Raises RequestError naming the field, its range and the value."""
    logprobs, prompt_logprobs = _logprobs(request)
    bias_text = request.logit_bias or {}
    return SamplingParams(
        temperature=_within("temperature", request.temperature, 0.0, 2.0, 1.0),
        top_p=_top_p(request.top_p),
        top_k=_top_k(request.top_k),
        min_p=_within("min_p", request.min_p, 0.0, 1.0, 0.0),
        seed=None if request.seed is None else int_within("seed", request.seed, *_SEED_RANGE),
        presence_penalty=_within("presence_penalty", request.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_within("frequency_penalty", request.frequency_penalty, -2.0, 2.0, 0.0),
        repetition_penalty=_repetition_penalty(request.repetition_penalty),
        logit_bias=_logit_bias(bias_text, tokenizer) if bias_text else {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_stop_strings(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids, tokenizer),
        include_stop_text=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def requested_max_tokens(request: GenerationRequest) -> int | None:
    """The output length that the client asked for; None: it did not say. Zero is allowed."""
    name, value = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    return None if value is None else int_within(name, value, 0, _MAX_TOKENS)


def choice_counts(request: GenerationRequest) -> tuple[int, int]:
    """``(n, best_of)``: choices to return per prompt, and sequences to generate for them."""
    n = 1 if request.n is None else int_within("n", request.n, 1, MAX_CHOICES)
    if not isinstance(request, CompletionRequest) or not request.best_of:
        return n, n
    best_of = int_within("best_of", request.best_of, 0, MAX_CHOICES)
    if best_of < n:
        raise RequestError(f"best_of ({best_of}) must not be less than n ({n})", param="best_of")
    if best_of > n and request.stream:
        raise RequestError("best_of above n cannot be streamed: the best is known only at the end", param="best_of")
    return n, best_of


def int_within(name: str, value: int, low: int, high: int) -> int:
    """``value``, or RequestError when it is outside ``low``..``high``."""
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {_shown(value)}", param=name)
    return value


def _within(name: str, value: float | None, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, not {_shown(value)}", param=name)
    return float(value)


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0.0 < value <= 1.0:
        raise RequestError(f"top_p must be above 0 and at most 1, not {_shown(value)}", param="top_p")
    return float(value)


def _top_k(value: int | None) -> int:
    # -1 is how other servers write "keep all".
    return 0 if value is None or value == -1 else int_within("top_k", value, -1, _MAX_TOKENS)


def _repetition_penalty(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0.0 < value <= 10.0:
        raise RequestError(
            f"repetition_penalty must be above 0 and at most 10, not {_shown(value)}",
            param="repetition_penalty",
        )
    return float(value)


def _logprobs(request: GenerationRequest) -> tuple[int | None, int | None]:
    """``(logprobs, prompt_logprobs)`` as the engine understands them."""
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None:
            int_within("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
            if not request.logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return (request.top_logprobs or 0) if request.logprobs else None, None
    if isinstance(request, CompletionRequest) and request.logprobs is not None:
        count = int_within("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
        return count, count if request.echo else None
    return None, None


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(strings)}", param="stop")
    for string in strings:
        if not string:
            raise RequestError("stop must not hold an empty string", param="stop")
        if len(string) > MAX_STOP_CHARACTERS:
            raise RequestError(f"a stop string is longer than {MAX_STOP_CHARACTERS} characters", param="stop")
    return strings


def _stop_token_ids(ids: list[int] | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not ids:
        return ()
    if len(ids) > MAX_LOGIT_BIASES:
        raise RequestError(f"stop_token_ids takes at most {MAX_LOGIT_BIASES} ids", param="stop_token_ids")
    return tuple(int_within("stop_token_ids", token, 0, tokenizer.vocab_size - 1) for token in ids)


def _logit_bias(bias: Mapping[str, float], tokenizer: Tokenizer) -> dict[int, float]:
    """Token ids to biases. A key that is no integer is text, all of whose tokens are biased."""
    if len(bias) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIASES} entries, not {len(bias)}", param="logit_bias")
    biases: dict[int, float] = {}
    for key, value in bias.items():
        if not -100.0 <= value <= 100.0:
            raise RequestError(
                f"logit_bias values must be between -100 and 100, not {_shown(value)}", param="logit_bias"
            )
        for token in _biased_tokens(key, tokenizer):
            biases[token] = float(value)
    return biases


def _biased_tokens(key: str, tokenizer: Tokenizer) -> list[int]:
    digits = key.removeprefix("-")
    if digits.isascii() and digits.isdigit():
        if len(key) > 18 or not 0 <= int(key) < tokenizer.vocab_size:
            raise RequestError(
                f"logit_bias names token {key[:20]}, but ids go from 0 to {tokenizer.vocab_size - 1}",
                param="logit_bias",
            )
        return [int(key)]
    if len(key) > MAX_STOP_CHARACTERS:
        raise RequestError(f"a logit_bias key is longer than {MAX_STOP_CHARACTERS} characters", param="logit_bias")
    return tokenizer.encode(key, add_special=False, parse_special=True)


def _shown(value: float) -> str:
    """A number for a message; an integer of thousands of digits is not repeated to its sender."""
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 80 else f"a number of {value.bit_length()} bits"
    return f"{value:g}"
