"""Loading: layers, strictness, lane merging, secrets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config.load import LoadedConfig, build, find_config_file, load, load_with_origins
from headrace.config.problems import ConfigProblems
from headrace.config.schema import Config
from headrace.config.template import example_tenant, template
from headrace.errors import ConfigError
from headrace.lanes.defaults import default_lanes
from headrace.lanes.lane import SLO, Lane


def read(
    text: str | bytes, env: Mapping[str, str] | None = None, overrides: Mapping[str, object] | None = None
) -> Config:
    return build(text, name="headrace.yaml", env=env or {}, overrides=overrides or {})[0]


def complaints(
    text: str | bytes, env: Mapping[str, str] | None = None, overrides: Mapping[str, object] | None = None
) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        read(text, env, overrides)
    return str(caught.value).split("\n")


@pytest.mark.parametrize("text", ["", "# only a comment", "server:\nlanes:\ntenants:\nengine: {}\n"])
def test_nothing_given_is_the_defaults(text: str) -> None:
    assert read(text) == Config()


def test_flags_win_over_environment_over_file_over_defaults() -> None:
    text = "server: {port: 1001, max_queue: 11, host: file}\n"
    env = {"HEADRACE_SERVER_PORT": "1002", "HEADRACE_SERVER_MAX_QUEUE": "12"}
    server = read(text, env, {"server.port": 1003, "server.host": None}).server
    assert (server.port, server.max_queue, server.host) == (1003, 12, "file")
    assert server.drain_timeout_s == 30.0


def test_a_lane_in_the_file_changes_only_the_keys_it_names() -> None:
    lanes = read("lanes: {interactive: {slo: {p99_e2e_s: 3}}}").lanes
    default = default_lanes()
    slo = SLO(p99_ttft_s=0.1, p99_e2e_s=3.0)
    assert lanes == {**default, "interactive": msgspec.structs.replace(default["interactive"], slo=slo)}


def test_null_takes_a_target_away_and_a_lane() -> None:
    lanes = read("lanes: {interactive: {slo: {p99_ttft_s: null}}, captions: null}").lanes
    assert lanes["interactive"].slo == SLO(p99_e2e_s=0.5)
    assert list(lanes) == ["realtime", "interactive", "retrieval", "long", "batch"]


def test_removing_a_lane_that_is_not_there_changes_nothing() -> None:
    assert read("lanes: {nothing: null}") == Config()


def test_a_new_lane_starts_from_a_plain_one() -> None:
    assert read("lanes: {support: {priority: 5}}").lanes["support"] == Lane(priority=5)


def test_a_list_replaces_the_list_below_it() -> None:
    lanes = read("lanes: {long: {match: {path_prefixes: [/documents]}}}").lanes
    assert lanes["long"].match.path_prefixes == ("/documents",)
    assert lanes["long"].match.prompt_tokens_over == 8192


def test_anchors_spare_repetition() -> None:
    lanes = read("lanes:\n  a: &a {priority: 3, slo: {p99_e2e_s: 1}}\n  b: {<<: *a, priority: 4}\n").lanes
    assert lanes["b"] == msgspec.structs.replace(lanes["a"], priority=4)


@pytest.mark.parametrize("size", ["2GiB", "2 GiB", '"2147483648B"', "2147483648"])
def test_memory_is_given_in_bytes_or_with_a_unit(size: str) -> None:
    assert read(f"engine: {{memory_budget_bytes: {size}}}").engine.memory_budget_bytes == 2 * 1024**3


def test_a_whole_number_is_good_for_seconds() -> None:
    assert read("server: {drain_timeout_s: 5}").server.drain_timeout_s == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lanes:\n  realtime:\n    slo:\n      p99_ttf_s: 1\n",
            "headrace.yaml:4: lanes.realtime.slo.p99_ttf_s: unknown key; did you mean p99_ttft_s?",
        ),
        ("sever: {}\n", "headrace.yaml:1: sever: unknown key; did you mean server?"),
        ("zzz: 1\n", "headrace.yaml:1: zzz: unknown key (known: model, server, engine,"),
        ("server:\n  port: high\n", 'headrace.yaml:2: server.port: expected a whole number, got "high"'),
        ("server:\n  port: 80.5\n", "headrace.yaml:2: server.port: expected a whole number, got 80.5"),
        ("server:\n  port: true\n", "headrace.yaml:2: server.port: expected a whole number, got true"),
        ("server:\n  port:\n", "headrace.yaml:2: server.port: expected a whole number, got nothing"),
        ("server:\n  host: 5\n", "headrace.yaml:2: server.host: expected text (quote it), got 5"),
        ("server: [1]\n", "headrace.yaml:1: server: expected a mapping, got a list"),
        ("- 1\n", "headrace.yaml: expected a mapping, got a list"),
        ("log_level: warn\n", 'log_level: expected one of debug, error, info, warning, got "warn"; did you'),
        ("lanes: {a: 5}\n", "headrace.yaml:1: lanes.a: expected a mapping, got 5"),
        ("model:\n  aliases: one\n", 'headrace.yaml:2: model.aliases: expected a list, got "one"'),
        ("model:\n  aliases:\n    - ok\n    - 5\n", "headrace.yaml:4: model.aliases[1]: expected text"),
        ("engine:\n  bands:\n    - max_sequences: 2\n", "engine.bands[0]: max_context_tokens is missing"),
        ("engine: {memory_budget_bytes: lots}\n", "expected bytes (a whole number, or a size such as 2GiB)"),
        ("server:\n  max_queue: 0\n", "headrace.yaml:2: server.max_queue: 0 is out of range (1 to 1000000)"),
        ("server: {body_timeout_s: .nan}\n", "server.body_timeout_s: nan is out of range (above 0"),
        ("server: {body_timeout_s: .inf}\n", "server.body_timeout_s: inf is out of range (above 0"),
        ("server: {body_timeout_s: 1e999}\n", "server.body_timeout_s: inf is out of range (above 0"),
        ("server: {port: 99999999999999999999}\n", "server.port: expected a whole number, got one beyond"),
        (
            "default_lane: reatime\n",
            "headrace.yaml:1: default_lane: there is no lane 'reatime'; did you mean realtime?",
        ),
    ],
)
def test_a_mistake_is_named_with_file_line_path_and_remedy(text: str, message: str) -> None:
    (said,) = complaints(text)
    assert message in said


def test_all_mistakes_are_told_at_once() -> None:
    said = complaints(
        "server:\n  prt: 1\n  max_queue: -1\nlanes: {a: {priority: x}}\n",
        {"HEADRACE_SERVER_PORT": "many"},
        {"server.host": 5},
    )
    assert [line.split(": ")[0] for line in said] == [
        "headrace.yaml:2",
        "headrace.yaml:4",
        "HEADRACE_SERVER_PORT",
        "command line",
        "headrace.yaml:3",
    ]


def test_keys_are_kept_as_digests_only() -> None:
    text = "tenants: {acme: {api_keys: [sk-literal-key, env:ACME]}}"
    config = read(text, {"ACME": "sk-from-environment"})
    expected = [hashlib.sha256(key).hexdigest() for key in (b"sk-literal-key", b"sk-from-environment")]
    assert config.tenants["acme"].api_keys == tuple(f"sha256:{digest}" for digest in expected)


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {acme: {api_keys: sk-very-secret}}",
        "tenants: {acme: {api_keys: {sk-very: secret}}}",
        "tenants: {acme: {api_keys: ['sk-very-secret ', sk-very-secret]}}",
        "tenants: {acme: {api_keys: ['sk-very-secret', sk-very-secret]}}",
        "tenants: {acme: {api_keys: [[sk-very-secret]]}}",
        "tenants: {acme: {api_keys: [sk-very-secret]}, b: {api_keys: [sk-very-secret]}}",
        "tenants: {acme: {api_keys: ['sha256:sk-very-secret']}}",
        "server: {admin_keys: sk-very-secret}",
        "server: {admin_keys: ['sk-very-secret', 'sk-very secret']}",
        "server: {admin_keys: [{sk-very: secret}]}",
    ],
)
def test_no_complaint_repeats_a_key(text: str) -> None:
    assert "very" not in "".join(complaints(text))


def test_admin_keys_are_kept_as_digests_only_and_no_repr_shows_them() -> None:
    config = read("server: {admin_keys: [sk-literal-key]}", {})
    digest = hashlib.sha256(b"sk-literal-key").hexdigest()
    assert config.server.admin_keys == (f"sha256:{digest}",)
    assert digest not in repr(config) and "<1 hidden>" in repr(config)
    by_variable = read("", {"HEADRACE_SERVER_ADMIN_KEYS": "env:ADMIN", "ADMIN": "sk-literal-key"})
    assert by_variable.server.admin_keys == config.server.admin_keys


def test_an_admin_key_is_no_tenants_key() -> None:
    (said,) = complaints("server: {admin_keys: [sk-one]}\ntenants: {acme: {api_keys: [sk-one]}}\n")
    assert said.endswith("tenants.acme.api_keys[0]: the same key as server.admin_keys[0]")


def test_a_missing_variable_for_a_key_is_told() -> None:
    (said,) = complaints("tenants:\n  acme:\n    api_keys: [env:ACME]\n")
    assert said.startswith("headrace.yaml:3: tenants.acme.api_keys[0]: environment variable ACME is not set")


def test_the_file_is_searched_in_the_stated_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, user = tmp_path / "work", tmp_path / "user"
    work.mkdir()
    (user / "headrace").mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr("platformdirs.user_config_path", lambda name, **_: user / name)
    assert find_config_file(None, {}) is None
    (user / "headrace" / "headrace.yaml").touch()
    assert find_config_file(None, {}) == user / "headrace" / "headrace.yaml"
    (work / "headrace.yaml").touch()
    assert find_config_file(None, {}) == Path("headrace.yaml")
    assert find_config_file(None, {"HEADRACE_CONFIG": "x.yaml"}) == Path("x.yaml")
    assert find_config_file(None, {"HEADRACE_CONFIG": ""}) is None
    assert find_config_file("y.yaml", {"HEADRACE_CONFIG": "x.yaml"}) == Path("y.yaml")


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: "):
            load(path, {})


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError):
        load("/dev/zero", {})


def test_origins_say_where_each_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server:\n  port: 1\n  max_queue: 5\n  body_timeout_s: 9\n")
    loaded: LoadedConfig = load_with_origins(file, {"HEADRACE_SERVER_PORT": "2"}, {"server.max_queue": 6})
    assert loaded.file == file
    assert str(loaded.origin("server.port")) == "HEADRACE_SERVER_PORT"
    assert str(loaded.origin("server.max_queue")) == "command line"
    assert str(loaded.origin("server.body_timeout_s")) == f"{file}:4"
    assert str(loaded.origin("server.host")) == "default"


def test_without_arguments_the_process_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_CONFIG", "")
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    assert load().log_level == "debug"


def never_anything_else(text: str | bytes) -> None:
    try:
        config = read(text)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, Config)


@settings(deadline=None)
@given(st.one_of(st.text(), st.binary()))
@example(b"\xff\xfe")
@example("lanes: {? {} : 1}")
def test_any_text_is_a_configuration_or_a_config_error(text: str | bytes) -> None:
    never_anything_else(text)


_KEYS = st.sampled_from(
    ["server", "port", "lanes", "engine", "bands", "tenants", "model", "aliases", "slo", "match", "api_keys",
     "path_prefixes", "p99_ttft_s", "realtime", "default_lane", "max_sequences", "memory_budget_bytes", "x"]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(_VALUES)
def test_any_tree_is_a_configuration_or_a_config_error(tree: object) -> None:
    # JSON is YAML; Python writes NaN and Infinity, which YAML takes for texts.
    never_anything_else(msgspec.json.encode(tree))


@settings(deadline=None)
@given(st.data())
def test_a_damaged_template_is_a_configuration_or_a_config_error(data: st.DataObject) -> None:
    text = template().replace("tenants: {}", "tenants:\n  " + example_tenant().replace("\n", "\n  "))
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 40))
    never_anything_else(text[:start] + data.draw(st.text(max_size=4)) + text[start + length :])


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["server.port", "lanes.a.priority", "x", "server", ""]), _VALUES))
def test_any_overrides_are_a_configuration_or_a_config_error(overrides: dict[str, object]) -> None:
    try:
        assert isinstance(read("", overrides=overrides), Config)
    except ConfigError as error:
        assert str(error)
