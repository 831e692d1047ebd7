"""Step times that were measured on a running engine: the file that ``headrace calibrate`` writes, and what reads it.

    t = rows(n) + context_s * context tokens read by decodes + pair_s * token pairs attended to by prompts

as in ``scheduling.cost``, with one curve for decodes (a token is sampled for every row) and one for prompts.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError
from headrace.simulate.hardware.interpolate import Curve
from headrace.simulate.hardware.work import Work

_TABLE_ROWS: Final = 2048
_MS = 1e-3


class Calibration(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file. ``decode_ms`` and ``prompt_ms``: (rows, milliseconds) of a pass without its attention.

    ``overhead_s`` passes with every step beside its passes, ``edge_s`` with every request between its client and its
    first step and back. ``noise`` is the standard deviation of the logarithm of a pass's time over what the curves
    say. ``layout`` is how the engine divides a step into passes (``simulate.passes``): prompts and decodes together
    (``fused``) or apart. ``error_median`` and ``error_p90`` are of the curves against the ``passes`` measured.
    ``bands`` are those of the engine, (context tokens, sequences), where it told them.
    """

    format: Literal["headrace-step-times-1"]
    source: str
    date: str
    model: str
    machine: str
    decode_ms: list[tuple[int, float]]
    prompt_ms: list[tuple[int, float]]
    context_s: float
    pair_s: float
    layout: Literal["fused", "apart", "libllama"] = "libllama"
    copy_s_per_token: float = 0.0
    overhead_s: float = 0.0
    edge_s: float = 0.0
    noise: float = 0.0
    passes: int = 0
    error_median: float = 0.0
    error_p90: float = 0.0
    bands: list[tuple[int, int]] = []

    def problem(self) -> str | None:
        """What no measurement gives; None when there is nothing of the kind."""
        for name in ("decode_ms", "prompt_ms"):
            points = getattr(self, name)
            if not points:
                return f"{name} has no points"
            if any(rows < 1 or not 0 <= taken < 1e9 for rows, taken in points):
                return f"{name} needs rows of 1 and more, and times of 0 and more"
            if any(high[0] <= low[0] for low, high in pairwise(points)):
                return f"the rows of {name} do not rise"
        for name in ("context_s", "pair_s", "copy_s_per_token", "overhead_s", "edge_s", "noise"):
            if not 0 <= getattr(self, name) < 1e6:
                return f"{name} is {getattr(self, name)}, and must be 0 or more"
        return None


class CalibratedTimes:
    """``scheduling.step.StepTimes`` of a calibration. ``call_s`` takes a call with pairs as a prompt's, or, with
    decodes beside it (``fused``), as the prompt's rows and what the decodes' rows add to them."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.source = calibration.source
        self._decode = Curve([(0, 0.0), *calibration.decode_ms])
        self._prompt = Curve([(0, 0.0), *calibration.prompt_ms])
        self._decode_s = [self._decode(rows) * _MS for rows in range(_TABLE_ROWS + 1)]
        self._prompt_s = [self._prompt(rows) * _MS for rows in range(_TABLE_ROWS + 1)]
        self._context_s = calibration.context_s
        self._pair_s = calibration.pair_s
        self._copy_s_per_token = calibration.copy_s_per_token

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass (see ``scheduling.cost.Call``)."""
        if pairs:
            rows_s = self._prompt_s[rows] if rows <= _TABLE_ROWS else self._prompt(rows) * _MS
        else:
            rows_s = self._decode_s[rows] if rows <= _TABLE_ROWS else self._decode(rows) * _MS
        return rows_s + self._context_s * context_tokens + self._pair_s * pairs

    def pass_s(self, work: Work) -> float:
        """One forward pass."""
        return self.call_s(work.rows, work.context_tokens, sum([chunk.pairs for chunk in work.chunks]))

    def move_s(self, tokens: int, band: int) -> float:
        """Copying the KV of a sequence."""
        return self._copy_s_per_token * tokens


def at_pace(calibration: Calibration, pace: float, edge_s: float) -> Calibration:
    """The same engine with steps ``pace`` times as long, and ``edge_s`` beside each request: as it is in service."""
    return msgspec.structs.replace(
        calibration,
        source=f"{calibration.source}; in service {pace:.3f} times as long",
        decode_ms=[(rows, taken * pace) for rows, taken in calibration.decode_ms],
        prompt_ms=[(rows, taken * pace) for rows, taken in calibration.prompt_ms],
        context_s=calibration.context_s * pace,
        pair_s=calibration.pair_s * pace,
        overhead_s=calibration.overhead_s * pace,
        edge_s=edge_s,
    )


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError for a file that is none, or holds what cannot be."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"the calibration {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"{path} is no file of headrace calibrate: {error}") from error
    problem = found.problem()
    if problem is not None:
        raise ConfigError(f"{path}: {problem}")
    return found


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Raises ConfigError when it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"the calibration {path} cannot be written: {error.strerror}") from error
