"""The commented YAML that ``headrace init`` writes: every key with its meaning, at its default.

Loading it gives exactly the defaults. Lanes show only the keys in which they differ from a plain lane; one
commented example lane and one commented example tenant show every key there is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.config.fields import Note, notes
from headrace.config.groups import DnsConfig, GroupConfig, ReplicaConfig
from headrace.config.schema import Config, Tenant
from headrace.lanes.lane import SLO, Fallback, Lane, LaneMatch

_WIDTH: Final = 100
_HEAD: Final = """\
# headrace configuration. Every key is here with its default; delete what you do not change.
# Order: command line over environment (HEADRACE_SERVER_PORT=9000) over this file over defaults.
# `headrace config check` says what is wrong with it, `headrace config show --origin` what holds and why.
"""


def template() -> str:
    """The whole file."""
    table = notes()
    config = Config()
    lines = [_HEAD]
    for name in ("model", "server", "engine", "control", "fleet"):
        section = getattr(config, name)
        lines += [*_comment(table[Config][name], ""), f"{name}:"]
        lines += [*_section(section, table, "  "), ""]
    lines += [*_comment(table[Config]["groups"], ""), "# A group with every setting:"]
    lines += [f"#   {line}" for line in example_group().splitlines()]
    lines += ["groups: {}", "", *_comment(table[Config]["default_group"], ""), "default_group: null", ""]
    lines += [*_comment(table[Config]["lanes"], ""), "lanes:"]
    lines += ["  # A lane with every setting:"]
    lines += [f"  # {line}" for line in example_lane().splitlines()]
    for name, lane in config.lanes.items():
        lines += ["", f"  {name}:", *_lane(lane, "    ")]
    lines += ["", *_comment(table[Config]["default_lane"], ""), f"default_lane: {config.default_lane}", ""]
    lines += [*_comment(table[Config]["tenants"], ""), "# A tenant with every setting:"]
    lines += [f"#   {line}" for line in example_tenant().splitlines()]
    lines += ["tenants: {}", ""]
    lines += [*_comment(table[Config]["log_level"], ""), f"log_level: {config.log_level}"]
    return "\n".join(lines) + "\n"


def example_lane() -> str:
    """A lane ``support`` with every key, as YAML to go under ``lanes:``."""
    lane = Lane(
        description="answers to customers",
        slo=SLO(p99_ttft_s=0.5, p99_tpot_s=0.05, p99_e2e_s=5.0),
        priority=15,
        match=LaneMatch(path_prefixes=("/support",), model_aliases=("support-bot",), prompt_tokens_over=32768),
        max_running=8,
        max_queue=64,
        max_prompt_tokens=65536,
        max_tokens=1024,
        default_max_tokens=256,
        typical_prompt_tokens=512,
        typical_output_tokens=128,
        overload="degrade",
        fallback=Fallback(max_tokens=64),
    )
    return "\n".join(["support:", *_section(lane, notes(), "  ")])


def example_group() -> str:
    """A group ``short`` with every key, as YAML to go under ``groups:``."""
    group = GroupConfig(
        kind="vllm",
        model="served-model",
        description="short contexts",
        replicas=(ReplicaConfig("http://10.0.0.5:8000", zone="a"), ReplicaConfig("http://10.0.1.5:8000", zone="b")),
        dns=(DnsConfig("http://short.engines.example:8000"),),
    )
    return "\n".join(["short:", *_section(group, notes(), "  ")])


def example_tenant() -> str:
    """A tenant ``acme`` with every key, as YAML to go under ``tenants:``."""
    tenant = Tenant(
        api_keys=("env:ACME_API_KEY",),
        lanes=("interactive", "batch"),
        default_lane="interactive",
        requests_per_min=600,
        tokens_per_min=400_000,
        max_concurrent=32,
    )
    return "\n".join(["acme:", *_section(tenant, notes(), "  ")])


def _section(section: Struct, table: dict[type[Struct], dict[str, Note]], indent: str) -> Iterator[str]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        yield from _comment(table[type(section)][name], indent)
        if isinstance(value, Struct):
            yield f"{indent}{name}:"
            yield from _section(value, table, indent + "  ")
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            yield f"{indent}{name}:"
            for key, note in table[type(value[0])].items():
                yield from _comment(Note(f"{key}: {note.text}", note.minimum, note.maximum), indent + "  ")
            yield from (f"{indent}  - {_inline(msgspec.to_builtins(item))}" for item in value)
        else:
            yield f"{indent}{name}: {_inline(msgspec.to_builtins(value))}"


def _lane(lane: Lane, indent: str) -> Iterator[str]:
    # Structs of a lane leave defaults out when they are encoded.
    for key, value in msgspec.to_builtins(lane).items():
        yield f"{indent}{key}: {_inline(value)}"


def _comment(note: Note, indent: str) -> Iterator[str]:
    text = f"{note.text} ({note.range_text})" if note.range_text else note.text
    line = ""
    for word in text.split():
        if line and len(indent) + len(line) + len(word) > _WIDTH:
            yield f"{indent}# {line}"
            line = ""
        line = f"{line} {word}" if line else word
    yield f"{indent}# {line}"


def _inline(value: Any) -> str:
    """A value on one line, in YAML's flow style."""
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_inline(item) for item in value) + "]"
        case str() if value.replace("-", "").replace("_", "").isalnum() and value[0].isalpha():
            return value
        case _:
            # JSON is YAML for texts, numbers, true, false and null.
            return json.dumps(value)
