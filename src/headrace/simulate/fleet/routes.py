"""Which replica a request goes to: pure choices among what the gateway sees of replicas.

The simulator's one seam to routing: ``router`` gives the function for a name. ``gateway`` is the choice of the real
gateway (``routing.decide``), unmodified; the others are simple ones to compare it with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.routing.decide import ReplicaView, RouteRequest, RouteSettings, route
from headrace.simulate.fleet.scenario import RouterName

IMBALANCE: Final = 1.5
"""A replica that has the prefix is passed over when it has so many times the requests of the emptiest one."""
SLACK_REQUESTS: Final = 8
"""And so many more besides."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the gateway sees of a replica: requests in it, prompt tokens of those without a first token, and the wait
    that it predicts from them, seconds. ``cached_tokens`` of the request's prompt are there already. ``places`` is how
    many requests it computes at once, ``prefill_tokens_per_s`` its measured rate (0: not known)."""

    requests: int
    waiting_tokens: int
    wait_s: float
    cached_tokens: int = 0
    places: int = 1
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The request: its place among all (from 0) and its prompt's length."""

    number: int
    prompt_tokens: int


Router = Callable[[Sequence[Seen], Asked, random.Random], int]
"""The place of the chosen replica among those seen, of which there is one at least."""


def router(name: RouterName) -> Router:
    """The choice of that name."""
    return _ROUTERS[name]


def needs_prefix(name: RouterName) -> bool:
    """Whether the choice looks at ``Seen.cached_tokens``."""
    return name in ("prefix", "gateway")


def needs_wait(name: RouterName) -> bool:
    """Whether the choice looks at ``Seen.wait_s``."""
    return name == "least-wait"


def gateway(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """The real gateway's: the least predicted time to the first token, two drawn among those that cost about the same.

    The real gateway keeps a request while no replica has a place. Here it waits in the replica that it is sent to, so
    when all are full their places count once more for every round of them that is taken.
    """
    seen = list(seen)
    rounds = 1 + min([one.requests // one.places for one in seen])
    views = [
        ReplicaView(
            str(place),
            in_flight=one.requests,
            limit=one.places * rounds,
            waiting_tokens=one.waiting_tokens,
            prefill_tokens_per_s=one.prefill_tokens_per_s,
        )
        for place, one in enumerate(seen)
    ]
    matched = {str(place): one.cached_tokens for place, one in enumerate(seen) if one.cached_tokens}
    decision = route(RouteRequest(asked.prompt_tokens, matched_tokens=matched), views, RouteSettings(), source)
    assert decision.replica is not None, f"a healthy replica with a place was refused: {decision.reason}"
    return int(decision.replica)


def power_of_two(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """Of two at random, the one with fewer requests; fewer waiting tokens decide a tie (M. Mitzenmacher, The power of
    two choices in randomized load balancing, 2001)."""
    count = len(seen)
    if count == 1:
        return 0
    first = int(source.random() * count)
    second = int(source.random() * (count - 1))
    second += second >= first
    one, other = seen[first], seen[second]
    keys = (one.requests, one.waiting_tokens, first), (other.requests, other.waiting_tokens, second)
    return first if keys[0] < keys[1] else second


def least_requests(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """The one with the fewest requests; of several the next one in turn."""
    seen = list(seen)
    count = len(seen)
    return min(range(count), key=lambda place: (seen[place].requests, (place - asked.number) % count))


def least_wait(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """The one with the shortest predicted wait; fewer requests decide a tie."""
    seen = list(seen)
    count = len(seen)
    return min(
        range(count), key=lambda place: (seen[place].wait_s, seen[place].requests, (place - asked.number) % count)
    )


def prefix(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """The one that has most of the prompt, unless it is much busier than the emptiest; then two at random."""
    seen = list(seen)
    best = max(range(len(seen)), key=lambda place: (seen[place].cached_tokens, -seen[place].requests, -place))
    fewest = min([one.requests for one in seen])
    if seen[best].cached_tokens and seen[best].requests <= IMBALANCE * fewest + SLACK_REQUESTS:
        return best
    return power_of_two(seen, asked, source)


def at_random(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """Any."""
    return int(source.random() * len(seen))


def round_robin(seen: Sequence[Seen], asked: Asked, source: random.Random) -> int:
    """One after the other."""
    return asked.number % len(seen)


_ROUTERS: Final[dict[RouterName, Router]] = {
    "gateway": gateway,
    "power-of-two": power_of_two,
    "least-requests": least_requests,
    "least-wait": least_wait,
    "prefix": prefix,
    "random": at_random,
    "round-robin": round_robin,
}
