"""How many sequences fit: the probability is exact, respected, and tight."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.bench.load.lengths import parse_lengths
from headrace.kv.layout import F16, Cache, KvLayout, State, attention_rows
from headrace.plan import length_pmf
from headrace.plan.architectures import describe_named
from headrace.plan.circulating import memory_over_weights, multi_head_bytes_per_token, multi_head_sequences
from headrace.plan.seqs_plan import SeqsQuestion, lengths_of, plan_seqs
from headrace.plan.sequences import BLOCK_TOKENS, MemoryFit, SequenceSizes, sizes_of

SIZES = st.dictionaries(st.integers(1, 60), st.floats(0.05, 1), min_size=1, max_size=6).map(
    lambda chances: SequenceSizes(
        np.array(sorted(chances), np.int64),
        np.array([chances[size] for size in sorted(chances)]) / sum(chances.values()),
    )
)


def brute(sizes: SequenceSizes, count: int, memory: int) -> float:
    """The probability by convolving one by one, without any unit, offset or cut."""
    one = np.zeros(sizes.largest + 1)
    one[sizes.sizes] = sizes.probabilities
    total = np.ones(1)
    for _ in range(count):
        total = np.convolve(total, one)
    return float(total[memory + 1 :].sum())


@settings(deadline=None)
@given(SIZES, st.integers(1, 600), st.sampled_from([0.5, 0.1, 0.01, 1e-4, 1e-8]))
def test_the_answer_is_the_most_that_fit(sizes: SequenceSizes, memory: int, overflow: float) -> None:
    """By brute force: the answer's probability is accepted, that of one more is not (1e-12 is left to rounding)."""
    fit = MemoryFit(sizes, memory)
    most = fit.most(overflow)
    assert brute(sizes, most, memory) <= overflow + 1e-12
    assert brute(sizes, most + 1, memory) > overflow - 1e-12
    assert fit.overflow(most) == pytest.approx(brute(sizes, most, memory), abs=1e-12)
    assert fit.certain <= most <= fit.possible


@settings(deadline=None)
@given(SIZES, st.integers(1, 400), st.integers(0, 200), st.sampled_from([0.3, 0.001]))
def test_more_memory_holds_more_and_more_risk_too(
    sizes: SequenceSizes, memory: int, more: int, overflow: float
) -> None:
    """Monotone in the memory and in the accepted probability; the probability rises with the number."""
    fit = MemoryFit(sizes, memory)
    assert fit.most(overflow) <= MemoryFit(sizes, memory + more).most(overflow)
    assert fit.most(overflow / 10) <= fit.most(overflow)
    chances = [fit.overflow(count) for count in range(fit.possible + 2)]
    assert all(before <= after + 1e-12 for before, after in zip(chances, chances[1:], strict=False))
    assert chances[0] == 0 and chances[-1] == 1


