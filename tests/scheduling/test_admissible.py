"""Who may enter: streams and caps, and nobody kept out by what somebody else waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.admissible import Room, admissible
from headrace.scheduling.bands import Band, first_band
from headrace.scheduling.continuous import DecodeFirst
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.placement import promotions_of
from headrace.scheduling.sequence import SequenceState, Slot, urgency
from headrace.scheduling.step import SchedulerState
from tests.scheduling.dry_engine import DryEngine

BANDS = (Band(64, 6), Band(512, 4), Band(4096, 2))


def sequence(name: str, prompt_tokens: int, lane: str = "", slot: Slot | None = None) -> SequenceState:
    return SequenceState(name, prompt_tokens, prompt_tokens + 8, 0, 0.0, lane=lane, slot=slot)


def engine_state(waiting: list[SequenceState], running: list[SequenceState], knobs: SchedulingKnobs) -> SchedulerState:
    used = Counter(s.slot.band for s in running if s.slot is not None)
    free = tuple(band.max_sequences - used[index] for index, band in enumerate(BANDS))
    return SchedulerState(0.0, BANDS, free, waiting, running, knobs)


@st.composite
def states(draw: st.DrawFn) -> SchedulerState:
    """Some running, some waiting, some caps, which may be below what runs already."""
    lanes = st.sampled_from("abc")
    running = [
        sequence(f"r{band}{stream}", 5, draw(lanes), Slot(band, stream))
        for band, size in enumerate(BANDS)
        for stream in range(draw(st.integers(0, size.max_sequences)))
    ]
    prompts = draw(st.lists(st.tuples(st.integers(1, 5000), lanes), max_size=25))
    waiting = [sequence(f"w{number:02}", tokens, lane) for number, (tokens, lane) in enumerate(prompts)]
    knobs = SchedulingKnobs(
        band_margin_tokens=draw(st.integers(0, 64)),
        max_num_seqs=draw(st.none() | st.integers(1, 14)),
        band_caps=draw(st.none() | st.lists(st.integers(1, 7), max_size=4).map(tuple)),
        lane_caps=draw(st.dictionaries(lanes, st.integers(1, 6))),
    )
    return engine_state(waiting, running, knobs)


def may_enter(state: SchedulerState, entered: list[tuple[SequenceState, int]], one: SequenceState) -> int | None:
    """The band that ``one`` may enter after ``entered``, counted anew from all that is there; None when it may not."""
    knobs = state.knobs
    band = first_band(one.known_tokens, one.limit_tokens, state.bands, knobs.band_margin_tokens)
    if band is None:
        return None
    in_band = sum(s.slot is not None and s.slot.band == band for s in state.running)
    into_band = sum(other == band for _, other in entered)
    in_lane = sum(s.lane == one.lane for s in [*state.running, *(s for s, _ in entered)])
    allowed = (
        into_band < state.free_streams[band]
        and (knobs.max_num_seqs is None or len(state.running) + len(entered) < knobs.max_num_seqs)
        and in_lane < knobs.lane_caps.get(one.lane, 10**9)
        and (knobs.band_caps is None or band >= len(knobs.band_caps) or in_band + into_band < knobs.band_caps[band])
    )
    return band if allowed else None


@given(states())
def test_everybody_enters_who_may_when_its_turn_comes_and_nobody_else(state: SchedulerState) -> None:
    """Equal to counting all streams and caps anew for each in turn; so no cap is passed and no room is left."""
    expected: list[tuple[SequenceState, int]] = []
    for one in state.waiting:
        band = may_enter(state, expected, one)
        if band is not None:
            expected.append((one, band))
    assert admissible(state.waiting, Room(state), state) == expected


@given(states())
def test_nobody_is_looked_at_once_nobody_could_enter(state: SchedulerState) -> None:
    """As soon as the last stream is given or ``max_num_seqs`` is reached, whoever is behind costs nothing."""
    looked = 0

    def in_order() -> Iterator[SequenceState]:
        nonlocal looked
        for one in state.waiting:
            looked += 1
            yield one

    room = Room(state)
    most = room.left
    entered = admissible(in_order(), room, state)
    assert len(entered) <= most
    if entered and len(entered) == most:
        last = list(state.waiting).index(entered[-1][0])
        assert looked <= last + 2  # the one that is there when the room is found to be full
    if most == 0:
        assert looked <= 1


def test_a_lane_at_its_cap_keeps_no_other_lane_out() -> None:
    """The flood waits; whoever is behind it in order enters."""
    waiting = [*(sequence(f"flood{n}", 10, "flood") for n in range(50)), sequence("chat", 10, "chat")]
    state = engine_state(waiting, [], SchedulingKnobs(lane_caps={"flood": 2}))
    assert [s.request_id for s, _ in admissible(waiting, Room(state), state)] == ["flood0", "flood1", "chat"]


def test_a_cap_below_what_runs_lets_nobody_in_until_enough_have_ended() -> None:
    """A knob turned down evicts nobody; it holds from the next entry on."""
    running = [sequence(f"r{n}", 10, "a", Slot(0, n)) for n in range(4)]
    for knobs in (
        SchedulingKnobs(max_num_seqs=2),
        SchedulingKnobs(band_caps=(2,)),
        SchedulingKnobs(lane_caps={"a": 2}),
    ):
        waiting = [sequence("w", 10, "a")]
        for count, enters in ((4, False), (3, False), (2, False), (1, True)):
            state = engine_state(waiting, running[:count], knobs)
            assert bool(admissible(waiting, Room(state), state)) == enters, (knobs, count)


def test_what_a_parked_sequence_has_generated_counts_for_its_band() -> None:
    """It comes back where all of it fits, not only its prompt."""
    parked = SequenceState("parked", 30, 4096, 0, 0.0, known_tokens=400, computed_tokens=399)
    state = engine_state([parked], [], SchedulingKnobs(band_margin_tokens=16))
    assert admissible([parked], Room(state), state) == [(parked, 1)]


def test_promotions_count_for_the_cap_of_the_band_that_they_go_to() -> None:
    """A sequence that has filled its band stalls while the next band is at its cap, or goes to one further up."""
    full = sequence("full", 64, slot=Slot(0, 0))
    full.computed_tokens = 64
    above = sequence("above", 100, slot=Slot(1, 0))
    stuck = engine_state([], [full, above], SchedulingKnobs(band_caps=(6, 1, 1)))
    moves, stalled = promotions_of(stuck, Room(stuck).streams)
    assert [move.band for move in moves] == [2] and not stalled
    top = sequence("top", 1000, slot=Slot(2, 0))
    stuck = engine_state([], [full, above, top], SchedulingKnobs(band_caps=(6, 1, 1)))
    moves, stalled = promotions_of(stuck, Room(stuck).streams)
    assert not moves and stalled == {"full"}


def test_continuous_keeps_caps_whatever_arrives() -> None:
    """Over a whole run no lane, no band and no total is ever above its cap, and everybody is served."""
    knobs = SchedulingKnobs(64, 32, band_margin_tokens=4, max_num_seqs=5, band_caps=(4, 2), lane_caps={"flood": 2})

    def check(state: SchedulerState, plan: object) -> None:
        assert len(state.running) <= 5
        bands = Counter(s.slot.band for s in state.running if s.slot is not None)
        assert bands[0] <= 4 and bands[1] <= 2
        assert sum(s.lane == "flood" for s in state.running) <= 2

    engine = DryEngine([Band(32, 8), Band(96, 4)], knobs, DecodeFirst(), check=check)
    for number in range(60):
        lane = "flood" if number % 4 else "chat"
        engine.submit(f"r{number}", 5 + 7 * number % 40, 3 + number % 30, lane=lane, arrived_s=float(number))
    most = 0
    while engine.waiting or engine.running:
        engine.step()
        most = max(most, len(engine.running))
    assert len(engine.ended) == 60
    assert most == 5, "the caps were never reached"


def test_the_order_is_the_one_handed_in() -> None:
    """Not the engine's own: strategies differ in it."""
    waiting = [sequence(name, 10) for name in "cab"]
    state = engine_state(waiting, [], SchedulingKnobs(max_num_seqs=2))
    assert [s.request_id for s, _ in admissible(waiting, Room(state), state)] == ["c", "a"]
    assert [s.request_id for s, _ in admissible(sorted(waiting, key=urgency), Room(state), state)] == ["a", "b"]
