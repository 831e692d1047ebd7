"""The core's accounts: whatever happens, streams and libllama's own counts agree and everybody gets an end."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EngineCore
from headrace.errors import EngineError
from headrace.messages.engine import SamplingParams, Submit
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from tests.engines.harness import GREEDY, Model, Reference, Results, engine_core, request, run, run_one
from tests.engines.small_core import BANDS, LIMITS

# Ends and refusals


def test_an_abort_frees_at_once_wherever_the_sequence_is(core: EngineCore) -> None:
    """Waiting, in prefill, or decoding: its stream is free and empty before the next step, and that step
    reports the end."""
    for number in range(3):
        core.submit(request(f"d{number}", [5] * 4, max_tokens=50))
    core.step()
    core.step()
    core.submit(request("prefill", [6] * 100, max_tokens=50))
    core.submit(request("waiting", [7] * 4, max_tokens=50))
    core.step()
    assert core.residents.running["prefill"].state.pending_tokens > 0
    assert core.residents.running["d0"].state.decoding
    assert "waiting" in core.residents.waiting
    for name in ("d0", "prefill", "waiting"):
        core.abort(name)
        assert name not in core.live_ids()
        assert core.check_integrity() is None
        ends = [(o.request_id, o.finish) for o in core.step().outputs if o.finish is not None]
        assert ends == [(name, "abort")]
    core.abort("d0")
    core.abort("never seen")
    assert all(output.finish is None for output in core.step().outputs)
    assert sorted(core.live_ids()) == ["d1", "d2"]


def test_a_stream_given_back_serves_the_next_sequence_as_a_fresh_one(
    core: EngineCore, tiny_reference: Reference
) -> None:
    """Nothing of the aborted sequence is left in what its successor sees."""
    core.submit(request("before", [9] * 40, max_tokens=20))
    for _ in range(8):
        core.step()
    core.abort("before")
    core.set_knobs(SchedulingKnobs(1, 1))
    prompt = [11, 12, 13]
    expected, _ = tiny_reference.greedy(prompt, 12, frozenset())
    results = run(core, [request("after", prompt, max_tokens=12)])
    assert results["after"].tokens == expected
    assert results["before"].finish == "abort"


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (request("r", []), "no tokens"),
        (request("r", [1] * 256), "leaves no room in the context of 256"),
        (request("r", [1, 512]), "outside the vocabulary of 512"),
        (request("r", [1, -1]), "outside the vocabulary of 512"),
    ],
)
def test_what_cannot_be_served_ends_with_a_reason(core: EngineCore, submit: Submit, message: str) -> None:
    """An error output at the next step; the engine goes on."""
    result = run_one(core, submit)
    assert result.finish == "error" and message in (result.error or "")
    assert run_one(core, request("next", [1, 2, 3], max_tokens=2)).finish == "length"


def test_a_live_id_is_refused_and_the_first_holder_goes_on(core: EngineCore) -> None:
    """The core says which id; the sequence that has it is not touched."""
    core.submit(request("r", [1, 2, 3], max_tokens=5))
    core.step()
    core.submit(request("r", [4, 5, 6], max_tokens=5))
    (refused, going_on) = core.step().outputs
    assert refused.finish == "error" and "already live" in (refused.error or "")
    assert going_on.finish is None and len(going_on.token_ids) == 1
    assert core.live_ids() == ["r"] and core.check_integrity() is None


@pytest.mark.parametrize("prompt_tokens", [1, 10, 63, 64, 255])
def test_a_sequence_without_a_limit_ends_at_the_context(core: EngineCore, prompt_tokens: int) -> None:
    """Prompt and output together fill the longest band exactly, through every band on the way."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    result = run_one(core, request("r", [3] * prompt_tokens, max_tokens=None, sampling=sampling))
    assert result.finish == "length" and len(result.tokens) == 256 - prompt_tokens
    assert core.check_integrity() is None


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens_is_exact(core: EngineCore, max_tokens: int) -> None:
    """Not one more, not one less."""
    result = run_one(core, request("r", [3] * 20, max_tokens=max_tokens))
    assert result.finish == "length" and len(result.tokens) == max_tokens


def test_max_tokens_0_computes_nothing_and_yields_nothing(core: EngineCore) -> None:
    """The end comes with the next step, with the prompt's size."""
    core.submit(request("r", [3] * 20, max_tokens=0))
    output = core.step()
    assert [(o.finish, o.token_ids, o.text, o.prompt_tokens) for o in output.outputs] == [("length", [], "", 20)]
    assert output.load is not None and output.load.prefill_tokens == 0


