"""vLLM's requests as the sequences that policies look at, kept in step with vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace.scheduling.bands import Band, band_for
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates, WaitingQueue
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.traffic import TrafficWindow
from headrace.vllm.adapter import Adapter
from headrace.vllm.gate import GatedQueue
from headrace.vllm.shapes import Request, Scheduler
from headrace.vllm.xargs import from_xargs

CACHE_LOOKS: Final = 8
"""A look takes some ten microseconds for every thousand tokens of a prompt."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One request and its sequence. ``tokens`` is how many it really had when looked at last: ``known_tokens`` counts
    those that steps in flight will bring, too. ``waits`` says whether it is in the order of waiting ones."""

    request: Request
    state: SequenceState
    tokens: int
    waits: bool = False


class Book:
    """All live requests. ``now_s`` is monotonic, ``wall_s`` the clock of vLLM's arrival times."""

    def __init__(
        self,
        adapter: Adapter,
        bands: tuple[Band, ...],
        knobs: SchedulingKnobs,
        *,
        wall_s: Callable[[], float],
        chunk_limit_tokens: int | None = None,
    ) -> None:
        self.bands = bands
        self.queue = WaitingQueue(bands, knobs)
        self.traffic = TrafficWindow()
        self.running: list[SequenceState] = []
        """As of ``look``, in the order of vLLM's list."""
        self.members = [0] * len(bands)
        """How many run in every band, as of ``look``."""
        self.unready: dict[str, Tracked] = {}
        """Waiting, but cannot run yet whatever the policy says."""
        self.ignored_xargs = 0
        """Fields that made no sense."""
        self.unsound: tuple[str, ...] = ()
        """The latest such names, for the log."""
        self._adapter = adapter
        self._wall_s = wall_s
        self._chunk_limit_tokens = chunk_limit_tokens
        self._slots = tuple([Slot(band, 0) for band in range(len(bands))])
        self._tracked: dict[str, Tracked] = {}
        self._urgent = 0
        self._urgent_left_s = -math.inf
        self._next_group = 0

    def __len__(self) -> int:
        return len(self._tracked)

    def __getitem__(self, request_id: str) -> Tracked:
        return self._tracked[request_id]

    def urgent_seen_s(self, now_s: float) -> float:
        """When a sequence with a target was last alive."""
        return now_s if self._urgent else self._urgent_left_s

    def set_knobs(self, knobs: SchedulingKnobs) -> None:
        """New knobs: the order of waiting ones may change."""
        self.queue.set_knobs(knobs)

    # Coming and going

    def settle(
        self, gate: GatedQueue, finished: Iterable[str], now_s: float, rates: ServiceRates, scheduler: Scheduler
    ) -> None:
        """Take in who came to vLLM's queue, left it, or ended since the last call."""
        for request_id in finished:
            self._forget(request_id, now_s)
        if gate.touched:
            touched, gate.touched = gate.touched, {}
            for request_id, request in touched.items():
                if request_id in gate.members:
                    self._wait(request, now_s)
                elif request.is_finished():
                    self._forget(request_id, now_s)
                else:
                    self._leave(request, now_s)
        if self.unready:
            for request_id, tracked in list(self.unready.items()):
                if self._adapter.readiness(tracked.request) == "ready":
                    del self.unready[request_id]
                    self._line_up(tracked, rates, scheduler)

    def _track(self, request: Request, now_s: float) -> Tracked:
        fields, wrong = from_xargs(None if request.sampling_params is None else request.sampling_params.extra_args)
        if wrong:
            self.ignored_xargs += len(wrong)
            self.unsound = wrong
        arrived_s = now_s - max(0.0, self._wall_s() - request.arrival_time)
        due_s = [t for t in (fields.first_token_in_s, fields.finish_in_s) if t is not None]
        longest = self.bands[-1].max_context_tokens
        state = SequenceState(
            request.request_id,
            request.num_prompt_tokens,
            min(longest, request.num_prompt_tokens + request.max_tokens),
            request.priority if fields.priority is None else fields.priority,
            arrived_s,
            arrived_s + min(due_s) if due_s else None,
            known_tokens=request.num_tokens,
            chunk_limit_tokens=self._chunk_limit_tokens,
            lane=fields.lane,
            tenant=fields.tenant,
            tpot_s=fields.tpot_s,
            finish_by_s=None if fields.finish_in_s is None else arrived_s + fields.finish_in_s,
            expected_tokens=fields.expected_tokens,
        )
        tracked = self._tracked[request.request_id] = Tracked(request, state, request.num_tokens)
        self._urgent += state.urgent
        expected = state.prompt_tokens + state.output_tokens_to_expect
        self.traffic.note(expected, state.lane, state.urgent, fields.stream)
        return tracked

    def _wait(self, request: Request, now_s: float) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.state.prompt_tokens != request.num_prompt_tokens:
            # New, or a session whose next turn begins.
            self._forget(request.request_id, now_s)
            tracked = self._track(request, now_s)
        state = tracked.state
        if state.slot is not None:  # it was preempted: vLLM computes it again
            state.slot = None
            state.known_tokens = tracked.tokens = request.num_tokens
            state.computed_tokens = 0
        if not tracked.waits:
            self.unready[request.request_id] = tracked

    def _line_up(self, tracked: Tracked, rates: ServiceRates, scheduler: Scheduler) -> None:
        """It could run: it takes its place in the order."""
        state, request = tracked.state, tracked.request
        state.known_tokens = tracked.tokens = request.num_tokens
        state.cached_tokens = min(self._adapter.cached_tokens(scheduler, request), state.known_tokens - 1)
        tracked.waits = True
        self.queue.add(state, rates)

    def note_cached(self, scheduler: Scheduler) -> None:
        """What the prefix cache holds of the prompts that come next: others may have computed their beginnings since.
        Looks at the first of every group, so many in all as a step can spare the time for."""
        left = CACHE_LOOKS
        groups = list(self.queue.groups.values())
        self._next_group %= max(1, len(groups))
        for group in groups[self._next_group :] + groups[: self._next_group]:
            if left <= 0:
                break
            self._next_group += 1
            for _, request_id, state in (group.on_time or group.late)[:left]:
                tracked = self._tracked[request_id]
                state.cached_tokens = min(
                    self._adapter.cached_tokens(scheduler, tracked.request), state.known_tokens - 1
                )
                left -= 1

    def _leave(self, request: Request, now_s: float) -> None:
        """It left vLLM's queue alive: it runs, or waits elsewhere for its KV."""
        tracked = self._tracked.get(request.request_id) or self._track(request, now_s)
        self.unready.pop(request.request_id, None)
        if not tracked.waits:
            return
        tracked.waits = False
        if self._adapter.runs(request):
            self.queue.take(tracked.state, now_s)
        else:
            self.queue.discard(tracked.state)

    def _forget(self, request_id: str, now_s: float) -> None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self.unready.pop(request_id, None)
        if tracked.waits:
            self.queue.discard(tracked.state)
        if tracked.state.urgent:
            self._urgent -= 1
            self._urgent_left_s = now_s

    # Every step

    def look(self, requests: Iterable[Request], tokens_at_s: float, now_s: float) -> None:
        """Bring the running sequences up to date with vLLM's. New tokens came at ``tokens_at_s``. O(n), and written
        for speed: it runs before every step."""
        tracked_of, slots, bands = self._tracked, self._slots, self.bands
        single = len(bands) == 1
        members = [0] * len(bands)
        running: list[SequenceState] = []
        for request in requests:
            tracked = tracked_of.get(request.request_id)
            if tracked is None:
                tracked = self._track(request, now_s)
            state = tracked.state
            tokens = request.num_tokens
            if tokens != tracked.tokens:
                tracked.tokens = state.known_tokens = tokens
                state.note_token(tokens_at_s)
            coming = request.num_output_placeholders
            computed = request.num_computed_tokens
            if coming:
                if computed + 2 - coming >= request.num_prompt_tokens + request.max_tokens:
                    tokens = computed  # its last token is in flight: nothing is left to compute
                else:
                    tokens += coming
            state.known_tokens = tokens
            state.computed_tokens = computed
            if single:
                state.slot = slots[0]
            else:
                band = band_for(tokens, bands)
                place = len(bands) - 1 if band is None else band
                state.slot = slots[place]
                members[place] += 1
            running.append(state)
        if single:
            members[0] = len(running)
        self.running, self.members = running, members

    def free_streams(self, most: int) -> tuple[int, ...]:
        """How many more may run in every band, at most ``most`` in all."""
        return tuple(
            [min(most, max(0, band.max_sequences - used)) for band, used in zip(self.bands, self.members, strict=True)]
        )

    def check_integrity(self, gate: GatedQueue, scheduler: Scheduler) -> str | None:
        """None when the accounts agree with vLLM's right after ``settle`` and ``look``; else what is wrong."""
        problem = self.queue.check_integrity()
        if problem is not None:
            return problem
        waiting = {s.request_id for s in self.queue} | set(self.unready)
        if waiting != set(gate.members):
            return f"the waiting ones do not agree: {sorted(waiting ^ set(gate.members))}"
        if {r.request_id for r in gate} != set(gate.members):
            return "the queue and its members do not agree"
        if [s.request_id for s in self.running] != [r.request_id for r in scheduler.running]:
            return "the running ones do not agree"
        gone = set(self._tracked) - set(scheduler.requests)
        if gone:
            return f"ended requests are remembered: {sorted(gone)}"
        if sum(t.state.urgent for t in self._tracked.values()) != self._urgent:
            return "the count of urgent sequences is wrong"
        return None
