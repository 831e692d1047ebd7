"""Prompts that begin with KV that others computed: the text is the same, the accounts agree, and nobody else is told.

The bits of a result depend on the shapes of calls (``test_reference``). Token by token and alone the shapes are the
same with and without reuse, so there equality is demanded, of the real model too. Elsewhere chunks begin at other
tokens than without reuse, and log-probabilities may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from headrace.engines.llama import interrupt
from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.prefix import PrefixRules
from headrace.errors import EngineError
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.messages.engine import SamplingParams
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import Move, SchedulerState, StepPlan
from tests.engines.harness import (
    BAND,
    SMALL_CHUNKS,
    Amended,
    CutAt,
    Model,
    Result,
    engine_core,
    request,
    run,
    run_one,
    said,
    sound,
)
from tests.engines.prefixes import (
    BOTH_MODELS,
    OFF,
    TOKEN_BY_TOKEN,
    ask,
    assert_alike,
    begun,
    cached,
    counted,
    steady,
    without_reuse,
    words,
)


@pytest.fixture
def model(model_name: str, request: pytest.FixtureRequest) -> Model:
    """One of the models."""
    found: Model = request.getfixturevalue(model_name)
    return found


@pytest.fixture
def core(tiny: Model) -> Iterator[EngineCore]:
    """One band, small chunks, the same times on every machine."""
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        yield steady(core)


def test_a_single_wrong_token_in_the_kv_would_be_noticed(tiny: Model) -> None:
    """Wherever it is, the comparison of these tests fails."""
    prompt = words(tiny, 150)
    wrong = {
        place: [*prompt[:place], (prompt[place] + 1) % 500, *prompt[place + 1 :]] for place in (3, 40, 80, 120, 147)
    }
    expected = without_reuse(tiny, ask("right", prompt))["right"]
    for result in without_reuse(tiny, *[ask(str(place), tokens) for place, tokens in wrong.items()]).values():
        with pytest.raises(AssertionError):
            assert_alike(result, expected)


@BOTH_MODELS
def test_a_dialogue_is_the_same_to_the_bit_and_only_what_is_new_is_computed(model: Model) -> None:
    """Three turns, each prompt all that was said before and a question: same tokens and log-probabilities as without
    reuse. From the second turn on everything but the last answer's last token (never computed) and the question is
    there."""
    questions = [model.tokens(text) for text in ("Name a river.", " And a longer one?", " Which is older?")]

    def talk(core: EngineCore) -> list[tuple[list[int], Result, int]]:
        turns, history = [], [*words(model, 40)]
        for number, question in enumerate(questions):
            history += question
            submit = ask(f"turn {number}", history)
            result, computed = counted(core, submit)
            turns.append((list(history), result, computed))
            history += result.tokens
        return turns

    with engine_core(model, BAND, limits=TOKEN_BY_TOKEN, prefix=OFF) as core:
        expected = talk(steady(core))
    with engine_core(model, BAND, limits=TOKEN_BY_TOKEN) as core:
        turns = talk(steady(core))
        assert begun(core) == {"compute": 1, "take_over": 2}
    known = 0
    for (prompt, result, computed), (_, without, all_computed) in zip(turns, expected, strict=True):
        assert said(result) == said(without)
        assert cached(without) == 0 and all_computed == len(prompt)
        assert cached(result) == known and computed == len(prompt) - known
        known = len(prompt) + len(result.tokens) - 1


@BOTH_MODELS
@pytest.mark.parametrize("way", ["take_over", "carry"])
def test_a_shared_beginning_is_cut_to_the_exact_token(model: Model, way: str) -> None:
    """Two prompts that part in the middle of a block: the second one's text is to the bit the one without reuse,
    whether it takes the stream over or gets a copy of it."""
    shared = words(model, 90)
    first, second = ask("first", [*shared, 5, 6, 7]), ask("second", [*shared, 9, 8])
    with engine_core(model, BAND, limits=TOKEN_BY_TOKEN, prefix=OFF) as core:
        expected = run_one(core, second)
    with engine_core(model, BAND, limits=TOKEN_BY_TOKEN) as core:
        steady(core)
        run_one(core, first)
        if way == "take_over":  # a copy is dear enough, so what the first one had beyond the common part is given up
            core.residents.reuse.carry_time.s_per_token = 1.0
        result = run_one(core, second)
        assert begun(core) == {"compute": 1, way: 1}
        assert core.check_integrity() is None
    assert cached(result) == 90
    assert said(result) == said(expected)


def test_several_live_sequences_share_one_beginning(tiny: Model, core: EngineCore) -> None:
    """The first one runs on while five more begin with its prompt's KV, all at once; each says what it says alone."""
    shared = words(tiny, 150)
    first = ask("r0", [*shared, 3], 40)
    others = [ask(f"r{n}", [*shared, 10 + n, n], 20) for n in range(1, 6)]
    expected = without_reuse(tiny, first, *others)
    results = run(core, {0: [first], 20: others}, each_step=sound(core))
    assert core.residents.reuse.totals.begun == {"compute": 1, "carry": 5}
    for name, result in results.items():
        assert_alike(result, expected[name])
        assert cached(result) == (150 if name != "r0" else 0)


