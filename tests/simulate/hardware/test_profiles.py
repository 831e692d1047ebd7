"""Hardware profiles: what ships, and what is refused."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import msgspec
import pytest

from headrace.errors import ConfigError
from headrace.simulate.hardware.profiles import hardware, hardware_named


def test_every_profile_says_where_its_figures_are_from() -> None:
    """A source and a date that is one, and rates that rise as precision falls."""
    found = hardware()
    assert {"t4", "a10g", "l4", "l40s", "a100-40", "a100-80", "h100", "h200", "b200", "mi300x", "rtx-4090"} <= set(
        found
    )
    for item in found.values():
        assert item.source
        assert date(2018, 1, 1) < date.fromisoformat(item.date)
        rates = [item.flops_per_s[kind] for kind in ("f16", "fp8", "fp4") if kind in item.flops_per_s]
        assert rates == sorted(rates) and rates[0] > 1e13
        assert item.memory_bytes > 10**10 and item.memory_bytes_per_s > 1e11


def test_known_figures() -> None:
    """An A100 moves 2,039 GB/s, a B200 has FP4 arithmetic and an H100 none."""
    assert hardware_named("a100").memory_bytes_per_s == 2039e9
    assert hardware_named("B200").flops_per_s["fp4"] == 9e15
    assert "fp4" not in hardware_named("h100").flops_per_s


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100"):
        hardware_named("h1000")
    with pytest.raises(ConfigError, match="known: a100-40"):
        hardware_named("abacus")


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    """A file of the same form is read; one that is not is refused with what is wrong."""
    document = msgspec.to_builtins(hardware_named("l4"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**document, "name": "mine"}))
    assert hardware_named(str(path)).name == "mine"
    path.write_text(json.dumps({**document, "memory_bytes_per_s": 0}))
    with pytest.raises(ConfigError, match="above 0"):
        hardware_named(str(path))
    path.write_text(json.dumps({**document, "colour": "green"}))
    with pytest.raises(ConfigError, match="colour"):
        hardware_named(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        hardware_named(str(tmp_path / "none.json"))
