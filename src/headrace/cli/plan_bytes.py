"""Bytes as ``headrace plan`` prints them."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def show_bytes(count: float) -> str:
    """``512 B``, ``16.67 MiB``, ``9.64 GiB``: powers of 1,024, four digits that mean something."""
    if count < 1024:
        return f"{count:,.0f} B"
    for unit in _UNITS:
        count /= 1024
        if count < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{count:,.2f} {unit}" if count < 100 else f"{count:,.1f} {unit}"


def show_exact(count: float) -> str:
    """``9,848``, ``5,511.4375``: every digit of a number of bytes per token, up to six decimals."""
    return f"{count:,.6f}".rstrip("0").rstrip(".")
