"""Figures as people read them: three digits that mean something, and a unit."""

from __future__ import annotations

import math

NOTHING = "–"
"""Stands where a figure cannot be given."""


def show_seconds(seconds: float | None) -> str:
    """``1.24 s``, ``87.3 ms``, ``120 µs``."""
    if seconds is None:
        return NOTHING
    if seconds == 0:
        return "0"
    # The unit is chosen after rounding, so that 0.9999 s is 1 s and not 1,000 ms.
    size = abs(_three_digits(seconds))
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if size * factor >= 1 or unit == "µs":
            return f"{show_number(seconds * factor)} {unit}"
    raise AssertionError("the last unit takes everything")


def show_number(value: float | None) -> str:
    """Three significant digits below 1,000, whole numbers with separators above (1e15: powers)."""
    if value is None:
        return NOTHING
    rounded = _three_digits(value)
    if rounded == 0:
        return "0"
    if abs(rounded) >= 1e15:
        return f"{value:.3g}"
    if abs(rounded) >= 1000:
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_share(share: float | None) -> str:
    """``98.7 %``. Only a share of exactly 1 reads 100 %, and only one of exactly 0 reads 0 %."""
    if share is None:
        return NOTHING
    percent = share * 100
    if percent in (0.0, 100.0):
        return f"{percent:.0f} %"
    for decimals in (1, 2, 3):
        text = f"{percent:.{decimals}f}"
        if float(text) not in (0.0, 100.0):
            return f"{text} %"
    return "> 99.999 %" if percent > 50 else "< 0.001 %"


def show_percent(share: float) -> str:
    """A share that somebody chose, without digits that say nothing: ``99 %``."""
    return f"{share * 100:.6g} %"


def show_range(low: str, high: str) -> str:
    """``169 to 178 ms``: two figures that were shown, their unit once where it is the same."""
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if number and unit == high.rpartition(" ")[2] else f"{low} to {high}"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
