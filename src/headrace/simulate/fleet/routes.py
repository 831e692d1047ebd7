"""Which replica a request goes to: pure choices among what the gateway sees of replicas.

The simulator's one seam to routing: ``router`` gives the function for a name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.simulate.fleet.scenario import RouterName

IMBALANCE: Final = 1.5
"""A replica that has the prefix is passed over when it has so many times the requests of the emptiest one."""
SLACK_REQUESTS: Final = 8
"""And so many more besides."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the gateway sees of a replica: requests in it, prompt tokens of those without a first token, and the wait
    that it predicts from them, seconds. ``cached_tokens`` of the request's prompt are there already."""

    requests: int
    waiting_tokens: int
    wait_s: float
    cached_tokens: int = 0


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
    return name == "prefix"


def needs_wait(name: RouterName) -> bool:
    """Whether the choice looks at ``Seen.wait_s``."""
    return name == "least-wait"


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
    "power-of-two": power_of_two,
    "least-requests": least_requests,
    "least-wait": least_wait,
    "prefix": prefix,
    "random": at_random,
    "round-robin": round_robin,
}