def test_a_prompt_that_was_just_computed_needs_one_token(tiny: Model, core: EngineCore) -> None:
    """The last token is always computed: its logits give the first output token."""
    prompt = words(tiny, 100)
    first, again = run_one(core, ask("a", prompt)), run_one(core, ask("b", prompt))
    assert_alike(again, first)
    assert cached(again) == 99
    shorter = ask("c", prompt[:40])
    assert_alike(run_one(core, shorter), without_reuse(tiny, shorter)["c"])
    assert core.check_integrity() is None


def test_kv_is_carried_into_another_band(tiny: Model) -> None:
    """The short band's stream holds the beginning of a prompt that needs the long one; and back, where it fits."""
    bands = (Band(128, 3), Band(256, 2))
    shared = words(tiny, 60)
    up, down = ask("up", [*shared, *words(tiny, 110, start=500)]), ask("down", [*shared, 9, 9])
    expected = without_reuse(tiny, up, down, bands=(bands[1],))
    limits = msgspec.structs.replace(SMALL_CHUNKS, band_margin_tokens=8)
    with engine_core(tiny, *bands, limits=limits) as core:
        steady(core)
        run_one(core, ask("seed", [*shared, 1]))
        results = {"up": run_one(core, up)}
        assert core.residents.slots.free_count(1) == 2 and core.residents.reuse.tokens(Slot(1, 0)) > 170
        core.context(0).clear_stream(0)
        core.residents.reuse.cleared(Slot(0, 0))
        results["down"] = run_one(core, down)
        # What the long band holds is longer than a stream of the short one: it cannot be carried there.
        assert (cached(results["up"]), cached(results["down"])) == (60, 0)
        run_one(core, ask("long", [*shared, *words(tiny, 10, start=900)]))
        assert core.check_integrity() is None
    for name, result in results.items():
        assert_alike(result, expected[name])


def test_kv_of_a_decoding_sequence_is_carried_into_another_band(tiny: Model) -> None:
    """Its latest tokens, which are not accounted for one by one, travel along and are cut off there; it goes on."""
    bands = (Band(128, 3), Band(256, 2))
    shared = words(tiny, 60)
    first, up = ask("first", [*shared, 1], 50), ask("up", [*shared, *words(tiny, 110, start=500)])
    expected = without_reuse(tiny, first, up, bands=(bands[1],))
    limits = msgspec.structs.replace(SMALL_CHUNKS, band_margin_tokens=8)
    with engine_core(tiny, *bands, limits=limits) as core:
        results = run(steady(core), {0: [first], 20: [up]}, each_step=sound(core))
    assert cached(results["up"]) == 60
    for name, result in results.items():
        assert_alike(result, expected[name])


# Whose KV


@pytest.mark.parametrize(
    ("rules", "hits"),
    [
        (PrefixRules(), {"same": 79, "other": 0, "none": 0, "none again": 79}),
        (PrefixRules(sharing="all"), {"same": 79, "other": 79, "none": 79, "none again": 79}),
        (OFF, {"same": 0, "other": 0, "none": 0, "none again": 0}),
    ],
    ids=["tenant", "all", "off"],
)
def test_tenants_share_only_when_that_is_configured(tiny: Model, rules: PrefixRules, hits: dict[str, int]) -> None:
    """Requests without a tenant are one tenant's. Switched off, nothing is kept anywhere."""
    prompt = words(tiny, 80)
    asked = {"first": "acme", "same": "acme", "other": "umbrella", "none": None, "none again": None}
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, prefix=rules) as core:
        steady(core)
        found = {name: cached(run_one(core, ask(name, prompt, tenant=tenant))) for name, tenant in asked.items()}
        assert core.check_integrity() is None
        assert (core.load().idle_residents == 0) == (not rules.enabled)
    assert found == {"first": 0, **hits}


