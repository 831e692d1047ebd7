"""Does a plan keep every promise of ``StepPlan``, whichever policy made it? Used by tests and by the virtual engine."""

from __future__ import annotations

from collections import Counter
from typing import Final

from headrace.scheduling.admissible import band_of
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan

_ROUNDING_S: Final = 1e-9
"""A wait is a difference of times, which is rounded."""


def check_plan(state: SchedulerState, plan: StepPlan) -> list[str]:
    """What is wrong with ``plan``, in words; empty when nothing is."""
    return _Check(state, plan).problems()


class _Check:
    """One plan beside its state."""

    def __init__(self, state: SchedulerState, plan: StepPlan) -> None:
        self.state = state
        self.plan = plan
        self.waiting = {sequence.request_id: sequence for sequence in state.waiting}
        self.running = {sequence.request_id: sequence for sequence in state.running}
        self.victims = set(plan.victims)
        self.admitted = {admission.request_id: admission.band for admission in plan.admissions}
        self.promoted = {promotion.request_id: promotion.band for promotion in plan.promotions}
        self.chunks = {chunk.request_id: chunk.tokens for chunk in plan.prefill}
        self.decoded = set(plan.decode)
        self.found: list[str] = []

    def problems(self) -> list[str]:
        self._names()
        if not self.found:  # the rest looks sequences up
            self._streams()
            self._moves()
            self._promotions()
            self._admissions()
            self._caps()
            self._rows()
            self._work()
        return self.found

    def _expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.found.append(problem)

    def _names(self) -> None:
        """Everybody is named once, and is where the plan says."""
        plan = self.plan
        for part, names, among in (
            ("victims", list(plan.victims), self.running.keys()),
            ("moves", [move.request_id for move in plan.moves], self.running.keys() - self.victims),
            ("admissions", [a.request_id for a in plan.admissions], self.waiting.keys()),
            ("promotions", [p.request_id for p in plan.promotions], self.running.keys() - self.victims),
            ("decode", list(plan.decode), self.running.keys() - self.victims),
            (
                "prefill",
                [c.request_id for c in plan.prefill],
                self.running.keys() - self.victims | self.admitted.keys(),
            ),
        ):
            self._expect(len(set(names)) == len(names), f"{part} names somebody twice: {names}")
            strangers = sorted(set(names) - among)
            self._expect(not strangers, f"{part} names {strangers}, who may not be there")
        both = sorted(self.decoded & self.chunks.keys())
        self._expect(not both, f"{both} are in decode and prefill")
        bands = range(len(self.state.bands))
        self._expect(
            all(band in bands for band in (*self.admitted.values(), *self.promoted.values())), "a band does not exist"
        )

    def _streams(self) -> None:
        """No more streams are taken than are free once the victims have left."""
        freed = Counter(sequence.slot.band for v in self.victims if (sequence := self.running[v]).slot is not None)
        taken = Counter([*self.admitted.values(), *self.promoted.values()])
        for band, free in enumerate(self.state.free_streams):
            self._expect(
                taken[band] <= free + freed[band], f"band {band}: {taken[band]} streams for {free} + {freed[band]} free"
            )

    def _moves(self) -> None:
        """Moves go to streams that are free when their turn comes, downwards: a band gets denser by no other."""
        held = {s.slot for s in self.running.values() if s.slot is not None and s.request_id not in self.victims}
        for move in self.plan.moves:
            slot = self.running[move.request_id].slot
            if slot is None:
                self.found.append(f"{move.request_id} moves and has no stream")
                continue
            target = type(slot)(slot.band, move.stream)
            self._expect(0 <= move.stream < slot.stream, f"{move.request_id} moves from {slot} to {move.stream}")
            self._expect(target not in held, f"{move.request_id} moves to {target}, which is taken")
            held.discard(slot)
            held.add(target)

    def _full(self, sequence: SequenceState) -> bool:
        slot = sequence.slot
        return slot is not None and sequence.computed_tokens >= self.state.bands[slot.band].max_context_tokens

    def _promotions(self) -> None:
        """Only sequences that have filled their band go up."""
        for name, band in self.promoted.items():
            sequence = self.running[name]
            self._expect(self._full(sequence), f"{name} is promoted and has room")
            self._expect(sequence.slot is not None and band > sequence.slot.band, f"{name} is promoted downwards")

    def _admissions(self) -> None:
        """Whoever enters a band fits it, with all that it has generated already."""
        for name, band in self.admitted.items():
            known, room = self.waiting[name].known_tokens, self.state.bands[band].max_context_tokens
            self._expect(known <= room, f"{name} has {known} tokens and enters a band of {room}")

    def _caps(self) -> None:
        """Nobody enters what is at its cap. More may be there from before, when the cap was turned down."""
        knobs = self.state.knobs
        staying = [s for s in self.running.values() if s.request_id not in self.victims]
        entered = [self.waiting[name] for name in self.admitted]
        if knobs.max_num_seqs is not None and entered:
            total = len(staying) + len(entered)
            self._expect(total <= knobs.max_num_seqs, f"{total} sequences, max_num_seqs is {knobs.max_num_seqs}")
        lanes = Counter(sequence.lane for sequence in (*staying, *entered))
        for lane in sorted({sequence.lane for sequence in entered}):
            cap = knobs.lane_caps.get(lane)
            self._expect(
                cap is None or lanes[lane] <= cap, f"lane {lane!r} has {lanes[lane]} sequences, its cap is {cap}"
            )
        if knobs.band_caps is not None:
            bands = Counter(self.promoted.get(s.request_id, s.slot.band) for s in staying if s.slot is not None)
            bands.update(self.admitted.values())
            for band in sorted(set(self.admitted.values())):
                cap = knobs.band_caps[band] if band < len(knobs.band_caps) else None
                self._expect(cap is None or bands[band] <= cap, f"band {band} has {bands[band]}, its cap is {cap}")

    def _rows(self) -> None:
        """What is computed is pending, fits its band, and stays within the budgets."""
        knobs, tokens = self.state.knobs, sum(self.chunks.values())
        self._expect(
            len(self.decoded) + tokens <= knobs.step_tokens,
            f"{len(self.decoded)} + {tokens} tokens, step_tokens is {knobs.step_tokens}",
        )
        self._expect(
            tokens <= knobs.max_prefill_tokens,
            f"{tokens} prefill tokens, max_prefill_tokens {knobs.max_prefill_tokens}",
        )
        for name in sorted(self.decoded):
            sequence = self.running[name]
            self._expect(sequence.decoding, f"{name} is in decode and has {sequence.pending_tokens} tokens pending")
            self._expect(not self._full(sequence) or name in self.promoted, f"{name} has filled its band and decodes")
        for name, count in self.chunks.items():
            sequence = self.running.get(name) or self.waiting[name]
            limit = min(sequence.pending_tokens, sequence.chunk_limit_tokens or sequence.pending_tokens)
            self._expect(1 <= count <= limit, f"{name} gets {count} prefill tokens and may have 1 to {limit}")
            band = self.admitted.get(name, self.promoted.get(name, sequence.slot.band if sequence.slot else 0))
            room = self.state.bands[band].max_context_tokens
            self._expect(sequence.computed_tokens + count <= room, f"{name} is computed beyond its band of {room}")

    def _work(self) -> None:
        """Something runs if anything could, unless the plan waits for company within the merge window."""
        plan, knobs = self.plan, self.state.knobs
        if not plan.empty:
            self._expect(plan.wait_s is None, "computes and waits")
            return
        if plan.wait_s is not None:
            self._expect(plan.wait_s > 0, f"waits {plan.wait_s} s")
        startable = [s.request_id for s in self.running.values() if not self._full(s) and s.pending_tokens]
        if plan.victims or plan.moves or plan.admissions or plan.promotions:
            return  # whoever changed places runs in the next plan, which is asked for at once
        if startable:
            self.found.append(f"nothing runs and {startable[0]} could")
        if plan.wait_s is None or plan.wait_s > knobs.merge_window_s + _ROUNDING_S:
            could = self._admissible()
            self._expect(could is None, f"nothing runs, {could} could enter, wait_s is {plan.wait_s}")

    def _admissible(self) -> str | None:
        """Somebody who waits and could have entered an engine in which nothing runs."""
        knobs, running = self.state.knobs, self.running.values()
        if knobs.max_num_seqs is not None and len(self.running) >= knobs.max_num_seqs:
            return None
        lanes = Counter(sequence.lane for sequence in running)
        bands = Counter(sequence.slot.band for sequence in running if sequence.slot is not None)
        for sequence in self.state.waiting:
            band = band_of(sequence, self.state)
            if band is None or self.state.free_streams[band] == 0:
                continue
            band_cap = None if knobs.band_caps is None or band >= len(knobs.band_caps) else knobs.band_caps[band]
            lane_cap = knobs.lane_caps.get(sequence.lane)
            if (band_cap is None or bands[band] < band_cap) and (lane_cap is None or lanes[sequence.lane] < lane_cap):
                return sequence.request_id
        return None
