"""Checks across values, and that every number has a range."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import Struct, inspect

from headrace.config.fields import Note, notes
from headrace.config.schema import (
    BandConfig,
    Config,
    EngineConfig,
    KvMemoryConfig,
    KvTiersConfig,
    ModelConfig,
    ServerConfig,
    Tenant,
)
from headrace.config.shape import schema_type
from headrace.config.validate import RESERVED_SEGMENTS, validate
from headrace.kv.precision import KvDtype
from headrace.lanes.defaults import default_lanes
from headrace.lanes.lane import SLO, Lane, LaneMatch


def structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    """Every struct of the schema."""
    match kind:
        case inspect.StructType(fields=fields):
            yield kind
            for item in fields:
                yield from structs(item.type)
        case inspect.DictType(value_type=inner) | inspect.VarTupleType(item_type=inner):
            yield from structs(inner)


def said(config: Config) -> list[str]:
    return [str(problem) for problem in validate(config, {})]


def with_lanes(**lanes: Lane) -> Config:
    return Config(lanes={**default_lanes(), **lanes})


def test_the_defaults_are_right() -> None:
    assert said(Config()) == []


def test_every_key_of_the_schema_has_a_note_and_nothing_else_has() -> None:
    schema: dict[type[Struct], set[str]] = {
        kind.cls: {item.encode_name for item in kind.fields} for kind in structs(schema_type())
    }
    assert {cls: set(table) for cls, table in notes().items()} == schema


def test_every_number_of_the_schema_has_a_range() -> None:
    for kind in structs(schema_type()):
        for item in kind.fields:
            types = item.type.types if isinstance(item.type, inspect.UnionType) else (item.type,)
            numeric = any(isinstance(option, inspect.IntType | inspect.FloatType) for option in types)
            note = notes()[kind.cls][item.encode_name]
            assert numeric == bool(note.range_text), (kind.cls, item.encode_name)


@pytest.mark.parametrize(
    ("note", "inside", "outside"),
    [
        (Note("", 1, 5), [1, 5], [0, 6, float("nan"), float("inf")]),
        (Note("", 0, 5, above_minimum=True), [0.001, 5], [0, -1, 5.1]),
        (Note(""), [-1e300], []),
    ],
)
def test_ranges_hold_both_ends_unless_said(note: Note, inside: list[float], outside: list[float]) -> None:
    assert all(note.holds(value) for value in inside)
    assert not any(note.holds(value) for value in outside)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(server=ServerConfig(port=-1)), "server.port: -1 is out of range (0 to 65535)"),
        (Config(server=ServerConfig(body_timeout_s=0.0)), "server.body_timeout_s: 0 is out of range (above 0"),
        (Config(server=ServerConfig(host=" ")), "server.host: must not be empty"),
        (Config(model=ModelConfig(source="")), "model.source: must not be empty"),
        (Config(model=ModelConfig(aliases=("a", ""))), "model.aliases[1]: must not be empty"),
        (Config(engine=EngineConfig(bands=())), "engine.bands: at least one band is needed"),
        (
            Config(engine=EngineConfig(bands=(BandConfig(max_context_tokens=64, max_sequences=0),))),
            "engine.bands[0].max_sequences: 0 is out of range (1 to 256)",
        ),
        (
            Config(engine=EngineConfig(bands=(BandConfig(2048, 4), BandConfig(2048, 2)))),
            "engine.bands[1].max_context_tokens: bands must ascend: 2048 is not above 2048",
        ),
        (Config(lanes={}), "lanes: at least one lane is needed"),
        (Config(default_lane="chat"), "default_lane: there is no lane 'chat'"),
        (with_lanes(Big=Lane()), "lanes.Big: a lane's name is lower-case"),
        (with_lanes(a=Lane(slo=SLO(p99_e2e_s=0.0))), "lanes.a.slo.p99_e2e_s: 0 is out of range (above 0"),
        (with_lanes(a=Lane(slo=SLO(p99_tpot_s=-1.0))), "lanes.a.slo.p99_tpot_s: -1 is out of range"),
        (with_lanes(a=Lane(max_tokens=5, default_max_tokens=6)), "lanes.a.default_max_tokens: 6 is above"),
        (
            with_lanes(a=Lane(max_prompt_tokens=10, match=LaneMatch(prompt_tokens_over=10))),
            "lanes.a.max_prompt_tokens: 10 leaves nothing of the prompts over 10",
        ),
        (
            with_lanes(a=Lane(match=LaneMatch(path_prefixes=("/realtime",)))),
            "lanes.a.match.path_prefixes: path prefix /realtime is already lane realtime's",
        ),
        (
            with_lanes(a=Lane(match=LaneMatch(model_aliases=("m",))), b=Lane(match=LaneMatch(model_aliases=("m",)))),
            "lanes.b.match.model_aliases: model alias m is already lane a's",
        ),
        (
            with_lanes(a=Lane(match=LaneMatch(prompt_tokens_over=8192))),
            "lanes.a.match.prompt_tokens_over: prompt length over 8192 is already lane long's",
        ),
        (with_lanes(a=Lane(match=LaneMatch(model_aliases=("",)))), "model_aliases[0]: must not be empty"),
        (Config(tenants={"a b": Tenant()}), "tenants.a b: a tenant's name is"),
        (Config(tenants={"a": Tenant(lanes=("chat",))}), "tenants.a.lanes[0]: there is no lane 'chat'"),
        (Config(tenants={"a": Tenant(default_lane="chat")}), "tenants.a.default_lane: there is no lane 'chat'"),
        (
            Config(tenants={"a": Tenant(lanes=("batch",), default_lane="long")}),
            "tenants.a.default_lane: long is not among the tenant's lanes",
        ),
        (
            Config(tenants={"a": Tenant(api_keys=("k1", "k1"))}),
            "api_keys[1]: the same key as tenants.a.api_keys[0]",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(config: Config, message: str) -> None:
    (problem,) = said(config)
    assert message in problem


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "/",
        "realtime",
        "/a/",
        "//a",
        "/a b",
        "/a?x",
        "/../a",
        "/é",
        "/a/v1",
        *(f"/{s}" for s in RESERVED_SEGMENTS),
    ],
)
def test_a_prefix_that_cannot_be_told_from_headraces_own_paths_is_refused(prefix: str) -> None:
    (problem,) = said(with_lanes(a=Lane(match=LaneMatch(path_prefixes=(prefix,)))))
    assert problem.startswith("lanes.a.match.path_prefixes[0]: must ")


@pytest.mark.parametrize("prefix", ["/a", "/a/b", "/team-1/chat.v2", "/v1x", "/healthy"])
def test_other_prefixes_are_fine(prefix: str) -> None:
    assert said(with_lanes(a=Lane(match=LaneMatch(path_prefixes=(prefix,))))) == []


@pytest.mark.parametrize(
    ("tiers", "prefix_cache", "problem"),
    [
        (KvTiersConfig(), True, None),
        (KvTiersConfig(), False, None),
        (KvTiersConfig(ram_bytes=0), False, None),
        (KvTiersConfig(disk_path="/somewhere"), True, None),
        (KvTiersConfig(ram_bytes=0, disk_path="/somewhere"), True, "ram_bytes"),
        (KvTiersConfig(ram_bytes=1 << 30), False, "prefix_cache"),
        (KvTiersConfig(disk_path="/somewhere"), False, "prefix_cache"),
    ],
)
def test_stores_need_memory_and_who_finds_what_they_have(
    tiers: KvTiersConfig, prefix_cache: bool, problem: str | None
) -> None:
    """The default goes with everything."""
    problems = said(Config(engine=EngineConfig(kv_tiers=tiers, prefix_cache=prefix_cache)))
    assert len(problems) == (problem is not None) and (problem is None or problem in problems[0])


def _bands(*bands: tuple[int, KvDtype], lane: Lane | None = None) -> Config:
    shapes = tuple(BandConfig(max_context_tokens=tokens, max_sequences=1, kv_dtype=dtype) for tokens, dtype in bands)
    lanes = {**default_lanes(), **({} if lane is None else {"exact": lane})}
    return Config(engine=EngineConfig(bands=shapes), lanes=lanes)


def test_of_two_bands_of_one_length_the_finer_comes_second() -> None:
    """Sequences go to the first that holds them: the other way round nobody would ever need the coarser one."""
    assert said(_bands((512, "q8_0"), (512, "f16"))) == []
    (problem,) = said(_bands((512, "f16"), (512, "q8_0")))
    assert "bands[1].max_context_tokens" in problem and "the finer kv_dtype comes second" in problem
    (problem,) = said(_bands((512, "q8_0"), (512, "q8_0")))
    assert problem.endswith("512 is not above 512")


def test_a_streaming_band_needs_a_folder_for_its_files() -> None:
    """Other layouts do not."""
    bands = (
        BandConfig(max_context_tokens=512, max_sequences=1, layout="paged"),
        BandConfig(max_context_tokens=1024, max_sequences=1, layout="streaming"),
    )
    (problem,) = said(Config(engine=EngineConfig(bands=bands)))
    assert problem.startswith("engine.bands[1].layout: ") and "kv_memory.spill_dir" in problem
    with_folder = EngineConfig(bands=bands, kv_memory=KvMemoryConfig(spill_dir="/var/tmp/headrace"))
    assert said(Config(engine=with_folder)) == []


def test_a_lane_must_find_a_band_that_is_precise_enough() -> None:
    lane = Lane(min_kv_dtype="q8_0")
    assert said(_bands((512, "f16"), (1024, "q4_0"), lane=lane)) == []
    assert said(_bands((512, "q4_0"), lane=lane)) == ["lanes.exact.min_kv_dtype: no band keeps KV at q8_0 or finer"]
