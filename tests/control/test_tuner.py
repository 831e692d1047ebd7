"""The tuner as a state machine: what it may do, whatever the rewards are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import BandConfig, Config, EngineConfig
from headrace.control.bandit import Arm
from headrace.control.grid import Setting, grids_of, home_of, values_of
from headrace.control.reward import LaneCounts, Window
from headrace.control.tuner import POOR_WINDOWS, PROBATION_WINDOWS, REST_WINDOWS, Decision, Tuner, TunerState

GRIDS = grids_of(Config(engine=EngineConfig(bands=(BandConfig(2048, 32),))), steps=2)
TUNER = Tuner(GRIDS, penalty=1.0, min_requests=20)
HOME = home_of(GRIDS)

windows = st.builds(
    lambda lanes, load, long_share, error: Window(
        30.0,
        {name: LaneCounts(*counts) for name, counts in lanes.items()},
        sum(map(sum, lanes.values())),
        load,
        long_share,
        error,
    ),
    st.dictionaries(
        st.sampled_from(["chat", "batch"]), st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1
    ),
    st.floats(0, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)


def counted(good: int, violated: int, **lanes: tuple[int, int]) -> Window:
    """A window of 30 s with a lane ``chat``, and others."""
    counts = {"chat": LaneCounts(good, violated)} | {name: LaneCounts(*each) for name, each in lanes.items()}
    return Window(30.0, counts, sum(lane.ended for lane in counts.values()))


def played(
    world: Callable[[Setting, int], Window], steps: int, *, seed: int = 1, tuner: Tuner = TUNER
) -> list[tuple[TunerState, Decision]]:
    """The tuner in a world: what the setting in force brings in the n-th window."""
    chance, state = random.Random(seed), tuner.start()
    seen = []
    for number in range(steps):
        state, decision = tuner.step(state, world(state.in_force, number), chance)
        seen.append((state, decision))
    return seen


def settings_of(seen: Sequence[tuple[TunerState, Decision]]) -> list[dict[str, int]]:
    return [HOME, *(state.in_force for state, _ in seen)]


@given(st.lists(windows, max_size=120), st.integers(0, 2**32))
def test_it_never_leaves_its_grids_and_moves_one_step_of_one_knob(given_windows: list[Window], seed: int) -> None:
    """Whatever happens: the setting in force is on the grid, and differs from the one before by one step of one
    knob, or is the operator's. What a decision sets is just that difference."""
    seen = played(lambda _, number: given_windows[number], len(given_windows), seed=seed)
    settings = settings_of(seen)
    for before, after, (_, decision) in zip(settings, settings[1:], seen, strict=False):
        assert all(GRIDS[name].holds(place) for name, place in after.items())
        steps = [abs(after[name] - before[name]) for name in GRIDS if after[name] != before[name]]
        assert steps in ([], [1]) or (decision.outcome == "home" and after == HOME)
        was, wanted = values_of(GRIDS, before), values_of(GRIDS, after)
        assert decision.changes == {name: value for name, value in wanted.items() if value != was[name]}
        least, most = wanted["min_prefill_tokens"], wanted["max_prefill_tokens"]
        assert isinstance(least, int) and isinstance(most, int) and least <= most


@given(st.lists(windows, max_size=60), st.integers(0, 2**32))
def test_identical_input_and_seed_give_identical_decisions(given_windows: list[Window], seed: int) -> None:
    first, second = (played(lambda _, number: given_windows[number], len(given_windows), seed=seed) for _ in range(2))
    assert [decision for _, decision in first] == [decision for _, decision in second]


@given(st.lists(windows, max_size=120), st.integers(0, 2**32))
def test_a_trial_that_is_not_kept_ends_with_the_last_good_setting(given_windows: list[Window], seed: int) -> None:
    """Whatever the rewards: the good setting changes only by a kept move, by its being taken back, or by going home;
    outside a trial's own windows it is the one in force."""
    seen = played(lambda _, number: given_windows[number], len(given_windows), seed=seed)
    good: Setting = HOME
    for state, decision in seen:
        if decision.outcome in ("returned", "alarm"):
            assert state.in_force == good
        if decision.outcome not in ("kept", "taken_back", "home"):
            assert state.good == good
        if state.trial is None:
            assert state.in_force == state.good
        good = state.good


@given(st.integers(0, 2**32))
def test_no_trial_of_a_harmful_move_lasts_longer_than_a_window(seed: int) -> None:
    """A world in which every other setting than the operator's loses a third: each try is ended by its first
    window, nothing is kept, and in time nothing is tried any more."""
    chance = random.Random(seed)

    def world(setting: Setting, _: int) -> Window:
        bad = chance.randint(0, 4) + (35 if setting != HOME else 0)
        return counted(100 - bad, bad)

    seen = played(world, 300, seed=seed)
    assert {decision.outcome for _, decision in seen} <= {"hold", "tried", "alarm", "alternated", "returned"}
    away = [state.in_force != HOME for state, _ in seen]
    # Before three windows have shown the noise, a trial may take two.
    assert not any(away[place] and away[place + 1] for place in range(5, len(away) - 1))
    assert sum(away[150:]) <= sum(away[:150]) / 2


