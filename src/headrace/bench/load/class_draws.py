"""What the requests of one class are, in order: drawn from generators that belong to this class alone.

The n-th request of a class (the n-th conversation, where its requests are turns) is the same whatever the other
classes are, how they are weighed, and how many requests there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from numpy.random import Generator

from headrace.bench.load.context_fit import ContextFit
from headrace.bench.load.empirical_lengths import EmpiricalLengths, sample_pairs
from headrace.bench.load.length_model import Lengths
from headrace.bench.load.lengths import parse_lengths
from headrace.bench.load.streams import BLOCK, Purpose, endless, generator, text_seeds
from headrace.bench.load.workload import Session, TrafficClass
from headrace.bench.planned import SharedPrefix

_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request, or one turn of a conversation. ``input_tokens``: the whole prompt. ``think_ns``: the time
    before this turn (0 for a first one)."""

    input_tokens: int
    output_tokens: int
    text_seed: int
    think_ns: int = 0


@dataclass(frozen=True, slots=True)
class DrawnSession:
    """A conversation's turns and what they all begin with."""

    turns: list[Drawn]
    prefix: SharedPrefix | None


class ClassDraws:
    """The endless row of a class's requests."""

    def __init__(self, name: str, traffic: TrafficClass, *, seed: int, fit: ContextFit, folder: Path) -> None:
        assert traffic.input_length is not None
        assert traffic.output_length is not None
        self._fit = fit
        self._factor = fit.factor(traffic)
        self._session = traffic.session
        inputs = parse_lengths(traffic.input_length, folder=folder)
        outputs = parse_lengths(traffic.output_length, folder=folder)
        self._lengths = _lengths(inputs, outputs, seed, name)
        self.text_seeds = text_seeds(seed, name)
        self._prefixes = _prefixes(name, traffic, fit, seed)
        self._turns, self._thinks = _session_draws(traffic.session, seed, name, folder)

    def request(self) -> tuple[Drawn, SharedPrefix | None]:
        """The next request of a class without sessions."""
        own, output = next(self._lengths)
        prefix = next(self._prefixes)
        shared = 0 if prefix is None else prefix.tokens
        return self._drawn(shared + self._scaled(own), output, 0), prefix

    def session(self) -> DrawnSession:
        """The next conversation: as many of its turns as fit the context, at least one."""
        assert self._session is not None
        wanted = next(self._turns)
        prefix = next(self._prefixes)
        shared = 0 if prefix is None else prefix.tokens
        own, output = next(self._lengths)
        first = self._drawn(shared + self._scaled(own), output, 0)
        turns = [first]
        before = first.input_tokens + first.output_tokens if self._session.history else shared
        for _ in range(wanted - 1):
            own, output = next(self._lengths)
            think_ns = next(self._thinks) * _NS_PER_MS
            total = before + self._scaled(own)
            if self._session.history:
                if not self._fit.fits(total, output):
                    break
                before = total + output
            turns.append(self._drawn(total, output, think_ns))
        return DrawnSession(turns, prefix)

    def _scaled(self, own_tokens: int) -> int:
        return max(1, round(own_tokens * self._factor))

    def _drawn(self, input_tokens: int, output_tokens: int, think_ns: int) -> Drawn:
        input_tokens, output_tokens = self._fit.cut(input_tokens, output_tokens)
        return Drawn(input_tokens, output_tokens, next(self.text_seeds), think_ns)


def _lengths(inputs: Lengths, outputs: Lengths, seed: int, name: str) -> Iterator[tuple[int, int]]:
    of_input, of_output = generator(seed, Purpose.INPUT, name), generator(seed, Purpose.OUTPUT, name)
    if isinstance(inputs, EmpiricalLengths) and isinstance(outputs, EmpiricalLengths):
        return _pairs(inputs, outputs, of_input)
    return zip(endless(inputs.sample, of_input), endless(outputs.sample, of_output), strict=True)


def _pairs(inputs: EmpiricalLengths, outputs: EmpiricalLengths, random: Generator) -> Iterator[tuple[int, int]]:
    """Rows of one file stay together."""
    while True:
        own, output = sample_pairs(inputs, outputs, random, BLOCK)
        yield from zip(own.tolist(), output.tolist(), strict=True)


def _prefixes(name: str, traffic: TrafficClass, fit: ContextFit, seed: int) -> Iterator[SharedPrefix | None]:
    pool = traffic.shared_prefix
    if pool is None:
        while True:
            yield None
    tokens = fit.cut_prefix(max(1, round(pool.tokens * fit.factor(traffic))))
    shared = [SharedPrefix(key=f"{name}/{number}", tokens=tokens) for number in range(pool.count)]
    random = generator(seed, Purpose.PREFIX, name)
    for chosen in endless(lambda source, count: source.integers(0, pool.count, count), random):
        yield shared[chosen]


def _session_draws(session: Session | None, seed: int, name: str, folder: Path) -> tuple[Iterator[int], Iterator[int]]:
    """Numbers of turns, and think times in milliseconds."""
    if session is None:
        return iter(()), iter(())
    turns, thinks = parse_lengths(session.turns, folder=folder), parse_lengths(session.think_ms, folder=folder)
    return (
        endless(turns.sample, generator(seed, Purpose.TURNS, name)),
        endless(thinks.sample, generator(seed, Purpose.THINK, name)),
    )
