"""Sampling parameters, from the seed to the text, against distributions computed with numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.llama.sampling import Sampler, fold_seed, log_probability
from headrace.messages.engine import SamplingParams
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from tests.engines.harness import (
    LogProbs,
    Model,
    Reference,
    engine_core,
    log_softmax,
    request,
    run,
    run_one,
)

BAND = Band(512, 8)
DRAWS = 4000


@pytest.fixture(scope="module")
def prompt(tiny: Model) -> list[int]:
    return tiny.tokens("the river runs along the channel")


@pytest.fixture(scope="module")
def first(tiny: Model, tiny_reference: Reference, prompt: list[int]) -> LogProbs:
    """Log-probabilities of the first generated token."""
    row: LogProbs = tiny_reference.log_probs(prompt)[-1]
    return row


def generate(model: Model, prompt: Sequence[int], sampling: SamplingParams, count: int = 12) -> list[int]:
    """Tokens for ``prompt``, computed token by token as the reference does."""
    with engine_core(model, BAND, limits=SchedulingKnobs(1, 1)) as core:
        return run_one(core, request("r", prompt, max_tokens=count, sampling=sampling)).tokens


def draws(model: Model, prompt: Sequence[int], make: Callable[[int], SamplingParams]) -> Counter[int]:
    """The first token of ``DRAWS`` sequences whose parameters ``make`` gives: one forward pass, as many
    samplers."""
    with engine_core(model, BAND) as core:
        context = core.context(0)
        context.batch.clear()
        index = context.batch.add_chunk(list(prompt), 0, 0, last_output=True, all_outputs=False)
        context.decode()
        logits = context.logits(index)
        counts: Counter[int] = Counter()
        for seed in range(DRAWS):
            sampler = Sampler(model.library, make(seed), model.weights.vocab_size, 512)
            counts[sampler.choose(context.handle, index, logits)] += 1
            sampler.close()
        return counts


def furthest(counts: Counter[int], log_probs: LogProbs) -> float:
    """The largest difference between a token's frequency and its probability."""
    frequency = np.zeros(len(log_probs))
    frequency[list(counts)] = np.array(list(counts.values())) / counts.total()
    return float(np.abs(frequency - np.exp(log_probs)).max())


BOUND = math.sqrt(math.log(2 * 512 * 1e6) / (2 * DRAWS))
"""Hoeffding's inequality for 512 tokens at once: right probabilities exceed it with a chance below 1e-6, for
seeds chosen once. Its 0.051 is small beside the effects looked for, which each test also checks."""


def cut_top_p(log_probs: LogProbs, top_p: float) -> LogProbs:
    """The smallest set of likeliest tokens whose probabilities reach ``top_p``, normalised."""
    order = np.argsort(-log_probs)
    reach = int(np.searchsorted(np.cumsum(np.exp(log_probs[order])), top_p)) + 1
    return only(log_probs, order[:reach])


def cut_min_p(log_probs: LogProbs, min_p: float) -> LogProbs:
    """Tokens at least ``min_p`` times as likely as the likeliest, normalised."""
    return only(log_probs, np.flatnonzero(log_probs >= log_probs.max() + math.log(min_p)))


def only(log_probs: LogProbs, kept: np.ndarray[tuple[int], np.dtype[np.intp]]) -> LogProbs:
    result = np.full_like(log_probs, -np.inf)
    result[kept] = log_softmax(log_probs[kept])
    return result


def test_frequencies_are_the_softmax(tiny: Model, prompt: list[int], first: LogProbs) -> None:
    """At temperature 1 with nothing cut, over consecutive seeds: the distribution itself. The bound tells
    it from that of another temperature."""
    counts = draws(tiny, prompt, lambda seed: SamplingParams(seed=seed))
    assert furthest(counts, first) < BOUND
    assert furthest(counts, log_softmax(first / 0.5)) > BOUND
    assert furthest(counts, log_softmax(first / 1.5)) > BOUND