def test_a_waiting_prompt_is_planned_by_what_is_left_of_it(tiny: Model) -> None:
    """Whole blocks that somebody of its tenant holds are no work; as soon as nobody does, they are again. Another
    tenant's request, and one that wants the prompt's log-probabilities, are planned whole."""
    prompt = words(tiny, 200)
    seen: dict[str, SequenceState] = {}

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        seen.update({s.request_id: s for s in state.waiting})
        return msgspec.structs.replace(plan, admissions=(), prefill=()) if "same" in seen else plan

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        steady(core)
        run_one(core, ask("first", prompt, 4, tenant="acme"))
        core.submit(ask("same", prompt, tenant="acme"))
        core.submit(ask("other", prompt, tenant="umbrella"))
        echo = SamplingParams(temperature=0.0, prompt_logprobs=0)
        core.submit(msgspec.structs.replace(request("echo", prompt, sampling=echo), tenant="acme"))
        core.step()
        assert {name: state.uncached_tokens for name, state in seen.items() if name != "first"} == {
            "same": 200 - KV_BLOCK_TOKENS,
            "other": 200,
            "echo": 200,
        }
        assert core.load().waiting_prefill_tokens == 600 - KV_BLOCK_TOKENS
        core.context(0).clear_stream(0)
        core.residents.reuse.cleared(Slot(0, 0))
        core.step()
        assert seen["same"].uncached_tokens == 200
        core.abort_all()
        assert core.check_integrity() is None


def test_where_every_prompt_token_is_asked_for_every_one_is_computed(tiny: Model, core: EngineCore) -> None:
    """With the prompt's log-probabilities nothing is taken from a cache; what it leaves serves others."""
    prompt = words(tiny, 100)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    run_one(core, ask("first", prompt))
    results = [run_one(core, request(name, prompt, max_tokens=2, sampling=sampling)) for name in ("a", "b")]
    assert [cached(result) for result in results] == [0, 0]
    for result in results:
        assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 100
    assert msgspec.to_builtins(results[0].prompt_logprobs) == msgspec.to_builtins(results[1].prompt_logprobs)
    assert cached(run_one(core, ask("last", prompt))) == 99


# What stays and what goes


def test_an_aborted_prompt_leaves_what_was_computed_of_it(tiny: Model, core: EngineCore) -> None:
    """Its client has gone; the next one with the same beginning goes on from there."""
    prompt = words(tiny, 200)
    core.submit(ask("gone", prompt))
    core.step()
    core.step()
    core.abort("gone")
    core.step()
    assert core.check_integrity() is None
    (submit,) = [ask("next", [*prompt, 4])]
    result = run_one(core, submit)
    assert cached(result) == 32, "two chunks of 16"
    assert_alike(result, without_reuse(tiny, submit)["next"])


