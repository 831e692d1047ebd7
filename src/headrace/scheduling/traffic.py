"""What recent requests were like, so that ``auto`` can choose a strategy."""

from __future__ import annotations

from msgspec import Struct


class Traffic(Struct, frozen=True):
    """The latest requests. ``requests`` counts them; ``with_targets`` is the share that have an SLO target,
    ``streaming`` the share whose client reads tokens as they come, ``length_spread`` the standard deviation of
    prompt plus expected output tokens divided by their mean, ``lanes`` how many lanes they came in."""

    requests: int = 0
    with_targets: float = 0.0
    streaming: float = 0.0
    length_spread: float = 0.0
    lanes: int = 0
