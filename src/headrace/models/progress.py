"""How a pull tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

Stage = Literal["waiting", "downloading", "unpacking", "converting"]


class PullProgress(Struct, frozen=True):
    """``done`` of ``total`` bytes of a stage; ``total`` is 0 while it is unknown (waiting, converting)."""

    model: str
    stage: Stage
    done: int = 0
    total: int = 0


OnProgress = Callable[[PullProgress], None]


def ignore_progress(progress: PullProgress) -> None:
    """For callers that show nothing."""
