"""Step times from data sheets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.plan.architectures import architectures
from headrace.scheduling.cost import prefill_pairs
from headrace.simulate.hardware.attention import Attended
from headrace.simulate.hardware.efficiency import Efficiency
from headrace.simulate.hardware.links import all_reduce_s, all_to_all_s
from headrace.simulate.hardware.precision import Precision, arithmetic
from headrace.simulate.hardware.profiles import hardware_named
from headrace.simulate.hardware.roofline import Parallel, Roofline
from headrace.simulate.hardware.work import Chunk, Work

IDEAL = Efficiency(
    compute=1.0, compute_fp8=1.0, compute_fp4=1.0, memory=1.0, link=1.0, step_s=0.0, kernel_s=0.0, link_latency_s=0.0
)


def roofline(model: str, hardware: str, efficiency: Efficiency = IDEAL, **more: object) -> Roofline:
    return Roofline(
        hardware_named(hardware),
        architectures()[model],
        efficiency=efficiency,
        **more,  # type: ignore[arg-type]
    )


def test_one_decode_reads_all_weights_once() -> None:
    """On ideal hardware a token of an 8-billion model takes what its 15 GB of weights and its context take to read;
    activations are below 1 %."""
    times = roofline("llama-3.1-8b", "h100")
    weights_bytes = 2 * times.matrices.active_parameters
    context_bytes = 1001 * 131_072
    expected_s = (weights_bytes + context_bytes) / 3.35e12
    assert times.call_s(1, 1000) == pytest.approx(expected_s, rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    """2 flops for every weight and token, and attention beside them; the vocabulary's matrix sees one row."""
    times = roofline("llama-3.1-8b", "h100")
    tokens = 4096
    head = 4096 * 128_256
    flops = 2 * (times.matrices.active_parameters - head) * tokens + 32 * 4 * 4096 * prefill_pairs(0, tokens)
    assert times.pass_s(Work(chunks=(Chunk(0, tokens),))) == pytest.approx(
        flops / 989e12 + 2 * head / 3.35e12, rel=0.01
    )


def test_tensor_parallelism_divides_weights_and_adds_sums() -> None:
    """Two ideal ranks take half the reading, and all-reduces on top."""
    one, two = (roofline("llama-3.1-70b", "h200", parallel=Parallel(tensor)) for tensor in (1, 2))
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2)
    sums_s = 160 * all_reduce_s(two.hardware, IDEAL, 8192 * 2, 2)
    # Inputs of the matrices are read by every rank: below 1 %.
    assert two.call_s(1, 1000) == pytest.approx(one.call_s(1, 1000) / 2 + sums_s, rel=0.01)


def test_fp8_halves_what_is_read_and_fp4_runs_in_what_there_is() -> None:
    """FP4 weights are computed in FP8 on an H100 and in FP16 on an A100."""
    assert arithmetic(hardware_named("h100"), "fp4") == "fp8"
    assert arithmetic(hardware_named("a100"), "fp4") == "f16"
    assert arithmetic(hardware_named("b200"), "fp4") == "fp4"
    plain = roofline("llama-3.1-8b", "h100")
    halved = roofline("llama-3.1-8b", "h100", precision=Precision("fp8", kv="fp8"))
    head_bytes = 2 * 4096 * 128_256
    assert halved.weight_bytes - 2 * head_bytes == pytest.approx((plain.weight_bytes - 2 * head_bytes) / 2)
    assert halved.kv_bytes_per_token() == plain.kv_bytes_per_token() / 2


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    """One token of DeepSeek-V3 reads 8 of 256 experts a layer, a thousand tokens read all."""
    times = roofline("deepseek-v3", "b200", parallel=Parallel(8), precision=Precision("fp8"))
    few_s, many_s = times.call_s(1, 100), times.call_s(1000, 100_000)
    assert few_s < many_s / 5
    active_bytes = times.matrices.active_parameters + 7168 * 129_280  # the head stays in 16 bits
    # Latents are not divided among ranks, and small matrices have their activations beside them: 25 %.
    assert few_s == pytest.approx(active_bytes / 8 / 7.7e12, rel=0.25)


def test_expert_parallelism_holds_each_expert_once() -> None:
    """DeepSeek-V4-Pro on eight B200 with data parallelism 8, FP4 experts, FP8 beside them: it fits, and there is room
    for KV. Without sharing experts it does not."""
    precision = Precision("fp8", experts="fp4", kv="fp8")
    shared = roofline("deepseek-v4-pro", "b200", parallel=Parallel(1, 8, expert=True), precision=precision)
    alone = roofline("deepseek-v4-pro", "b200", parallel=Parallel(1, 8), precision=precision)
    assert shared.weight_bytes < shared.hardware.memory_bytes < alone.weight_bytes
    assert shared.kv_tokens() > 1_000_000 and alone.kv_tokens() == 0
    assert shared.kv_bytes_per_token() == pytest.approx(5_511, abs=1)