def test_the_first_output_tells_the_wait_and_only_the_first(tiny: Model) -> None:
    """From arrival to the step that took it in, by the core's clock."""
    now = 100.0
    with engine_core(tiny, Band(64, 1), limits=LIMITS) as core:
        core._clock = lambda: now
        core.submit(request("a", [1, 2, 3], max_tokens=4, arrived_s=97.5))
        core.submit(request("b", [1, 2, 3], max_tokens=4, arrived_s=99.0))
        results = Results()
        while core.has_work:
            results.take(core.step())
            now += 1.0
    waits = {name: [output.queue_wait_s for output in r.outputs] for name, r in results.items()}
    assert waits == {"a": [2.5, None, None, None], "b": [5.0, None, None, None]}


# Failures


def refuse_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    """Make libllama itself refuse the next batch of ``band``: its first position leaves a gap."""
    original = Context.decode
    left = [1]

    def decode(context: Context, cut: Callable[[], bool] | None = None) -> bool:
        if left and context is core.residents.contexts[band]:
            left.pop()
            context.batch._positions[0] += 5
        return original(context, cut)

    monkeypatch.setattr(Context, "decode", decode)


def raise_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    """Fail the next call of ``band`` before libllama sees it."""
    original = Context.decode
    left = [1]

    def decode(context: Context, cut: Callable[[], bool] | None = None) -> bool:
        if left and context is core.residents.contexts[band]:
            left.pop()
            raise EngineError("llama_decode returned -3")
        return original(context, cut)

    monkeypatch.setattr(Context, "decode", decode)


@pytest.mark.parametrize("fail", [refuse_once, raise_once])
def test_a_failed_call_ends_the_sequences_in_it_and_nobody_else(
    core: EngineCore,
    tiny_reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[EngineCore, pytest.MonkeyPatch, int], None],
) -> None:
    """Sequences of the other band and waiting ones go on to their right end; the engine then serves as if
    nothing had been."""
    submits = [request(f"short{n}", [5 + n] * 4, max_tokens=20) for n in range(4)]
    submits.append(request("long", [8] * 70, max_tokens=20))
    results = Results()
    for submit in submits:
        core.submit(submit)
    for _ in range(12):
        results.take(core.step())
    affected = {"short0", "short1", "short2"}
    assert affected | {"long"} == set(core.residents.running) and set(core.residents.waiting) == {"short3"}
    fail(core, monkeypatch, 0)
    results.take(core.step())
    assert {name for name, result in results.items() if result.finish == "error"} == affected
    assert all("llama_decode returned -" in (results[name].error or "") for name in affected)
    assert core.check_integrity() is None and set(core.live_ids()) == {"short3", "long"}
    while core.has_work:
        results.take(core.step())
    assert results["long"].finish == results["short3"].finish == "length"
    core.set_knobs(SchedulingKnobs(1, 1))
    expected, _ = tiny_reference.greedy([5] * 4, 10, frozenset())
    assert run_one(core, request("again", [5] * 4, max_tokens=10)).tokens == expected