@pytest.mark.parametrize("temperature", [0.4, 1.6])
def test_temperature_divides_the_logits(tiny: Model, prompt: list[int], first: LogProbs, temperature: float) -> None:
    """Softmax of logits / temperature, and not of the logits."""
    counts = draws(tiny, prompt, lambda seed: SamplingParams(seed=seed, temperature=temperature))
    assert furthest(counts, log_softmax(first / temperature)) < BOUND
    assert furthest(counts, first) > BOUND


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param(SamplingParams(top_k=5), lambda p: only(p, np.argsort(-p)[:5]), id="top_k"),
        pytest.param(SamplingParams(top_p=0.9), lambda p: cut_top_p(p, 0.9), id="top_p"),
        pytest.param(SamplingParams(min_p=0.03), lambda p: cut_min_p(p, 0.03), id="min_p"),
        pytest.param(
            SamplingParams(top_k=40, temperature=1.5, top_p=0.8, min_p=0.05),
            lambda p: cut_min_p(cut_top_p(log_softmax(only(p, np.argsort(-p)[:40]) / 1.5), 0.8), 0.05),
            id="all, in the stated order",
        ),
    ],
)
def test_cuts_keep_exactly_their_tokens_and_renormalise(
    tiny: Model,
    prompt: list[int],
    first: LogProbs,
    sampling: SamplingParams,
    expected: Callable[[LogProbs], LogProbs],
) -> None:
    """No token outside the support is ever drawn, all likely ones inside are, at their new frequencies."""
    distribution = expected(first)
    support = set(np.flatnonzero(np.isfinite(distribution)))
    assert 1 < len(support) < 100 < len(first)
    counts = draws(tiny, prompt, lambda seed: _with_seed(sampling, seed))
    assert set(counts) <= support
    # A token of probability p is missed by all draws with chance (1-p)^DRAWS, below 1e-8 at 0.005.
    assert {int(token) for token in np.flatnonzero(distribution > math.log(0.005))} <= set(counts)
    assert furthest(counts, distribution) < BOUND


def _with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    values = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
    return SamplingParams(**{**values, "seed": seed})


def test_a_seed_decides_the_text_alone_and_in_a_batch(tiny: Model, prompt: list[int]) -> None:
    """Same seed, same tokens, whoever runs beside it; n choices with seeds of their own differ."""
    submits = [request(f"n{seed}", prompt, sampling=SamplingParams(seed=seed)) for seed in (1, 2, 3, 1)]
    submits[-1] = request("again", prompt, sampling=SamplingParams(seed=1))
    with engine_core(tiny, BAND) as core:
        alone = run_one(core, submits[0])
        together = run(core, submits)
        once_more = run(core, submits)
    assert alone.tokens == together["n1"].tokens == together["again"].tokens
    assert {k: r.tokens for k, r in together.items()} == {k: r.tokens for k, r in once_more.items()}
    assert len({tuple(together[f"n{seed}"].tokens) for seed in (1, 2, 3)}) == 3


def test_without_a_seed_two_runs_differ(tiny: Model, prompt: list[int]) -> None:
    """Sixteen tokens from a flat distribution: equal by chance with a probability far below 1e-12."""
    free = SamplingParams(temperature=2.0)
    assert generate(tiny, prompt, free, 16) != generate(tiny, prompt, free, 16)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(temperature=0.0), id="temperature 0"),
        pytest.param(SamplingParams(top_k=1, seed=5), id="top_k 1"),
        pytest.param(SamplingParams(top_p=1e-6, seed=5), id="top_p tiny"),
        pytest.param(SamplingParams(min_p=1.0, seed=5), id="min_p 1"),
        pytest.param(SamplingParams(temperature=1e-6, seed=5), id="temperature tiny"),
        pytest.param(SamplingParams(temperature=1e-38, seed=5), id="temperature at the edge of a float"),
        pytest.param(SamplingParams(temperature=0.0, logit_bias={7: -0.0}), id="greedy through a chain"),
    ],
)
def test_ways_to_say_greedy_are_greedy(
    tiny: Model, tiny_reference: Reference, prompt: list[int], sampling: SamplingParams
) -> None:
    """Each leaves only the likeliest token."""
    expected, _ = tiny_reference.greedy(prompt, 12, frozenset())
    assert generate(tiny, prompt, sampling) == expected


def test_logit_bias_forces_and_forbids(tiny: Model, tiny_reference: Reference, prompt: list[int]) -> None:
    """+100 makes any token the only one, -100 takes it away: the next likeliest comes."""
    expected, rows = tiny_reference.greedy(prompt, 1, frozenset())
    runner_up = int(np.argsort(-rows[0])[1])
    forced = SamplingParams(temperature=0.0, logit_bias={77: 100.0})
    assert generate(tiny, prompt, forced, 4) == [77] * 4
    sampled = SamplingParams(temperature=1.0, seed=3, logit_bias={77: 100.0})
    assert generate(tiny, prompt, sampled, 4) == [77] * 4
    forbidden = SamplingParams(temperature=0.0, logit_bias={expected[0]: -100.0})
    assert generate(tiny, prompt, forbidden, 1) == [runner_up]
    assert expected[0] not in generate(tiny, prompt, forbidden, 30)