def test_compressed_attention_hardly_grows_with_context() -> None:
    """V4 reads one row in 4 or 128 tokens, and of those in 4 the chosen: a token after a million takes less than 5
    times the attention of one after 10,000."""
    times = roofline("deepseek-v4-flash", "b200", parallel=Parallel(4), precision=Precision("fp8", "fp4", "fp8"))
    base_s = times.call_s(1, 0)
    near_s, far_s = (times.call_s(1, context) - base_s for context in (10_000, 1_000_000))
    latent = roofline("deepseek-v3", "b200", parallel=Parallel(8), precision=Precision("fp8"))
    latent_s = latent.call_s(1, 1_000_000) - latent.call_s(1, 0)
    assert near_s < far_s < latent_s / 3


@given(
    st.integers(0, 3000), st.integers(1, 600), st.sampled_from([(1, math.inf), (1, 128.0), (4, 512.0), (128, math.inf)])
)
@settings(deadline=None)
def test_pairs_of_a_chunk_are_those_of_its_tokens(done: int, tokens: int, kind: tuple[int, float]) -> None:
    """The closed form is the sum over the tokens."""
    term = Attended("any", 1, 1.0, 1.0, 1.0, 1, 1, kind[0], kind[1])
    assert term.pairs(done, tokens) == pytest.approx(sum([term.rows(done + place) for place in range(1, tokens + 1)]))


@given(
    st.sampled_from(["llama-3.1-8b", "deepseek-v3.2", "deepseek-v4-flash", "qwen3-30b-a3b"]),
    st.integers(1, 200),
    st.integers(0, 4000),
    st.integers(0, 2000),
)
@settings(deadline=None, max_examples=40)
def test_more_work_never_takes_less(model: str, decodes: int, context_tokens: int, prompt_tokens: int) -> None:
    """Adding a decode, context or a prompt token adds time, or none."""
    times = roofline(model, "h200", Efficiency())
    chunks = (Chunk(0, prompt_tokens),) if prompt_tokens else ()
    base_s = times.pass_s(Work(decodes, decodes * context_tokens, chunks))
    assert 0 < base_s < 60
    assert times.pass_s(Work(decodes + 1, (decodes + 1) * context_tokens, chunks)) >= base_s
    assert times.pass_s(Work(decodes, decodes * context_tokens + decodes, chunks)) >= base_s
    assert times.pass_s(Work(decodes, decodes * context_tokens, (Chunk(0, prompt_tokens + 1),))) >= base_s


def test_sums_alone_say_nearly_as_much_as_the_whole_pass() -> None:
    """A pass with decodes and a chunk, known by its sums: within 5 % (the vocabulary sees fewer rows or more)."""
    times = roofline("llama-3.1-8b", "h100", Efficiency())
    for decodes, done, tokens in itertools.product((1, 16, 64), (0, 1024), (64, 512, 2048)):
        work = Work(decodes, decodes * 700, (Chunk(done, tokens),))
        seen_s = times.call_s(work.rows, work.context_tokens, work.chunks[0].pairs)
        assert seen_s == pytest.approx(times.pass_s(work), rel=0.05)


def test_collectives() -> None:
    """One rank sends nothing; of two, each sends its half and gets the other; a ring of eight waits fourteen times."""
    h100 = hardware_named("h100")
    assert all_reduce_s(h100, IDEAL, 1e6, 1) == all_to_all_s(h100, IDEAL, 1e6, 1) == 0
    assert all_reduce_s(h100, IDEAL, 450e6, 2) == pytest.approx(1e-3)
    slow = Efficiency(link=1.0, link_latency_s=1e-5, ring=True)
    assert all_reduce_s(h100, slow, 0, 8) == pytest.approx(14e-5)
    assert all_reduce_s(h100, Efficiency(link=1.0, link_latency_s=1e-5), 0, 8) == pytest.approx(1e-5)
    assert all_to_all_s(h100, IDEAL, 450e6, 4) == pytest.approx(0.75e-3)


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("llama-3.1-8b", {"parallel": Parallel(3)}, "do not divide"),
        ("llama-3.1-8b", {"parallel": Parallel(16)}, "a node has 8"),
        ("llama-3.1-8b", {"parallel": Parallel(2, expert=True)}, "no experts"),
        ("llama-3.1-8b", {"precision": Precision(kv="q9")}, "no type of KV rows"),
    ],
)
def test_what_cannot_be_is_refused(model: str, more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        roofline(model, "h100", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "said"),
    [({"memory": 1.5}, "fraction"), ({"step_s": -1.0}, "time in seconds"), ({"expert_imbalance": 0.5}, "1 or more")],
)
def test_an_efficiency_is_checked(values: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Efficiency(**values).checked()  # type: ignore[arg-type]
