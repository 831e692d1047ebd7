"""The values that a scheduler may change its mind by: one frozen set, swapped whole while running."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

_ROUNDING: Final = 1e-9

Strategy = Literal["static", "dynamic", "continuous", "hybrid", "auto"]


def marks_problem(warn: float, refuse: float, move: float, gap: float) -> str | None:
    """Why these cannot be watermarks, or None: each mark lies ``gap`` above the one before at least, else a level could
    be entered where the one below it is left."""
    if not 0 < gap < warn:
        return f"the gap {gap:g} must be above 0 and below the first mark {warn:g}"
    for lower, upper in ((warn, refuse), (refuse, move)):
        if upper - lower < gap - _ROUNDING:
            return f"watermarks must be the gap {gap:g} apart at least: {lower:g} and {upper:g} are not"
    return None


class SchedulingKnobs(Struct, frozen=True):
    """Live values of scheduling. A new set applies from the next step on; nothing running is lost by it.

    ``step_tokens`` bounds decode tokens plus prefill tokens of one step, ``max_prefill_tokens`` the prefill tokens
    in it. ``band_margin_tokens`` is the output room with which a sequence's first band is chosen.

    ``strategy`` is how batches are made (``scheduling.strategies``). ``max_num_seqs`` caps sequences in the engine
    over all bands, ``band_caps[b]`` those of band ``b``, ``lane_caps`` those of a lane (None or missing: no cap
    besides the streams). ``lane_weights`` are lanes' guaranteed shares of engine time under contention (missing: 1).

    Of ``dynamic``: requests gather for ``merge_window_s`` or until there are ``merge_max`` of them.

    Of ``hybrid``: a prefill chunk is at least ``min_prefill_tokens`` (smaller ones waste the matrix kernels) and at
    most ``max_prefill_tokens``, unless a sequence's last ones are fewer. While urgent sequences are alive, and for
    ``linger_s`` after, no step is predicted to take longer than ``urgent_step_s``; without them none longer than
    ``idle_step_s``, since the next arrival waits behind it. A waiting sequence becomes ten priority points more
    urgent every ``ageing_s``. The batch grows past the knee of step time only while doubling it would add at least
    ``knee_gain`` of throughput.

    Shares of the KV budget from which on memory is said to be scarce (``kv_warn``), new requests projected to at least
    ``kv_long_tokens`` are refused (``kv_refuse``), and cold sequences are parked (``kv_move``); each level is left
    ``kv_gap`` lower (``kv.watermarks``).

    Raises ValueError for values that no scheduler can work with.
    """

    step_tokens: int = 512
    max_prefill_tokens: int = 512
    band_margin_tokens: int = 256
    strategy: Strategy = "hybrid"
    max_num_seqs: int | None = None
    band_caps: tuple[int, ...] | None = None
    lane_caps: dict[str, int] = {}
    lane_weights: dict[str, float] = {}
    merge_window_s: float = 0.005
    merge_max: int = 16
    min_prefill_tokens: int = 64
    linger_s: float = 2.0
    urgent_step_s: float = 0.25
    idle_step_s: float = 0.4
    ageing_s: float = 10.0
    knee_gain: float = 0.15
    kv_warn: float = 0.70
    kv_refuse: float = 0.85
    kv_move: float = 0.95
    kv_gap: float = 0.05
    kv_long_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_prefill_tokens", "merge_max", "min_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if any(cap < 1 for cap in (*(self.band_caps or ()), *self.lane_caps.values())):
            raise ValueError("a cap must be at least 1: nothing could run")
        problem = marks_problem(self.kv_warn, self.kv_refuse, self.kv_move, self.kv_gap)
        if problem is not None:
            raise ValueError(problem)
        if any(not weight > 0 for weight in self.lane_weights.values()):
            raise ValueError("a lane's weight must be above 0")
        for name in ("ageing_s", "urgent_step_s", "idle_step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("merge_window_s", "linger_s", "band_margin_tokens", "knee_gain"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be below 0, not {getattr(self, name)}")
