"""From what is known of a request to its lane. Pure: the same signals give the same lane.

The first rule that names a lane decides:

1. ``header``: ``x-headrace-lane``
2. ``path``: the lane's URL path prefix (the longest that matches)
3. ``tenant``: the tenant's ``default_lane``
4. ``alias``: the model name in the request is one of the lane's ``match.model_aliases``
5. ``length``: the lane with the largest ``match.prompt_tokens_over`` that the prompt exceeds
6. ``default``: the configuration's ``default_lane``

Rules 1, 2 and 4 are a client's explicit choice, 5 and 6 are not. A tenant limited to some lanes gets 403
for an explicit choice outside them; an implicit choice outside them becomes the most urgent lane that it
may use, and ``LaneDecision.rule`` says so (``length, limited`` or ``default, limited``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config.schema import Config
from headrace.errors import PermissionDenied, RequestError
from headrace.lanes.lane import Lane

_SHOWN_NAME_CHARS = 64
"""How much of a client's text an error message repeats."""


@dataclass(frozen=True)
class RequestSignals:
    """What classification looks at. ``tenant`` is the authenticated name, ``path`` the URL path as sent."""

    header_lane: str | None
    path: str
    tenant: str | None
    model: str
    prompt_tokens: int


@dataclass(frozen=True)
class LaneDecision:
    """The lane chosen and the rule that chose it (one of a small fixed set: fit for a log or a label)."""

    name: str
    lane: Lane
    rule: str


@dataclass(frozen=True)
class PathMatch:
    """A path that begins with a lane's prefix: the lane, the prefix, and the API path that remains."""

    lane: str
    prefix: str
    rest: str


def match_path(lanes: Mapping[str, Lane], path: str) -> PathMatch | None:
    """The lane whose prefix ``path`` begins with, whole segments only; the longest prefix wins.

    ``/realtime/v1/models`` matches ``/realtime`` and leaves ``/v1/models``; ``/realtimes`` does not match.
    """
    best: PathMatch | None = None
    for name, lane in lanes.items():
        for prefix in lane.match.path_prefixes:
            if path != prefix and not path.startswith(prefix + "/"):
                continue
            if best is None or len(prefix) > len(best.prefix):
                best = PathMatch(lane=name, prefix=prefix, rest=path[len(prefix) :])
    return best


def allowed_lanes(config: Config, tenant: str | None) -> tuple[str, ...]:
    """Names of the lanes that a tenant may use, most urgent first (ties by name)."""
    limit = config.tenants[tenant].lanes if tenant in config.tenants else ()
    names = [name for name in config.lanes if not limit or name in limit]
    return tuple(sorted(names, key=lambda name: (config.lanes[name].priority, name)))


def classify(config: Config, signals: RequestSignals) -> LaneDecision:
    """The lane of a request, by the order in this module's docstring.

    ``config`` is a checked one (``config.validate``): its default lane and its tenants' lanes exist.

    Raises RequestError (400) for an unknown lane in the header and for a prompt longer than the lane takes,
    PermissionDenied (403) for an explicit choice of a lane that the tenant may not use.
    """
    allowed = allowed_lanes(config, signals.tenant)
    explicit = _header_choice(config, signals, allowed) or _path_choice(config, signals)
    if explicit is None:
        chosen = _tenant_choice(config, signals, allowed) or _alias_choice(config, signals)
        name, rule = chosen or _implicit_choice(config, signals, allowed)
    else:
        name, rule = explicit
    if name not in allowed:
        raise PermissionDenied(
            f"tenant {signals.tenant!r} may not use lane {name!r}; it may use {', '.join(allowed)}",
            code="lane_not_allowed",
        )
    lane = config.lanes[name]
    if lane.max_prompt_tokens is not None and signals.prompt_tokens > lane.max_prompt_tokens:
        raise RequestError(
            f"the prompt has {signals.prompt_tokens} tokens; lane {name!r} takes at most {lane.max_prompt_tokens}",
            code="lane_prompt_limit_exceeded",
        )
    return LaneDecision(name=name, lane=lane, rule=rule)


_Choice = tuple[str, str]
"""A lane's name and the rule that named it."""


def _header_choice(config: Config, signals: RequestSignals, allowed: tuple[str, ...]) -> _Choice | None:
    asked = (signals.header_lane or "").strip()
    if not asked:
        return None
    if asked in config.lanes:
        return asked, "header"
    near = difflib.get_close_matches(asked.lower()[:_SHOWN_NAME_CHARS], allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise RequestError(
        f"x-headrace-lane: unknown lane {asked[:_SHOWN_NAME_CHARS]!r}{hint} (lanes: {', '.join(allowed)})",
        param="x-headrace-lane",
        code="unknown_lane",
    )


def _path_choice(config: Config, signals: RequestSignals) -> _Choice | None:
    found = match_path(config.lanes, signals.path)
    return None if found is None else (found.lane, "path")


def _tenant_choice(config: Config, signals: RequestSignals, allowed: tuple[str, ...]) -> _Choice | None:
    if signals.tenant not in config.tenants:
        return None
    name = config.tenants[signals.tenant].default_lane
    return None if name is None or name not in allowed else (name, "tenant")


def _alias_choice(config: Config, signals: RequestSignals) -> _Choice | None:
    for name, lane in config.lanes.items():
        if signals.model in lane.match.model_aliases:
            return name, "alias"
    return None


def _implicit_choice(config: Config, signals: RequestSignals, allowed: tuple[str, ...]) -> _Choice:
    name, rule = config.default_lane, "default"
    best = -1
    for candidate, lane in config.lanes.items():
        threshold = lane.match.prompt_tokens_over
        if threshold is not None and best < threshold < signals.prompt_tokens:
            best, name, rule = threshold, candidate, "length"
    if name in allowed:
        return name, rule
    # A tenant that has a default lane never comes here: rule 3 took it.
    return allowed[0], f"{rule}, limited"