def test_a_better_setting_is_found_kept_and_stays() -> None:
    """In a world where shorter steps are better, by two steps, it ends there."""
    chance = random.Random(3)

    def world(setting: Setting, _: int) -> Window:
        bad = 20 + 6 * (setting["urgent_step_s"] - GRIDS["urgent_step_s"].home + 2) + chance.randint(0, 4)
        return counted(100 - bad, bad)

    seen = played(world, 800)
    assert seen[-1][0].good["urgent_step_s"] == 0
    assert [decision.knob for _, decision in seen if decision.outcome == "kept"].count("urgent_step_s") == 2


def test_goodput_is_not_bought_with_another_lanes_attainment() -> None:
    """A move that brings more good requests in one lane and loses them in another is not kept."""
    chance = random.Random(4)

    def world(setting: Setting, _: int) -> Window:
        step = setting["urgent_step_s"] - HOME["urgent_step_s"]
        chats, documents = 60 - 20 * step + chance.randint(0, 4), 90 + 15 * step - chance.randint(0, 4)
        return counted(chats, 100 - chats, documents=(documents, 110 - documents))

    seen = played(world, 500)
    assert all(state.good["urgent_step_s"] >= HOME["urgent_step_s"] for state, _ in seen)
    assert any(decision.knob == "urgent_step_s" for _, decision in seen if decision.outcome == "tried")


def kept_early(seed: int = 1) -> tuple[Tuner, TunerState, random.Random, int]:
    """A tuner that has just kept a move because it made everything good."""
    chance, state = random.Random(seed), TUNER.start()
    for number in range(400):
        bad = 30 - 25 * (state.in_force != HOME) + number % 3
        state, decision = TUNER.step(state, counted(100 - bad, bad), chance)
        if decision.outcome == "kept":
            return TUNER, state, chance, number
    raise AssertionError("nothing was kept")


def test_a_kept_move_that_then_does_worse_is_taken_back() -> None:
    tuner, state, chance, _ = kept_early()
    state, decision = tuner.step(state, counted(50, 50), chance)
    assert (decision.outcome, state.in_force) == ("taken_back", HOME)


def test_lasting_violations_bring_the_operators_values_back_and_a_rest() -> None:
    """After probation; and a rest that is twice as long the second time."""
    tuner, state, chance, _ = kept_early()
    for _ in range(PROBATION_WINDOWS):
        state, decision = tuner.step(state, counted(94, 6), chance)
    assert state.good != HOME
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] != "home":
        state, decision = tuner.step(state, counted(20, 80), chance)
        outcomes.append(decision.outcome)
        assert len(outcomes) <= POOR_WINDOWS + 2  # windows with a trial's move do not count
    assert (state.in_force, decision.knob, state.rest) == (HOME, "all", REST_WINDOWS)
    assert set(decision.changes) <= set(GRIDS)
    for _ in range(REST_WINDOWS):
        state, decision = tuner.step(state, counted(20, 80), chance)
        assert (decision.outcome, state.in_force) == ("hold", HOME)
    assert (state.homes, state.rest) == (1, 0)


def test_windows_with_too_little_traffic_decide_nothing_and_end_a_trial() -> None:
    seen = played(lambda *_: counted(3, 3), 50)
    assert {decision.outcome for _, decision in seen} == {"hold"}
    assert {decision.reward for _, decision in seen} == {None}
    chance, state = random.Random(1), TUNER.start()
    while state.trying is None:
        state, _ = TUNER.step(state, counted(90, 10), chance)
    outcomes = []
    for _ in range(3):
        state, decision = TUNER.step(state, counted(1, 0), chance)
        outcomes.append(decision.outcome)
    assert outcomes == ["hold", "hold", "returned"]
    assert (state.trial, state.in_force) == (None, HOME)


def test_a_disturbed_trial_is_undone() -> None:
    chance, state = random.Random(1), TUNER.start()
    while state.trying is None:
        state, _ = TUNER.step(state, counted(90, 10), chance)
    knob = state.trying.knob
    state, decision = TUNER.abandoned(state)
    assert (decision.outcome, decision.knob, state.in_force) == ("returned", knob, HOME)
    assert decision.changes == {knob: GRIDS[knob].values[GRIDS[knob].home]}


def test_moves_that_did_harm_are_believed_to_do_harm() -> None:
    """And therefore tried less: the learned mean of each tried arm is below zero in a world where all moves harm."""
    seen = played(lambda setting, n: counted(100 - 3 * (n % 2) - 20 * (setting != HOME), 20), 200)
    beliefs = seen[-1][0].beliefs
    tried = {key for key in beliefs.by_arm}
    assert tried
    assert all(beliefs.effect(context, arm)[0] < 0 for context, arm in tried)
    assert all(isinstance(arm, Arm) for _, arm in tried)