def test_where_sequences_are_computed_one_by_one_a_failed_call_ends_one(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call of a single sequence fails: the others of its band have their own calls in the same step."""
    core.one_by_one_limit = 4
    for n in range(3):
        core.submit(request(f"r{n}", [5 + n] * 4, max_tokens=8))
    results = Results()
    results.take(core.step())
    raise_once(core, monkeypatch, 0)
    while core.has_work:
        results.take(core.step())
        assert core.check_integrity() is None
    assert [results[f"r{n}"].finish for n in range(3)] == ["error", "length", "length"]
    assert [len(results[f"r{n}"].tokens) for n in range(3)] == [1, 8, 8]


def test_a_failed_prompt_is_not_computed_on_in_the_same_step(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths are one pass and another one for the rest of the longer; when the first fails, both
    have ended, and the rest is not computed into a stream that is somebody else's by then."""
    core.context(0)
    core.submit(request("short", [5] * 3, max_tokens=5))
    core.submit(request("longer", [6] * 8, max_tokens=5))
    raise_once(core, monkeypatch, 0)
    outputs = core.step().outputs
    assert sorted((output.request_id, output.finish) for output in outputs) == [("longer", "error"), ("short", "error")]
    assert core.check_integrity() is None and not core.has_work
    assert run_one(core, request("next", [7] * 8, max_tokens=5)).finish == "length"


def test_a_band_whose_context_cannot_be_created_fails_only_those_that_need_it(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both a new long sequence and one that would be promoted end with the reason; short ones are served."""
    core.context(0)

    def no_memory(*_: object, **__: object) -> None:
        raise EngineError("libllama cannot create a context")

    monkeypatch.setattr(Context, "__init__", no_memory)
    results = run(
        core,
        [
            request("long", [3] * 100, max_tokens=5),
            request("growing", [3] * 50, max_tokens=50),
            request("short", [3] * 10, max_tokens=5),
        ],
    )
    assert {name: result.finish for name, result in results.items()} == {
        "long": "error",
        "growing": "error",
        "short": "length",
    }
    assert len(results["growing"].tokens) == 64 - 50 + 1
    assert core.check_integrity() is None


def test_the_self_check_notices_damage(core: EngineCore) -> None:
    """Each account is really compared: counts against libllama, owners against sequences, free streams
    against their content."""
    core.submit(request("r", [3] * 5, max_tokens=9))
    core.step()
    sequence = core.residents.running["r"]
    slot = sequence.state.slot
    assert slot is not None and core.check_integrity() is None
    sequence.state.computed_tokens += 1
    assert "libllama holds 5" in (core.check_integrity() or "")
    sequence.state.computed_tokens -= 1
    del core.residents.running["r"]
    assert "owned by 0 running" in (core.check_integrity() or "")
    core.residents.slots.release(slot, "r")
    core.residents.reuse.ended(slot, 0.0)
    assert core.check_integrity() is None
    assert core.context(0).take_back(slot.stream, 3)
    assert "is free with 5 tokens kept, libllama holds 3" in (core.check_integrity() or "")
    core.context(0).clear_stream(slot.stream)
    core.residents.reuse.cleared(slot)
    assert core.check_integrity() is None
    sequence.close()


# Everything at once

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 200), st.none() | st.integers(0, 60), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("limits"), st.integers(1, 24), st.integers(1, 16)),
        st.tuples(st.just("fail")),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(ACTIONS)
def test_after_anything_the_accounts_agree_and_everybody_has_one_end(
    tiny: Model, actions: list[tuple[str, int]]
) -> None:
    """Random arrivals, aborts, knobs and failing calls over both bands, on the real machinery."""
    with engine_core(tiny, *BANDS, limits=LIMITS) as core, pytest.MonkeyPatch.context() as patch:
        submitted: list[str] = []
        results = Results()

        def step() -> None:
            results.take(core.step())
            assert core.check_integrity() is None

        for name, *values in actions:
            match name, values:
                case "submit", [prompt, max_tokens, priority]:
                    submitted.append(f"r{len(submitted)}")
                    core.submit(
                        request(submitted[-1], [3] * prompt, max_tokens=max_tokens, priority=priority, sampling=GREEDY)
                    )
                case "abort", [number]:
                    core.abort(f"r{number}")
                case "step", [times]:
                    for _ in range(times):
                        step()
                case "limits", [step_tokens, chunk]:
                    core.set_knobs(SchedulingKnobs(step_tokens, chunk, LIMITS.band_margin_tokens))
                case "fail", []:
                    raise_once(core, patch, 0)
            assert core.check_integrity() is None
        core.set_knobs(LIMITS)
        while core.has_work:
            step()
        assert Counter(n for n, r in results.items() if r.finish is not None) == Counter(submitted)
        load = core.load()
        assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)


def test_load_counts_what_is_there(core: EngineCore) -> None:
    """Running, waiting and KV cells after a step of known size."""
    ticks = itertools.count()
    core._clock = lambda: float(next(ticks))  # slow steps: each one reports
    core.set_knobs(SchedulingKnobs(step_tokens=24, max_prefill_tokens=18))
    for number in range(4):
        core.submit(request(f"r{number}", [3] * 6, max_tokens=20))
    load = core.step().load
    assert load is not None
    assert (load.running, load.waiting) == (3, 1)
    assert (load.kv_used_tokens, load.kv_total_tokens) == (18, 64 * 3 + 256 * 2)
    assert (load.decode_tokens, load.prefill_tokens, load.waiting_prefill_tokens) == (0, 18, 6)
    assert load.kv_used_bytes == 18 * core.residents._budget.bytes_per_token
    following = core.step().load
    assert following is not None and (following.decode_tokens, following.prefill_tokens) == (3, 0)


def test_when_the_last_sequence_has_gone_the_load_says_so(core: EngineCore) -> None:
    """Reports may be left out while nothing comes or goes, but never the one that says "empty"."""
    loads = []
    run(core, [request("r", [3] * 6, max_tokens=30)], each_step=lambda _, output: loads.append(output.load))
    assert loads[0] is not None and loads[0].running == 1
    assert loads[-1] is not None and (loads[-1].running, loads[-1].kv_used_tokens) == (0, 0)


def test_limits_never_exceed_what_the_contexts_were_made_for(core: EngineCore) -> None:
    """A larger ``step_tokens`` is cut: a bigger batch would not fit libllama's buffers."""
    core.set_knobs(SchedulingKnobs(step_tokens=10_000, max_prefill_tokens=10_000))
    assert core.knobs.step_tokens == LIMITS.step_tokens
    result = run_one(core, request("r", [3] * 200, max_tokens=2))
    assert result.finish == "length"


def test_libllama_allocates_the_cells_that_the_budget_charges(tiny: Model) -> None:
    """Lengths are rounded up to 256 cells a stream."""
    with engine_core(tiny, Band(64, 3), Band(300, 2)) as core:
        for band in (0, 1):
            cells = tiny.library.api.llama_n_ctx(core.context(band).handle)
            assert core.band_plans()[band].kv_bytes == cells * core.residents._budget.bytes_per_token
