"""Reads a workload from YAML, strictly: every problem of the file at once, each with its line.

Unknown keys are refused with the nearest right name. A workload made from command-line arguments goes through the
same checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import inspect

from headrace.bench.load.arrivals import TraceReplay, parse_arrivals
from headrace.bench.load.lengths import parse_lengths
from headrace.bench.load.request_fields import class_body_problem, header_problem, header_text_problem
from headrace.bench.load.workload import Session, TrafficClass, Workload
from headrace.bench.requests.malformed import MALFORMED_KINDS
from headrace.config.problems import ConfigProblems, Origin, Problem, dotted
from headrace.config.problems import Path as Place
from headrace.config.shape import INVALID, nearest, shape
from headrace.config.yaml_tree import MAX_TEXT_BYTES, Value, YamlTree, parse_yaml
from headrace.errors import ConfigError

MALFORMED_CLASS: Final = "malformed"
"""The class name of illegal requests; no class of a workload may have it."""

SHIPPED_FOLDER: Final = Path(__file__).with_name("workloads")

_LONGEST_S: Final = 30 * 24 * 3600.0
_MOST_TOKENS: Final = 2**24
_DISTRIBUTIONS: Final = frozenset({"arrivals", "input_length", "output_length", "turns", "think_ms"})


@dataclass(frozen=True)
class LoadedWorkload:
    """A workload, its name for people, and the folder that file names in it are relative to."""

    workload: Workload
    name: str
    folder: Path


def shipped_workloads() -> dict[str, Path]:
    """The workloads that come with headrace: name -> file."""
    return {file.stem: file for file in sorted(SHIPPED_FOLDER.glob("*.yaml"))}


def find_workload(source: str) -> Path:
    """The file of a shipped workload's name, or of a path.

    Raises ConfigError when there is neither, with the nearest shipped name.
    """
    shipped = shipped_workloads()
    if source in shipped:
        return shipped[source]
    path = Path(source)
    if path.is_dir():
        raise ConfigError(f"{source!r} is a folder; name a workload file in it")
    if path.exists():
        return path
    raise ConfigError(f"no workload file {source!r}, and {_not_shipped(source)}")


def shipped_workload(name: str) -> Path:
    """The file of a workload that comes with headrace. Raises ConfigError, with the nearest name, for another."""
    shipped = shipped_workloads()
    if name not in shipped:
        raise ConfigError(_not_shipped(name))
    return shipped[name]


def _not_shipped(name: str) -> str:
    shipped = shipped_workloads()
    return f"none of the name {name!r} comes with headrace{nearest(name, shipped)} (there: {', '.join(shipped)})"


def load_workload(source: str) -> LoadedWorkload:
    """The workload of a shipped name or a path. Raises ConfigError (ConfigProblems for what the file holds)."""
    path = find_workload(source)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from error
    workload = parse_workload(data, name=str(path), folder=path.parent)
    return LoadedWorkload(workload, name=path.stem, folder=path.parent)


def parse_workload(data: bytes | str, *, name: str, folder: Path) -> Workload:
    """The workload of a file's content. Raises ConfigProblems; reads only the files of lengths that it names."""
    tree = parse_yaml(data, name)
    problems: list[Problem] = []

    def report(place: Place, message: str) -> None:
        problems.append(Problem(dotted(place), message, _origin(tree, name, place)))

    value, bodies = _without_bodies({} if tree.value is None else tree.value, report)
    values = shape(_with_texts(value), inspect.type_info(Workload), (), report)
    if values is INVALID or problems:
        raise ConfigProblems(problems)
    for class_name, body in bodies.items():
        values["classes"][class_name]["body"] = body
    workload = msgspec.convert(values, Workload)
    for place, message in _wrong(workload, folder):
        report(place, message)
    if problems:
        raise ConfigProblems(problems)
    return workload


def check_workload(workload: Workload, folder: Path) -> None:
    """Raise ConfigProblems for what is wrong with a workload of the right shape."""
    problems = [Problem(dotted(place), message) for place, message in _wrong(workload, folder)]
    if problems:
        raise ConfigProblems(problems)


def with_values(
    loaded: LoadedWorkload,
    *,
    arrivals: str | None = None,
    duration_s: float | None = None,
    scale_to_context_tokens: int | None = None,
) -> LoadedWorkload:
    """The workload with what the command line says in place of the file's own values (None: not given).

    Raises ConfigProblems.
    """
    own = loaded.workload
    workload = msgspec.structs.replace(
        own,
        arrivals=own.arrivals if arrivals is None else arrivals,
        duration_s=own.duration_s if duration_s is None else duration_s,
        scale_to_context_tokens=(
            own.scale_to_context_tokens if scale_to_context_tokens is None else scale_to_context_tokens
        ),
    )
    check_workload(workload, loaded.folder)
    return LoadedWorkload(workload, loaded.name, loaded.folder)


def gives_lengths(workload: Workload) -> bool:
    """Whether the classes say how long requests are (a trace may say it instead)."""
    return any(traffic.input_length or traffic.output_length for traffic in workload.classes.values())


def _origin(tree: YamlTree, name: str, place: Place) -> Origin:
    while place and place not in tree.lines:
        place = place[:-1]
    return Origin(name, tree.lines.get(place))


