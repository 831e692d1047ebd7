"""Choosing tokens: libllama's sampler chain, with a direct path for plain greedy, and log-probabilities."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engines.llama.library import Library
from headrace.messages.engine import SamplingParams, TokenLogprob

Logits = npt.NDArray[np.float32]

GREEDY_BELOW_TEMPERATURE = 1e-5
"""A logit divided by less leaves single precision, and what is drawn then is no longer the likeliest."""


def fold_seed(seed: int | None, *, draw: Callable[[int], bytes] = os.urandom) -> int:
    """A 32-bit seed for libllama from any integer; a random one for None. Never the value that libllama
    itself takes to mean "random"."""
    value = int.from_bytes(draw(4), "little") if seed is None else (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return value if value != 0xFFFFFFFF else 0x7FFFFFFF


class Sampler:
    """The sampler of one sequence. ``close`` frees libllama's part; safe to call twice."""

    __slots__ = ("_api", "_chain", "_sample")

    def __init__(self, library: Library, params: SamplingParams, vocab_size: int, context_tokens: int) -> None:
        self._api = library.api
        self._chain = _build_chain(library.api, params, vocab_size, context_tokens)
        self._sample = library.api.llama_sampler_sample

    def choose(self, context: Any, output_index: int, logits: Logits) -> int:
        """The next token for output ``output_index`` of the last decode call of ``context``."""
        if self._chain is None:
            return int(logits.argmax())
        return int(self._sample(self._chain, context, output_index))

    def close(self) -> None:
        if self._chain is not None:
            self._api.llama_sampler_free(self._chain)
            self._chain = None


def _build_chain(api: Any, params: SamplingParams, vocab_size: int, context_tokens: int) -> Any:
    """libllama's chain for ``params`` in the order that ``SamplingParams`` states; None for plain greedy."""
    stages: list[Any] = []
    if params.logit_bias:
        entries = (api.llama_logit_bias * len(params.logit_bias))()
        for entry, (token, bias) in zip(entries, params.logit_bias.items(), strict=True):
            entry.token, entry.bias = token, bias
        stages.append(api.llama_sampler_init_logit_bias(vocab_size, len(params.logit_bias), entries))
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        stages.append(
            api.llama_sampler_init_penalties(
                vocab_size,
                context_tokens,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        )
    if params.temperature < GREEDY_BELOW_TEMPERATURE:
        if not stages:
            return None
        stages.append(api.llama_sampler_init_greedy())
    else:
        if params.top_k > 0:
            stages.append(api.llama_sampler_init_top_k(params.top_k))
        if params.temperature != 1.0:
            stages.append(api.llama_sampler_init_temp(params.temperature))
        if params.top_p < 1.0:
            stages.append(api.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            stages.append(api.llama_sampler_init_min_p(params.min_p, 1))
        stages.append(api.llama_sampler_init_dist(fold_seed(params.seed)))
    chain_params = api.llama_sampler_chain_default_params()
    chain_params.no_perf = True
    chain = api.llama_sampler_chain_init(chain_params)
    for stage in stages:
        api.llama_sampler_chain_add(chain, stage)
    return chain


def logits_at(address: int, vocab_size: int) -> Logits:
    """A view, not a copy, of one row of libllama's logits; valid until the next decode call."""
    row = (ctypes.c_float * vocab_size).from_address(address)
    return np.frombuffer(memoryview(row).cast("B"), dtype=np.float32)


def log_probability(logits: Logits, token_id: int, top: int, token_bytes: Callable[[int], bytes]) -> TokenLogprob:
    """Log-probability (natural log) of ``token_id`` under softmax(logits) and of the ``top`` likeliest tokens.

    Computed in double precision over the whole vocabulary: log p_i = x_i - max - log(sum(exp(x - max))).
    """
    peak = float(logits.max())
    normaliser = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    best: list[tuple[int, bytes, float]] = []
    if top > 0:
        top = min(top, len(logits))
        candidates = np.argpartition(logits, -top)[-top:]
        for index in candidates[np.argsort(-logits[candidates], kind="stable")]:
            best.append((int(index), token_bytes(int(index)), float(logits[index]) - normaliser))
    return TokenLogprob(
        token_id=token_id,
        token_bytes=token_bytes(token_id),
        logprob=float(logits[token_id]) - normaliser,
        top=best,
    )
