"""From what is drawn for a class to planned requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.bench.load.class_draws import ClassDraws, Drawn, DrawnSession
from headrace.bench.load.context_fit import ContextFit
from headrace.bench.load.streams import Choices, Purpose, fractions, generator, text_seeds
from headrace.bench.load.workload import IllegalTraffic, TrafficClass, Workload
from headrace.bench.load.workload_file import MALFORMED_CLASS
from headrace.bench.planned import MalformedKind, PlannedRequest
from headrace.bench.requests.malformed import BEYOND_ANY_CONTEXT_TOKENS, MALFORMED_KINDS


class LiveSession:
    """A conversation that is being planned: ``turn`` is its next one, ``last_index`` the one before it."""

    __slots__ = ("drawn", "last_index", "name", "turn")

    def __init__(self, name: str, drawn: DrawnSession) -> None:
        self.name = name
        self.drawn = drawn
        self.turn = 0
        self.last_index: int | None = None

    @property
    def ended(self) -> bool:
        return self.turn == len(self.drawn.turns)

    @property
    def next_turn(self) -> Drawn:
        return self.drawn.turns[self.turn]


class ClassPlan:
    """Plans the requests of one class, in order."""

    def __init__(self, name: str, traffic: TrafficClass, draws: ClassDraws) -> None:
        self.name = name
        self.traffic = traffic
        self.in_sessions = traffic.session is not None
        self._draws = draws
        self._sessions = 0

    def single(self, index: int, *, due_ns: int | None, user: int | None, think_ns: int) -> PlannedRequest:
        """The next request of a class without sessions."""
        drawn, prefix = self._draws.request()
        traffic = self.traffic
        return PlannedRequest(
            index=index,
            class_name=self.name,
            input_tokens=drawn.input_tokens,
            output_tokens=drawn.output_tokens,
            due_ns=due_ns,
            lane=traffic.lane,
            headers=traffic.headers,
            body=traffic.body,
            priority=traffic.priority,
            prefix=prefix,
            user=user,
            think_ns=think_ns,
            text_seed=drawn.text_seed,
        )

    def begin(self) -> LiveSession:
        """The next conversation of a class with sessions."""
        self._sessions += 1
        return LiveSession(f"{self.name}-{self._sessions}", self._draws.session())

    def turn(
        self, live: LiveSession, index: int, *, due_ns: int | None, user: int | None, think_ns: int
    ) -> PlannedRequest:
        """The next turn of a conversation."""
        traffic, drawn = self.traffic, live.next_turn
        assert traffic.session is not None
        planned = PlannedRequest(
            index=index,
            class_name=self.name,
            input_tokens=drawn.input_tokens,
            output_tokens=drawn.output_tokens,
            due_ns=due_ns,
            lane=traffic.lane,
            headers=traffic.headers,
            body=traffic.body,
            priority=traffic.priority,
            prefix=live.drawn.prefix,
            session=live.name,
            turn=live.turn,
            after=live.last_index if traffic.session.history else None,
            user=user,
            think_ns=think_ns,
            text_seed=drawn.text_seed,
        )
        live.turn += 1
        live.last_index = index
        return planned


def class_plans(workload: Workload, *, seed: int, fit: ContextFit, folder: Path) -> dict[str, ClassPlan]:
    """A plan for each class of the workload, all of which have lengths."""
    return {
        name: ClassPlan(name, traffic, ClassDraws(name, traffic, seed=seed, fit=fit, folder=folder))
        for name, traffic in workload.classes.items()
    }


class IllegalPlan:
    """Decides where illegal requests come in addition to the legal ones, and of which kind they are."""

    def __init__(self, illegal: IllegalTraffic | None, *, seed: int, fit: ContextFit) -> None:
        self._share = 0.0 if illegal is None else illegal.share
        kinds: dict[str, float] = dict.fromkeys(MALFORMED_KINDS, 1.0) if illegal is None else illegal.kinds
        random = generator(seed, Purpose.MALFORMED)
        self._fractions = fractions(random)
        self._kinds: Iterator[str] = Choices(
            kinds or dict.fromkeys(MALFORMED_KINDS, 1.0), generator(seed, Purpose.MALFORMED, "kinds")
        )
        self._seeds = text_seeds(seed, MALFORMED_CLASS)
        self._too_long = BEYOND_ANY_CONTEXT_TOKENS if fit.context_tokens is None else 2 * fit.context_tokens

    def place(self) -> float | None:
        """For one legal arrival: None, or where between it and the next one an illegal request comes (0 to 1)."""
        if self._share == 0:
            return None
        return next(self._fractions) if next(self._fractions) < self._share else None

    def request(self, index: int, *, due_ns: int | None, user: int | None = None, think_ns: int = 0) -> PlannedRequest:
        """The next illegal request. ``input_tokens`` is 0 where a prompt's length is not what is wrong."""
        name = next(self._kinds)
        kind: MalformedKind = next(known for known in MALFORMED_KINDS if known == name)
        return PlannedRequest(
            index=index,
            class_name=MALFORMED_CLASS,
            input_tokens=self._too_long if kind == "too_long" else 0,
            output_tokens=0,
            due_ns=due_ns,
            user=user,
            think_ns=think_ns,
            malformed=kind,
            text_seed=next(self._seeds),
        )
