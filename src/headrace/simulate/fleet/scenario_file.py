"""Reads a scenario from YAML, strictly: every problem of the file at once, each with its line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from headrace.config.problems import ConfigProblems, Origin, Problem, dotted
from headrace.config.problems import Path as Place
from headrace.config.shape import INVALID, nearest, shape
from headrace.config.yaml_tree import MAX_TEXT_BYTES, YamlTree, parse_yaml
from headrace.errors import ConfigError, ModelError
from headrace.simulate.fleet.engine_times import times_named
from headrace.simulate.fleet.scenario import EngineSpec, Fault, Group, Scaling, Scenario

SHIPPED_FOLDER: Final = Path(__file__).parent.parent / "scenarios"
MOST_REPLICAS: Final = 4096
_LONGEST_S: Final = 366 * 86_400.0
_MOST_TOKENS: Final = 2**40

_Wrong = Iterator[tuple[Place, str]]


@dataclass(frozen=True)
class LoadedScenario:
    """A scenario, its name for people, and the folder that file names in it are relative to."""

    scenario: Scenario
    name: str
    folder: Path


def shipped_scenarios() -> dict[str, Path]:
    """The scenarios that come with headrace: name -> file."""
    return {file.stem: file for file in sorted(SHIPPED_FOLDER.glob("*.yaml"))}


def shipped_scenario(name: str) -> Path:
    """The file of a scenario that comes with headrace. Raises ConfigError, with the nearest name, for another."""
    shipped = shipped_scenarios()
    if name not in shipped:
        raise ConfigError(
            f"none of the name {name!r} comes with headrace{nearest(name, shipped)} (there: {', '.join(shipped)})"
        )
    return shipped[name]


def load_scenario(source: str) -> LoadedScenario:
    """The scenario of a shipped name or a path. Raises ConfigError (ConfigProblems for what the file holds)."""
    shipped = shipped_scenarios()
    path = shipped.get(source, Path(source))
    if not path.is_file():
        known = ", ".join(shipped)
        raise ConfigError(f"no scenario file {source!r}, and none of that name comes with headrace (there: {known})")
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from error
    return LoadedScenario(parse_scenario(data, name=str(path)), path.stem, path.parent)


def parse_scenario(data: bytes | str, *, name: str) -> Scenario:
    """The scenario of a file's content. Raises ConfigProblems."""
    tree = parse_yaml(data, name)
    problems: list[Problem] = []

    def report(place: Place, message: str) -> None:
        problems.append(Problem(dotted(place), message, _origin(tree, name, place)))

    values = shape({} if tree.value is None else tree.value, inspect.type_info(Scenario), (), report)
    if values is INVALID or problems:
        raise ConfigProblems(problems)
    try:
        scenario = msgspec.convert(values, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigProblems([Problem("", str(error), Origin(name))]) from error
    for place, message in wrong_in(scenario):
        report(place, message)
    if problems:
        raise ConfigProblems(problems)
    return scenario


def check_scenario(scenario: Scenario) -> None:
    """Raises ConfigProblems for what is wrong with a scenario of the right shape."""
    problems = [Problem(dotted(place), message) for place, message in wrong_in(scenario)]
    if problems:
        raise ConfigProblems(problems)


def wrong_in(scenario: Scenario) -> _Wrong:
    """What is out of range or does not fit together, each with its place."""
    if not scenario.groups:
        yield ("groups",), "there must be at least one group of replicas"
    for name, group in scenario.groups.items():
        yield from _group(("groups", name), group)
    roles = {group.role for group in scenario.groups.values()}
    if ("prefill" in roles) != ("decode" in roles):
        yield ("groups",), "prefill and decode replicas need each other: one of the two roles is missing"
    elif roles == {"both", "prefill", "decode"}:
        yield ("groups",), "replicas are either for whole requests or split into prefill and decode, not both"
    gateway = scenario.gateway
    for key in ("metrics_interval_s", "network_s"):
        yield from _within(("gateway", key), getattr(gateway, key), 0, 3600)
    yield from _within(("gateway", "retries"), gateway.retries, 0, 100)
    yield from _above(("link", "gb_per_s"), scenario.link.gb_per_s, 1e6)
    yield from _within(("link", "latency_s"), scenario.link.latency_s, 0, 3600)
    known = {name: set(replica_names(name, group)) for name, group in scenario.groups.items()}
    names = set().union(*known.values()) if known else set()
    for number, fault in enumerate(scenario.faults):
        yield from _fault(("faults", number), fault, names)


def replica_names(name: str, group: Group) -> list[str]:
    """``main/0``, ``main/1``: all replicas that a group can have."""
    most = group.replicas if group.scaling is None else max(group.replicas, group.scaling.most)
    return [f"{name}/{number}" for number in range(max(0, min(most, MOST_REPLICAS)))]


def _group(place: Place, group: Group) -> _Wrong:
    yield from _within((*place, "replicas"), group.replicas, 1, MOST_REPLICAS)
    if group.price_per_hour is not None:
        yield from _within((*place, "price_per_hour"), group.price_per_hour, 0, 1e6)
    yield from _engine((*place, "engine"), group.engine)
    if group.scaling is not None:
        yield from _scaling((*place, "scaling"), group.scaling, group.replicas)


def _engine(place: Place, engine: EngineSpec) -> _Wrong:
    if engine.stated is None:
        try:
            times_named(engine.times)
        except (ConfigError, ModelError) as error:
            yield (*place, "times"), str(error)
    else:
        for key in ("weights_s", "row_s"):
            yield from _above((*place, "stated", key), getattr(engine.stated, key), 1e4)
        for key in ("context_s", "pair_s", "overhead_s"):
            yield from _within((*place, "stated", key), getattr(engine.stated, key), 0, 1e4)
    yield from _within((*place, "max_sequences"), engine.max_sequences, 1, 65536)
    yield from _within((*place, "max_context_tokens"), engine.max_context_tokens, 16, 2**24)
    for number, band in enumerate(engine.bands):
        yield from _within((*place, "bands", number, "max_context_tokens"), band.max_context_tokens, 16, 2**24)
        yield from _within((*place, "bands", number, "max_sequences"), band.max_sequences, 1, 65536)
    contexts = [band.max_context_tokens for band in engine.bands]
    if contexts != sorted(set(contexts)):
        yield (*place, "bands"), "bands must have rising context lengths"
    if engine.kv_tokens is not None:
        yield from _within((*place, "kv_tokens"), engine.kv_tokens, 128, _MOST_TOKENS)
    yield from _within((*place, "kv_bytes_per_token"), engine.kv_bytes_per_token, 1, 2**30)
    yield from _within((*place, "noise"), engine.noise, 0, 2)
    for number, tier in enumerate(engine.tiers):
        yield from _within((*place, "tiers", number, "tokens"), tier.tokens, 128, _MOST_TOKENS)
        yield from _above((*place, "tiers", number, "gb_per_s"), tier.gb_per_s, 1e6)


def _scaling(place: Place, scaling: Scaling, replicas: int) -> _Wrong:
    yield from _within((*place, "least"), scaling.least, 1, MOST_REPLICAS)
    yield from _within((*place, "most"), scaling.most, scaling.least, MOST_REPLICAS)
    if not scaling.least <= replicas <= scaling.most:
        yield place, f"the group begins with {replicas} replicas, not between least and most"
    yield from _above((*place, "target_busy"), scaling.target_busy, 1)
    yield from _above((*place, "interval_s"), scaling.interval_s, _LONGEST_S)
    for key in ("warmup_s", "calm_s"):
        yield from _within((*place, key), getattr(scaling, key), 0, _LONGEST_S)


def _fault(place: Place, fault: Fault, names: set[str]) -> _Wrong:
    if fault.replica not in names:
        yield (*place, "replica"), f"there is no replica {fault.replica!r}{nearest(fault.replica, sorted(names))}"
    yield from _within((*place, "at_s"), fault.at_s, 0, _LONGEST_S)
    yield from _above((*place, "for_s"), fault.for_s, _LONGEST_S)
    yield from _within((*place, "noticed_s"), fault.noticed_s, 0, fault.for_s if math.isfinite(fault.for_s) else 0)
    yield from _above((*place, "factor"), fault.factor, 1e4)


def _within(place: Place, value: float, least: float, most: float) -> _Wrong:
    if not least <= value <= most:
        yield place, f"{value:g} is out of range ({least:g} to {most:g})"


def _above(place: Place, value: float, most: float) -> _Wrong:
    if not 0 < value <= most:
        yield place, f"{value:g} is out of range (above 0, at most {most:g})"


def _origin(tree: YamlTree, name: str, place: Place) -> Origin:
    while place and place not in tree.lines:
        place = place[:-1]
    return Origin(name, tree.lines.get(place))


def with_knob(scenario: Scenario, key: str, value: Any) -> Scenario:
    """The scenario with one value replaced: ``gateway.routing``, ``groups.main.replicas``,
    ``groups.main.engine.scheduling.urgent_step_s``; ``groups.*`` means every group.

    Raises ConfigError for a key that there is not, with the nearest right name, and for a value of the wrong kind.
    """
    tree = msgspec.to_builtins(scenario)
    parts = key.split(".")
    targets: list[dict[str, Any]] = [tree]
    for depth, part in enumerate(parts[:-1]):
        below: list[Any] = []
        for target in targets:
            found = list(target.values()) if part == "*" else [_child(target, part, parts[: depth + 1])]
            below += found
        if not all(isinstance(one, dict) for one in below):
            raise ConfigError(f"{'.'.join(parts[: depth + 1])} holds no further keys", where=key)
        targets = below
    for target in targets:
        _child(target, parts[-1], parts)
        target[parts[-1]] = value
    problems: list[Problem] = []
    shaped = shape(
        tree,
        inspect.type_info(Scenario),
        (),
        lambda place, message: problems.append(Problem(dotted(place), message)),
    )
    if problems:
        raise ConfigProblems(problems)
    try:
        changed = msgspec.convert(shaped, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=key) from error
    check_scenario(changed)
    return changed


def _child(tree: dict[str, Any], key: str, path: list[str]) -> Any:
    if key not in tree:
        raise ConfigError(f"there is no {'.'.join(path)}{nearest(key, sorted(tree))}", where="knob")
    return tree[key]