def test_bias_for_ids_outside_the_vocabulary_changes_nothing(
    tiny: Model, tiny_reference: Reference, prompt: list[int]
) -> None:
    """The API refuses them; the engine survives them."""
    expected, _ = tiny_reference.greedy(prompt, 6, frozenset())
    strange = SamplingParams(temperature=0.0, logit_bias={-1: 100.0, 512: 100.0, 2**31 - 1: 100.0})
    assert generate(tiny, prompt, strange, 6) == expected


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence"),
    [(1.5, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 1.1, 0.0), (1.0, 0.0, 1.7), (1.0, -0.9, 0.0), (1.2, 0.4, 0.6)],
)
def test_penalties_follow_their_formula_over_generated_tokens_only(
    tiny: Model, tiny_reference: Reference, prompt: list[int], repetition: float, frequency: float, presence: float
) -> None:
    """Replayed in numpy: a logit is divided (multiplied when negative) by the repetition penalty once its
    token was generated, then loses frequency * count + presence. Prompt tokens do not count."""
    sampling = SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    count = 60
    tokens = generate(tiny, prompt, sampling, count)
    raw = tiny_reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    seen: Counter[int] = Counter()
    for index, token in enumerate(tokens):
        logits = raw[index].astype(np.float64)
        for known, times in seen.items():
            logits[known] = logits[known] * repetition if logits[known] <= 0 else logits[known] / repetition
            logits[known] -= frequency * times + presence
        assert logits.max() - logits[token] < 1e-4, "single precision, a few operations on logits below 20"
        seen[token] += 1
    assert tokens != tiny_reference.greedy(prompt, count, frozenset())[0]


def test_log_probabilities_are_those_of_the_model_whatever_is_sampled(
    tiny: Model, tiny_reference: Reference, prompt: list[int]
) -> None:
    """Natural log of the softmax before bias, penalties, temperature and cuts: equal to numpy's, the
    likeliest first, and all of them sum to one."""
    vocabulary = tiny.weights.vocab_size
    sampling = SamplingParams(
        temperature=1.7, top_k=50, seed=11, logprobs=vocabulary, presence_penalty=0.5, logit_bias={9: 3.0}
    )
    with engine_core(tiny, BAND, limits=SchedulingKnobs(1, 1)) as core:
        result = run_one(core, request("r", prompt, max_tokens=8, sampling=sampling))
    rows = tiny_reference.log_probs([*prompt, *result.tokens[:-1]])[len(prompt) - 1 :]
    assert len(result.logprobs) == len(result.tokens) == 8
    for entry, token, row in zip(result.logprobs, result.tokens, rows, strict=True):
        assert entry.token_id == token and entry.token_bytes == tiny.vocabulary.token_bytes(token)
        assert entry.logprob == pytest.approx(row[token], abs=1e-6)
        assert sorted(t for t, _, _ in entry.top) == list(range(vocabulary))
        assert [p for _, _, p in entry.top] == pytest.approx([row[t] for t, _, _ in entry.top], abs=1e-6)
        assert [p for _, _, p in entry.top] == pytest.approx(np.sort(row)[::-1], abs=1e-6)
        assert sum(math.exp(p) for _, _, p in entry.top) == pytest.approx(1.0, abs=1e-6)


def test_no_log_probabilities_unless_asked_and_none_beside_with_zero(tiny: Model, prompt: list[int]) -> None:
    """None: nothing. 0: the chosen token's alone."""
    with engine_core(tiny, BAND) as core:
        without = run_one(core, request("a", prompt, max_tokens=3))
        alone = run_one(core, request("b", prompt, max_tokens=3, sampling=SamplingParams(temperature=0, logprobs=0)))
    assert all(output.logprobs is None for output in without.outputs)
    assert [len(entry.top) for entry in alone.logprobs] == [0, 0, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=60),
    st.integers(0, 80),
    st.data(),
)
def test_log_probability_equals_numpys_log_softmax(values: list[float], top: int, data: st.DataObject) -> None:
    """For any logits, ties included: value, order, and no more entries than the vocabulary has."""
    logits = np.array(values, np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    entry = log_probability(logits, token, top, lambda t: b"%d" % t)
    expected = log_softmax(logits)
    assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
    best = sorted(expected, reverse=True)[:top]
    assert [p for _, _, p in entry.top] == pytest.approx(best, abs=1e-5)
    assert len({t for t, _, _ in entry.top}) == len(entry.top) == min(top, len(values))


@given(st.none() | st.integers(-(2**63), 2**64 - 1))
def test_any_seed_becomes_one_that_libllama_takes_as_it_is(seed: int | None) -> None:
    """32 bits, never libllama's own mark for "random"; small seeds stay what they are."""
    folded = fold_seed(seed, draw=lambda count: b"\xff" * count)
    assert 0 <= folded < 0xFFFFFFFF
    if seed is not None and 0 <= seed < 0xFFFFFFFF:
        assert folded == seed


def test_seeds_that_differ_only_in_high_bits_differ() -> None:
    """64-bit seeds are folded, not cut."""
    assert len({fold_seed(1 + (high << 32)) for high in range(100)}) == 100


def test_a_closed_sampler_may_be_closed_again(tiny: Model) -> None:
    """Ends of a sequence may meet: abort and failure in one step."""
    sampler = Sampler(tiny.library, SamplingParams(seed=1), tiny.weights.vocab_size, 512)
    sampler.close()
    sampler.close()
