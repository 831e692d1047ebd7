"""Sizes in bytes as people write them: ``2GiB``, ``512 MiB``, ``1.5GB``."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]{1,3})")
_FACTORS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}


def parse_bytes(text: str) -> int | None:
    """Bytes in ``text``, or None when it is not a number followed by one of B, KB, MB, GB, TB (powers of
    1000), KiB, MiB, GiB, TiB (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    factor = _FACTORS.get(match.group(2).lower())
    return None if factor is None else round(float(match.group(1)) * factor)
