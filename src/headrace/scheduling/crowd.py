"""When enough decode already: prompts of less urgent lanes wait for those who are ahead to finish.

A decode step serves more sequences for little more time, as long as they are few. Then a prompt is worth its time at
once: it makes the batch fuller. Once the batch decodes at nearly the best rate (``caps.crowd``), one more only makes
everybody slower, and each of them stays longer: sequences pile up until streams run out, and then even the most urgent
arrival waits. So a prompt waits while such a crowd of more urgent lanes decodes, until it has become smaller or the
prompt's own deadline presses. The work is the same, in an order in which fewer are
under way at any time (shortest jobs first: L. Kleinrock, Queueing Systems II, chapter 3).

It never waits for a sequence that it would come before by age: a lane counts as more urgent only while a request that
arrived in it now would rank before the prompt, debts included. That is the bound of ``order``, and holds here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.scheduling.batch_room import presses
from headrace.scheduling.order import DEBT_WEIGHT, WaitingQueue
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState


@dataclass(slots=True)
class _Owner:
    """Decoders of one lane, tenant and priority; a new one of theirs would rank ``ahead_s`` from now."""

    priority: int
    ahead_s: float
    decoders: int = 0


class Crowd:
    """The decoding sequences by lane and tenant. Counted once it is asked about."""

    def __init__(
        self,
        decoders: Sequence[SequenceState],
        state: SchedulerState,
        queue: WaitingQueue,
        presses_until_s: float,
    ) -> None:
        self._decoders = decoders
        self._queue = queue
        self._now_s = state.now_s
        self._enough = state.crowd
        self._presses_until_s = presses_until_s
        self._owners: list[_Owner] | None = None

    def holds_back(self, sequence: SequenceState, rank_s: float, late: bool) -> bool:
        """Whether the prompt of ``sequence``, which ranks at ``rank_s`` with lateness and debt, waits for decodes."""
        if not self._enough or len(self._decoders) < self._enough:
            return False
        if not late and presses(sequence, self._presses_until_s):
            return False
        if self._owners is None:
            self._owners = self._count()
        ahead = 0
        for owner in self._owners:
            if owner.priority < sequence.priority and self._now_s + owner.ahead_s < rank_s:
                ahead += owner.decoders
        return ahead >= self._enough

    def _count(self) -> list[_Owner]:
        debts_s = self._queue.debts_s
        owners: dict[tuple[str, str | None, int], _Owner] = {}
        for sequence in self._decoders:
            ahead_s = (sequence.rank_s or 0.0) - sequence.arrived_s
            key = (sequence.lane, sequence.tenant, sequence.priority)
            owner = owners.get(key)
            if owner is None:
                owner = owners[key] = _Owner(sequence.priority, ahead_s)
            elif ahead_s > owner.ahead_s:
                owner.ahead_s = ahead_s
            owner.decoders += 1
        if debts_s:
            for (lane, tenant, _), owner in owners.items():
                owner.ahead_s += DEBT_WEIGHT * debts_s.get((lane, tenant), 0.0)
        return list(owners.values())