def test_a_case_by_hand() -> None:
    """Sizes 1 and 2, equally likely, in 30: of 17 sequences more than 13 must be of size 2 to overflow."""
    sizes = SequenceSizes(np.array([1, 2]), np.array([0.5, 0.5]))
    expected = sum(comb(17, k) for k in range(14, 18)) / 2**17
    assert MemoryFit(sizes, 30).overflow(17) == pytest.approx(expected, abs=1e-15)
    assert MemoryFit(sizes, 30).most(expected) == 17
    assert MemoryFit(sizes, 30).most(expected * 0.999) == 16


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_simulated_sequences_overflow_as_often_as_promised(seed: int) -> None:
    """20,000 draws of as many lengths as were promised, from the load generator's own distributions: the share of draws
    over the memory lies within 4.5 standard deviations of the computed one, which is at most the accepted one."""
    model = describe_named("llama-3.1-8b")
    inputs, outputs = parse_lengths("lognormal(mean=600, p99=4000)"), parse_lengths("uniform(50, 400)")
    lengths = lengths_of(8192, inputs=inputs.describe(), outputs=outputs.describe(), trace=None, running=False)
    plan = plan_seqs(SeqsQuestion(model, F16, 8192, 6 << 30, 0, 0.05, None, 2.0), lengths)
    assert plan.sequences_overflow <= 0.05 < plan.one_more_overflow
    random, draws = np.random.default_rng(seed), 20_000
    shape = (draws, plan.sequences)
    drawn = inputs.sample(random, draws * plan.sequences) + outputs.sample(random, draws * plan.sequences)
    blocks = -(-np.minimum(drawn, 8192) // BLOCK_TOKENS)
    over = (blocks.reshape(shape).sum(axis=1) * BLOCK_TOKENS * 131_072 > 6 << 30).mean()
    spread = np.sqrt(plan.sequences_overflow * (1 - plan.sequences_overflow) / draws)
    assert over == pytest.approx(plan.sequences_overflow, abs=4.5 * spread)


def test_coarse_units_never_promise_too_much() -> None:
    """Sizes of no common divisor in a memory of 10^12: they are rounded up, so the answer is at most the exact one;
    a size grows by a unit at most, so the answer falls by no more than a unit's share of the mean size."""
    sizes = SequenceSizes(np.array([10_000_019, 15_000_017, 40_000_003]), np.array([0.5, 0.3, 0.2]))
    coarse = MemoryFit(sizes, 10**12)
    assert coarse.rounds_up and coarse.unit_bytes > 1
    rounded = SequenceSizes(np.array([10, 15, 40]), np.array([0.5, 0.3, 0.2]))
    exact = MemoryFit(rounded, 10**6).most(0.001)
    assert exact * (1 - coarse.unit_bytes / sizes.mean) < coarse.most(0.001) <= exact


def test_sequences_of_one_size_need_no_probability() -> None:
    """A purely recurrent model: as many as fit, whatever their lengths."""
    layout = KvLayout((), (State("state", 2, 1000),))
    blocks = length_pmf.in_blocks(length_pmf.probabilities(parse_lengths("uniform(1, 5000)"), 8192), BLOCK_TOKENS)
    fit = MemoryFit(sizes_of(blocks, layout, F16), 80_000)
    assert fit.most(0.001) == 10 and fit.overflow(10) == 0 and fit.overflow(11) == 1


def test_nothing_fits_a_memory_that_is_too_small() -> None:
    sizes = SequenceSizes(np.array([100, 200]), np.array([0.5, 0.5]))
    fit = MemoryFit(sizes, 99)
    assert (fit.most(0.5), fit.certain, fit.possible, fit.overflow(1)) == (0, 0, 0, 1)


@given(st.integers(1, 300), st.integers(0, 400))
def test_sizes_are_whole_blocks_of_the_layout(first: int, more: int) -> None:
    """A size is what the layout takes for whole blocks, a window included; probabilities sum to 1."""
    window = Cache("window", 3, attention_rows(1, 4, 4), window_tokens=200)
    layout = KvLayout((window, Cache("all", 2, attention_rows(1, 4, 4))), (State("state", 1, 7),))
    tokens = length_pmf.probabilities(parse_lengths(f"uniform({first}, {first + more})"), 1000)
    sizes = sizes_of(length_pmf.in_blocks(tokens, BLOCK_TOKENS), layout, F16)
    possible = {layout.sequence_bytes(blocks * BLOCK_TOKENS) for blocks in range(1, 9)}
    assert set(sizes.sizes.tolist()) <= possible
    assert sizes.probabilities.sum() == pytest.approx(1)
    assert sizes.smallest == layout.sequence_bytes(-(-first // BLOCK_TOKENS) * BLOCK_TOKENS)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["llama-3.1-8b", "deepseek-v4-flash", "gpt-oss-20b", "nemotron-3-nano-30b-a3b"]),
    st.integers(20, 38),
    st.sampled_from([0.2, 0.001]),
)
def test_plans_of_real_layouts_respect_the_probability(name: str, memory_bits: int, overflow: float) -> None:
    lengths = lengths_of(4096, inputs="uniform(1, 3000)", outputs="uniform(1, 500)", trace=None, running=True)
    plan = plan_seqs(SeqsQuestion(describe_named(name), F16, 4096, 1 << memory_bits, 0, overflow, None, 2.0), lengths)
    assume(plan.sequences > 0)
    assert plan.sequences_overflow <= overflow < plan.one_more_overflow
    assert plan.smallest_bytes * plan.sequences <= plan.kv_bytes
    assert plan.kv_bytes // plan.largest_bytes <= plan.sequences <= plan.kv_bytes // plan.smallest_bytes


def test_the_normal_approximation_is_judged_by_the_exact_probability() -> None:
    """With skewed lengths it promises too many: what it accepts overflows several times as often."""
    lengths = lengths_of(131_072, inputs="lognormal(mean=1155, p99=8000)", outputs="200", trace=None, running=False)
    plan = plan_seqs(SeqsQuestion(describe_named("llama-3.1-8b"), F16, 131_072, 64 << 30, 0, 0.001, None, 2.0), lengths)
    normal = next(answer for answer in plan.answers if answer.name == "normal approximation")
    assert normal.count is not None and normal.count > plan.sequences
    assert normal.overflow is not None and normal.overflow > 3 * plan.accepted_overflow


def test_the_formulas_in_circulation() -> None:
    """As they are written. 80 GB, 8 billion weights of 2 bytes: int(64 / 32) = 2, whatever the lengths are."""
    per_token = multi_head_bytes_per_token(32, 4096, F16.kv)
    assert per_token == 2 * 32 * 4096 * 2
    assert multi_head_sequences(80 * 10**9, per_token, 1000) == 152
    assert memory_over_weights(80 * 10**9, 8 * 10**9, 2) == 2
