"""A request's lane on its way into vLLM: flat ``vllm_xargs`` of the request's body.

Times are seconds from when the sender sent the request, since clocks of two machines do not agree. A value that does
not make sense is left out and named, and the request is served without it: vLLM has accepted it already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PREFIX: Final = "headrace_"
DEFAULT_LANE: Final = "default"
_LONGEST_NAME: Final = 256


@dataclass(frozen=True, slots=True)
class LaneFields:
    """What the gateway knows of a request and the scheduler needs.

    ``first_token_in_s`` is when the first token is due, ``finish_in_s`` the last one, ``tpot_s`` the target for the
    time per token between them; ``expected_tokens`` is the output length that its lane usually has. ``priority``:
    lower is more urgent; None leaves vLLM's own.
    """

    lane: str = DEFAULT_LANE
    tenant: str | None = None
    priority: int | None = None
    first_token_in_s: float | None = None
    finish_in_s: float | None = None
    tpot_s: float | None = None
    expected_tokens: int | None = None
    stream: bool = True


def to_xargs(fields: LaneFields) -> dict[str, str | int | float]:
    """The value of ``vllm_xargs`` in a request's body."""
    values: dict[str, str | int | float | None] = {
        "lane": fields.lane,
        "tenant": fields.tenant,
        "priority": fields.priority,
        "first_token_in_s": fields.first_token_in_s,
        "finish_in_s": fields.finish_in_s,
        "tpot_s": fields.tpot_s,
        "expected_tokens": fields.expected_tokens,
        "stream": None if fields.stream else 0,
    }
    return {PREFIX + name: value for name, value in values.items() if value is not None}


def from_xargs(extra: Mapping[str, Any] | None) -> tuple[LaneFields, tuple[str, ...]]:
    """The fields, and the names of those that made no sense or are not known."""
    if not extra:
        return LaneFields(), ()
    given = {name.removeprefix(PREFIX): value for name, value in extra.items() if name.startswith(PREFIX)}
    if not given:
        return LaneFields(), ()
    fields: dict[str, Any] = {}
    wrong: list[str] = []
    for name, value in given.items():
        read = _read(name, value)
        if read is None:
            wrong.append(PREFIX + name)
        else:
            fields[name] = read
    return LaneFields(**fields), tuple(wrong)


def _read(name: str, value: object) -> object | None:
    match name:
        case "lane" | "tenant":
            return value if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME else None
        case "priority":
            return value if isinstance(value, int) and not isinstance(value, bool) else None
        case "expected_tokens":
            return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
        case "first_token_in_s" | "finish_in_s" | "tpot_s":
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                return None
            return float(value) if value > 0 or name != "tpot_s" else None
        case "stream":
            return bool(value) if value in (0, 1) else None
        case _:
            return None