def _with_texts(value: Value) -> Value:
    """The tree with plain numbers as texts where a distribution is expected: ``input_length: 512``."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(item)
        if key in _DISTRIBUTIONS and isinstance(item, int | float) and not isinstance(item, bool)
        else _with_texts(item)
        for key, item in value.items()
    }


def _without_bodies(value: Value, report: Callable[[Place, str], None]) -> tuple[Value, dict[str, Value]]:
    """The tree without the classes' ``body``, which may hold anything, and the bodies by class."""
    classes = value.get("classes") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(classes, dict):
        return value, {}
    bodies: dict[str, Value] = {}
    kept: dict[str, Value] = {}
    for name, item in classes.items():
        if isinstance(item, dict) and "body" in item:
            body = item["body"] or {}
            if isinstance(body, dict):
                bodies[name] = body
            else:
                report(("classes", name, "body"), "expected a mapping of request fields")
            item = {key: field for key, field in item.items() if key != "body"}
        kept[name] = item
    return {**value, "classes": kept}, bodies


_Wrong = Iterator[tuple[Place, str]]


def _wrong(workload: Workload, folder: Path) -> _Wrong:
    """Everything that is wrong with the values: where and what."""
    try:
        arrivals = parse_arrivals(workload.arrivals, folder=folder)
    except ConfigError as error:
        yield ("arrivals",), str(error)
        return
    replayed = isinstance(arrivals, TraceReplay)
    if workload.duration_s is not None:
        yield from _above(("duration_s",), workload.duration_s, _LONGEST_S)
    elif not replayed:
        yield (), "duration_s is missing"
    yield from _classes(workload, folder, lengths_needed=not replayed or gives_lengths(workload))
    if workload.trace_classes:
        yield from _trace_classes(workload, replayed=replayed)
    if workload.malformed is not None:
        yield from _malformed(workload.malformed.share, workload.malformed.kinds)
    if workload.scale_to_context_tokens is not None:
        yield from _within(("scale_to_context_tokens",), workload.scale_to_context_tokens, 64, _MOST_TOKENS)


def _classes(workload: Workload, folder: Path, *, lengths_needed: bool) -> _Wrong:
    if not workload.classes and lengths_needed:
        yield ("classes",), "no class: say what to send"
    for name, traffic in workload.classes.items():
        yield from _class(("classes", name), name, traffic, folder, lengths_needed=lengths_needed)
    if workload.classes and all(traffic.weight == 0 for traffic in workload.classes.values()):
        yield ("classes",), "every weight is 0"


def _trace_classes(workload: Workload, *, replayed: bool) -> _Wrong:
    if not replayed or gives_lengths(workload):
        yield ("trace_classes",), "only for a trace whose own lengths are replayed"
    for name, target in workload.trace_classes.items():
        if target not in workload.classes:
            yield ("trace_classes", name), f"no class {target}{nearest(target, workload.classes)}"


def _class(place: Place, name: str, traffic: TrafficClass, folder: Path, *, lengths_needed: bool) -> _Wrong:
    if name == MALFORMED_CLASS:
        yield place, f"{MALFORMED_CLASS} is the class of illegal requests; choose another name"
    yield from _within((*place, "weight"), traffic.weight, 0, 1e9)
    for key in ("input_length", "output_length"):
        text: str | None = getattr(traffic, key)
        if text is not None:
            yield from _lengths((*place, key), text, folder)
        elif lengths_needed:
            yield place, f"{key} is missing"
    if traffic.written_for_context_tokens is not None:
        yield from _within((*place, "written_for_context_tokens"), traffic.written_for_context_tokens, 64, _MOST_TOKENS)
    if traffic.lane is not None and (problem := header_text_problem(traffic.lane)):
        yield (*place, "lane"), problem
    for header, text in traffic.headers.items():
        if problem := header_problem(header, text):
            yield (*place, "headers"), problem
    if problem := class_body_problem(traffic.body):
        yield (*place, "body"), problem
    if traffic.shared_prefix is not None:
        yield from _within((*place, "shared_prefix", "tokens"), traffic.shared_prefix.tokens, 1, _MOST_TOKENS)
        yield from _within((*place, "shared_prefix", "count"), traffic.shared_prefix.count, 1, 1_000_000)
    if traffic.session is not None:
        if not lengths_needed:
            yield (*place, "session"), "the trace itself says which requests are turns of one conversation"
        yield from _session((*place, "session"), traffic.session, folder)
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        target: float | None = getattr(traffic.slo, key)
        if target is not None:
            yield from _above((*place, "slo", key), target, _LONGEST_S)


def _session(place: Place, session: Session, folder: Path) -> _Wrong:
    yield from _lengths((*place, "turns"), session.turns, folder)
    yield from _lengths((*place, "think_ms"), session.think_ms, folder)


def _malformed(share: float, kinds: dict[str, float]) -> _Wrong:
    yield from _within(("malformed", "share"), share, 0, 1)
    for kind, weight in kinds.items():
        if kind not in MALFORMED_KINDS:
            yield ("malformed", "kinds", kind), f"no such kind{nearest(kind, MALFORMED_KINDS)}"
        yield from _within(("malformed", "kinds", kind), weight, 0, 1e9)
    if kinds and all(weight == 0 for weight in kinds.values()):
        yield ("malformed", "kinds"), "every weight is 0"


def _lengths(place: Place, text: str, folder: Path) -> _Wrong:
    try:
        parse_lengths(text, folder=folder)
    except ConfigError as error:
        yield place, str(error)


def _within(place: Place, value: float, least: float, most: float) -> _Wrong:
    if not least <= value <= most:
        yield place, f"{value:g} is out of range ({least:g} to {most:g})"


def _above(place: Place, value: float, most: float) -> _Wrong:
    if not (math.isfinite(value) and 0 < value <= most):
        yield place, f"{value:g} is out of range (above 0, at most {most:g})"
