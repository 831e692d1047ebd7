"""Open-loop traffic for the virtual clock: when requests come, how long they are, and whose they are.

Times and lengths are drawn as ``headrace bench`` draws them, from the same texts (``poisson(2)``, ``burst(...)``,
``lognormal(...)``). Every stream of requests has random sources of its own, so that adding one (a flood) moves no
other by a nanosecond: runs with and without it are comparable request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from msgspec import Struct

from headrace.bench.load.arrivals import ClosedLoop, parse_arrivals
from headrace.bench.load.lengths import parse_lengths
from headrace.bench.load.streams import Choices, Purpose, endless, generator
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Event, SimulationError


class RequestStream(Struct, frozen=True):
    """Requests of one kind. ``name`` is unique in a load and begins each request's id; ``tenants`` weighs who sends
    them (empty: nobody in particular). ``expected_tokens`` is what the engine is told about output lengths."""

    name: str
    lane: str
    arrivals: str
    input_length: str
    output_length: str
    priority: int = 0
    targets: Targets = Targets()
    tenants: dict[str, float] = {}
    expected_tokens: int | None = None
    max_tokens: int | None = None


def requests_of(
    streams: Sequence[RequestStream], *, seed: int, duration_s: float, longest_tokens: int
) -> list[VirtualRequest]:
    """All requests of ``duration_s``, in the order of their arrival. Prompts are cut so that they and their outputs
    fit into ``longest_tokens``. Raises ConfigError for a text that cannot be read, SimulationError for a closed loop,
    whose times are not known beforehand."""
    drawn = [
        request
        for stream in streams
        for request in _drawn(stream, seed=seed, duration_s=duration_s, longest_tokens=longest_tokens)
    ]
    return sorted(drawn, key=lambda request: (request.arrived_s, request.request_id))


def _drawn(stream: RequestStream, *, seed: int, duration_s: float, longest_tokens: int) -> Iterator[VirtualRequest]:
    arrivals = parse_arrivals(stream.arrivals, where=stream.name)
    if isinstance(arrivals, ClosedLoop):
        raise SimulationError(f"{stream.name}: {stream.arrivals} has no times of its own")
    inputs = endless(parse_lengths(stream.input_length).sample, generator(seed, Purpose.INPUT, stream.name))
    outputs = endless(parse_lengths(stream.output_length).sample, generator(seed, Purpose.OUTPUT, stream.name))
    weights = stream.tenants or {"": 1.0}
    tenants = Choices(weights, generator(seed, Purpose.CLASSES, stream.name))
    times_ns = arrivals.times_ns(generator(seed, Purpose.ARRIVALS, stream.name), duration_s).tolist()
    for number, at_ns in enumerate(times_ns):
        output_tokens = min(next(outputs), longest_tokens // 2)
        yield VirtualRequest(
            request_id=f"{stream.name}-{number}",
            arrived_s=at_ns * 1e-9,
            prompt_tokens=max(1, min(next(inputs), longest_tokens - output_tokens - 1)),
            output_tokens=output_tokens,
            lane=stream.lane,
            tenant=next(tenants) or None,
            priority=stream.priority,
            targets=stream.targets,
            max_tokens=stream.max_tokens,
            expected_tokens=stream.expected_tokens,
        )


def feed(
    requests: Iterable[VirtualRequest], submit: Callable[[VirtualRequest, float], Iterable[Event]]
) -> tuple[Event, ...]:
    """The first arrival, which brings the next one: ``requests`` in the order of their arrival."""
    rest = iter(requests)
    first = next(rest, None)
    return () if first is None else (Event(first.arrived_s, partial(_arrive, first, rest, submit)),)


def _arrive(
    request: VirtualRequest,
    rest: Iterator[VirtualRequest],
    submit: Callable[[VirtualRequest, float], Iterable[Event]],
    now_s: float,
) -> Iterable[Event]:
    return (*submit(request, now_s), *feed(rest, submit))