def test_a_failed_pass_leaves_nothing(tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in its streams is not known: they are emptied, and the next one computes everything."""
    prompt = words(tiny, 100)
    core.submit(ask("fails", prompt))
    core.step()
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> bool:
            raise EngineError("llama_decode returned -3")

        patch.setattr(Context, "decode", fail)
        (output,) = core.step().outputs
    assert output.finish == "error" and core.load().idle_residents == 0
    assert core.check_integrity() is None
    assert cached(run_one(core, ask("next", prompt))) == 0


def test_a_victim_takes_its_stream_back_without_a_copy(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV stays where it was until somebody needs the stream: nothing is loaded, nothing computed again, and it
    does not count as cached."""
    submit = ask("r", words(tiny, 60), 20)
    expected = without_reuse(tiny, submit)["r"]
    loads: list[int] = []
    monkeypatch.setattr(Context, "load_stream", lambda *_: loads.append(1))
    evicted: list[str] = []
    computed: list[int] = []

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        if not evicted and state.running and state.running[0].generated_tokens == 6:
            evicted.append(state.running[0].request_id)
            return StepPlan(victims=("r",))
        return plan

    core.set_policy(Amended(change))
    result = run(
        core,
        [submit],
        each_step=lambda *_: computed.append(core.forward.prefill_tokens) if core.check_integrity() is None else None,
    )["r"]
    assert evicted and not loads and sum(computed) <= 60 + 1
    assert begun(core) == {"compute": 1, "take_over": 1} and core.load().prefix_hit_tokens == 0
    assert_alike(result, expected)
    assert cached(result) == 0


@pytest.mark.parametrize("refused", ["load_stream", "take_back", "save_stream"])
def test_what_libllama_refuses_is_computed(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """A copy that it does not read or write, or a stream that it does not cut: the sequence begins with nothing."""
    shared = words(tiny, 120)
    submits = [ask(f"r{n}", [*shared, n]) for n in range(3)]
    expected = without_reuse(tiny, *submits)

    def refuse(*_: object, **__: object) -> bool:
        if refused == "save_stream":
            raise EngineError("libllama wrote 0 bytes")
        return False

    run_one(core, ask("seed", [*shared, 99]))
    monkeypatch.setattr(Context, refused, refuse)
    results = run(core, submits, each_step=sound(core))
    assert core.residents.reuse.can_truncate == (refused != "take_back")
    for name, result in results.items():
        assert_alike(result, expected[name])
        assert cached(result) == 0


def test_a_stream_that_lost_its_beginning_is_not_cut(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a sliding window: what is left after cutting may lack cells that are inside the window again."""
    shared = words(tiny, 120)
    submit = ask("r", [*shared, 1])
    run_one(core, ask("seed", [*shared, 99]))
    monkeypatch.setattr(Context, "begins_at_0", lambda *_: False)
    result = run_one(core, submit)
    assert cached(result) == 0 and core.residents.reuse.can_truncate
    assert_alike(result, without_reuse(tiny, submit)["r"])
    assert core.check_integrity() is None


def test_memory_that_cannot_be_cut_serves_whole_sequences(tiny: Model, core: EngineCore) -> None:
    """As recurrent models' is: what a prompt continues in full is of use, what it shares a part of is not."""
    core.residents.cannot_truncate(core.context(0))
    first = run_one(core, ask("first", words(tiny, 100), 8))
    dialogue = ask("dialogue", [*words(tiny, 100), *first.tokens, 7, 8, 9])
    branch = ask("branch", [*words(tiny, 100), 3, 3, 3])
    expected = without_reuse(tiny, dialogue, branch)
    results = {"branch": run_one(core, branch), "dialogue": run_one(core, dialogue)}
    assert (cached(results["branch"]), cached(results["dialogue"])) == (0, 107)
    for name, result in results.items():
        assert_alike(result, expected[name])
    assert core.check_integrity() is None


# Moves, promotions, cuts


@pytest.mark.parametrize("load_again", [True, False])
def test_a_move_exchanges_with_a_resident_that_is_worth_it(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch, load_again: bool
) -> None:
    """The hole keeps an ended dialogue: it goes to the mover's stream and serves its next turn from there. When
    libllama does not take it there, it is given up, and the mover is not touched."""
    moved: list[str] = []

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        b = next((s for s in state.running if s.request_id == "b"), None)
        if not moved and b is not None and b.generated_tokens == 8:
            moved.append("b")
            return msgspec.structs.replace(plan, moves=(Move("b", 0),))
        return plan

    core.set_policy(Amended(change))
    a, b = ask("a", words(tiny, 120), 4), ask("b", words(tiny, 30, start=300), 30)
    again = ask("again", [*words(tiny, 120), 8, 8])
    expected = without_reuse(tiny, a, b, again)
    original = Context.load_stream
    monkeypatch.setattr(
        Context,
        "load_stream",
        lambda context, stream, data: original(context, stream, data) and (load_again or stream == 0),
    )
    results = run(core, [a, b], each_step=sound(core))
    assert moved and core.load().moves == 1
    assert core.residents.reuse.tokens(Slot(0, 0)) == 30 + 30 - 1
    assert core.residents.reuse.tokens(Slot(0, 1)) == (123 if load_again else 0)
    results["again"] = run_one(core, again)
    assert cached(results["again"]) == (120 if load_again else 0)
    for name, result in results.items():
        assert_alike(result, expected[name])


def test_a_promoted_sequence_takes_the_stream_worth_least(tiny: Model) -> None:
    """Both streams of the long band keep something; the younger dialogue stays."""
    bands = (Band(64, 1), Band(256, 2))
    limits = msgspec.structs.replace(SMALL_CHUNKS, band_margin_tokens=0)
    grows = ask("grows", words(tiny, 40), 60)
    expected = without_reuse(tiny, grows, bands=(bands[1],))["grows"]
    with engine_core(tiny, *bands, limits=limits) as core:
        steady(core)
        now_s = 0.0
        core._clock = lambda: now_s
        for number, start in ((0, 500), (1, 1000)):
            run(core, {0: [ask(f"long {number}", words(tiny, 150, start=start), 5)]})
            now_s += 600.0
        assert [core.residents.reuse.tokens(Slot(1, stream)) for stream in (0, 1)] == [154, 154]
        result = run(core, [grows], each_step=sound(core))["grows"]
        assert [core.residents.reuse.tokens(Slot(1, stream)) for stream in (0, 1)] == [99, 154]
        # Its stream in the short band is empty: all of it went with it.
        assert core.residents.reuse.tokens(Slot(0, 0)) == 0 and core.check_integrity() is None
    assert said(result) == said(expected)


def test_a_cut_pass_counts_for_nothing(tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a pass that was ended early are not in the stream, and nobody is told that they are."""
    monkeypatch.setattr(interrupt, "ASK_INTERVAL_S", 0.0)
    shared = words(tiny, 100)
    run_one(core, ask("seed", [*shared, 1], 2))
    core.residents.reuse.carry_time.s_per_token = 1.0
    submit = ask("r", [*shared, *words(tiny, 60, start=700)])
    cuts = core.cut = CutAt(5)
    result = run(core, [submit], each_step=sound(core))["r"]
    assert core.load().cut_steps == 1 and cuts.asked > 5
    assert cached(result) == 100
    assert_alike(result, without_reuse(tiny, submit)["r"])


# Accounts


def test_the_load_tells_what_was_asked_for_what_was_there_and_what_is_kept(tiny: Model, core: EngineCore) -> None:
    """Tokens of prompts that began, those of them that were cached, and the KV of ended sequences."""
    prompt = words(tiny, 100)
    run_one(core, ask("a", prompt, 5))
    run_one(core, ask("b", [*prompt, 1, 2], 5))
    load = core.load()
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (100 + 102, 100)
    assert load.prefix_saved_s > 0
    assert load.idle_resident_tokens == sum(core.residents.reuse.tokens(Slot(0, stream)) for stream in range(8))
    assert load.idle_residents in (1, 2) and load.kv_used_tokens == 0


@pytest.mark.parametrize("damage", ["a token too many", "a token lost", "nobody knows it"])
def test_the_self_check_notices_damage_to_what_is_kept(tiny: Model, core: EngineCore, damage: str) -> None:
    """What libllama holds in a free stream is compared with what is believed of it."""
    run_one(core, ask("a", words(tiny, 50), 5))
    assert core.check_integrity() is None
    slot = Slot(0, 0)
    if damage == "a token too many":
        core.residents.reuse._tree.extend(slot, [1])
    elif damage == "a token lost":
        core.context(0).take_back(0, 20)
    else:
        core.residents.reuse.cleared(slot)
    assert "is free with" in (core.check_integrity() or "")


def test_a_running_sequence_is_accounted_for_up_to_its_last_block(tiny: Model, core: EngineCore) -> None:
    """A token that is decoded is not told at once (it would cost every step), but never more than a block stays
    untold; the self-check knows the difference."""
    core.submit(ask("a", words(tiny, 120), 100))
    for _ in range(8 + 30):
        core.step()
        assert core.check_integrity() is None
    state = core.residents.running["a"].state
    assert state.computed_tokens > 140 and core.residents.reuse.tokens(Slot(0, 0)) == KV_BLOCK_TOKENS
    core.residents.reuse._tree.extend(Slot(0, 0), [1] * 100)
    assert "accounted for" in (core.check_integrity() or "")
    core.residents.reuse._tree.truncate(Slot(0, 0), KV_BLOCK_TOKENS)
