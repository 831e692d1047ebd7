"""The step times of a scenario's engine: of a known name, of hardware, calibrated, or stated in it."""

from __future__ import annotations

from typing import Final

from headrace.config.shape import nearest
from headrace.errors import ConfigError
from headrace.scheduling.step import StepTimes
from headrace.simulate.fleet.scenario import EngineSpec, StatedTimes
from headrace.simulate.hardware.open_times import open_times
from headrace.simulate.step_times import SMOLLM2_2_THREADS

_KNOWN: Final[dict[str, StepTimes]] = {"smollm2-2-threads": SMOLLM2_2_THREADS}


def times_named(name: str) -> StepTimes:
    """The step times of that name, or those that it describes: ``roofline(h100, llama-3.1-8b)`` and the like, or the
    path of a file of ``headrace calibrate``. Raises ConfigError, with the nearest name, for another."""
    if name in _KNOWN:
        return _KNOWN[name]
    if "(" in name or name.endswith(".json"):
        return open_times(name, where="times")
    raise ConfigError(
        f"no step times {name!r}{nearest(name, sorted(_KNOWN))} (there: {', '.join(sorted(_KNOWN))}; also the"
        " .json of `headrace calibrate`, or hardware with a model: roofline(h100, llama-3.1-8b))"
    )


def times_of(engine: EngineSpec) -> StepTimes:
    """What a scenario's engine takes for its forward passes. Raises ConfigError for an unknown name."""
    return times_named(engine.times) if engine.stated is None else Stated(engine.stated)


class Stated:
    """``StepTimes`` by the formula of ``StatedTimes``. Sequences keep their place: moving one costs nothing."""

    __slots__ = ("_context_s", "_overhead_s", "_pair_s", "_row_s", "_weights_s")

    def __init__(self, stated: StatedTimes) -> None:
        self._overhead_s = stated.overhead_s
        self._weights_s = stated.weights_s
        self._row_s = stated.row_s
        self._context_s = stated.context_s
        self._pair_s = stated.pair_s

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        read_s = self._weights_s + self._context_s * context_tokens
        compute_s = self._row_s * rows
        return self._overhead_s + (read_s if read_s > compute_s else compute_s) + self._pair_s * pairs

    def move_s(self, tokens: int, band: int) -> float:
        return 0.0


class Paced:
    """What an engine believes of its step times: those of its kind of machine, times a pace that follows what its
    steps really took (as ``scheduling.cost.CostModel`` has one), so that it notices that it became slow."""

    STEP: Final = 0.15

    __slots__ = ("_times", "pace")

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.pace = 1.0

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return self.pace * self._times.call_s(rows, context_tokens, pairs)

    def move_s(self, tokens: int, band: int) -> float:
        return self._times.move_s(tokens, band)

    def learn(self, expected_s: float, took_s: float) -> None:
        """A step's passes, expected to take ``expected_s`` by these times, took ``took_s``."""
        if expected_s > 0:
            surprise = min(max(took_s / expected_s - 1, -0.5), 1.0)
            if abs(surprise) > 1e-12:
                self.pace *= 1 + self.STEP * surprise
