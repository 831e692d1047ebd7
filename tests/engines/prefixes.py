"""Asking for prompts that begin alike, and comparing what came with what comes without reuse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.prefix import PrefixRules
from headrace.messages.engine import StepOutput, Submit
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import Call, CostModel
from headrace.scheduling.knobs import SchedulingKnobs
from tests.engines.harness import (
    BAND,
    SMALL_CHUNKS,
    WITH_LOGPROBS,
    Model,
    Result,
    engine_core,
    request,
    run,
    run_one,
)

OFF = PrefixRules(enabled=False)
TOKEN_BY_TOKEN = SchedulingKnobs(step_tokens=1, max_prefill_tokens=1)
BOTH_MODELS = pytest.mark.parametrize(
    "model_name", ["tiny", pytest.param("smollm2", marks=pytest.mark.model)], ids=["tiny", "smollm2"]
)


class Believed(CostModel):
    """Prior times, never changed by how fast this machine happens to be: what is chosen is the same everywhere."""

    def learn(self, calls: Sequence[Call], took_s: float) -> None:
        pass

    def learn_move(self, band: int, took_s: float, tokens: int | None = None) -> None:
        pass


def steady(core: EngineCore) -> EngineCore:
    """The core with times and a clock of its own: a question of the time takes a millisecond."""
    core.costs.model = Believed()
    ticks = itertools.count()
    core._clock = lambda: 1e-3 * next(ticks)
    return core


def begun(core: EngineCore) -> dict[str, int]:
    """How many sequences began in which way."""
    return {kind: count for kind, count in core.residents.reuse.totals.begun.items()}


def cached(result: Result) -> int:
    """Cached prompt tokens, which only the first output tells."""
    assert all(output.cached_tokens == 0 for output in result.outputs[1:])
    return result.outputs[0].cached_tokens


def ask(name: str, prompt: Sequence[int], max_tokens: int = 12, tenant: str | None = None) -> Submit:
    """A greedy request with log-probabilities."""
    return msgspec.structs.replace(request(name, prompt, max_tokens=max_tokens, sampling=WITH_LOGPROBS), tenant=tenant)


def counted(core: EngineCore, submit: Submit) -> tuple[Result, int]:
    """The result of one request alone, and how many prompt tokens were computed for it."""
    computed: list[int] = []

    def check(_number: int, _output: StepOutput) -> None:
        computed.append(core.forward.prefill_tokens)
        assert core.check_integrity() is None

    return run(core, [submit], each_step=check)[submit.request_id], sum(computed)


ROUNDING = 2e-3
"""Log-probabilities of the synthetic model differed by up to 0.0007 between chunks that begin elsewhere; for a single
wrong token in the KV see ``test_a_single_wrong_token_in_the_kv_would_be_noticed``."""


def assert_alike(result: Result, expected: Result) -> None:
    """The same in chunks that begin elsewhere: log-probabilities up to rounding, and the same tokens at least up to
    the first near tie."""
    for got, wanted in zip(result.logprobs, expected.logprobs, strict=True):
        assert wanted.logprob is not None and got.logprob is not None
        assert got.top[0][2] == pytest.approx(wanted.top[0][2], abs=ROUNDING)
        if got.token_id != wanted.token_id:
            (_, _, best), (second, _, next_best) = wanted.top
            assert got.token_id == second and best - next_best < 2 * ROUNDING
            return
    assert (result.text, result.finish) == (expected.text, expected.finish)


def without_reuse(model: Model, *submits: Submit, bands: Sequence[Band] = (BAND,)) -> dict[str, Result]:
    """What each of them says, alone and without reuse."""
    with engine_core(model, *bands, limits=SMALL_CHUNKS, prefix=OFF) as core:
        return {submit.request_id: run_one(core, submit) for submit in submits}


def words(model: Model, count: int, start: int = 0) -> list[int]:
    """Tokens of a text without repetitions."""
    text = " ".join(f"river {n} stone {n * n} water {n * 7 % 11}" for n in range(start, start + count))
    return model.tokens(text)[:count]


# The same text
