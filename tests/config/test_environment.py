"""Environment variables as configuration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.environment import variables
from headrace.config.load import build
from headrace.config.problems import ConfigProblems, dotted
from headrace.config.schema import BandConfig, Config
from headrace.errors import ConfigError


def read(**env: str) -> Config:
    return build("", name="", env=env, overrides={})[0]


def complaint(**env: str) -> str:
    with pytest.raises(ConfigProblems) as caught:
        read(**env)
    return str(caught.value)


def test_the_name_is_section_and_key_in_capitals() -> None:
    names = variables()
    assert dotted(names["HEADRACE_SERVER_PORT"]) == "server.port"
    assert dotted(names["HEADRACE_ENGINE_SCHEDULING_STRATEGY"]) == "engine.scheduling.strategy"
    assert "HEADRACE_ENGINE_SCHEDULING" not in names
    assert dotted(names["HEADRACE_DEFAULT_LANE"]) == "default_lane"
    assert not any(name.startswith(("HEADRACE_LANES", "HEADRACE_TENANTS")) for name in names)


def test_values_are_read_as_the_key_needs_them() -> None:
    config = read(
        HEADRACE_MODEL_SOURCE="123",
        HEADRACE_MODEL_ALIASES="a, b",
        HEADRACE_SERVER_PORT="9000",
        HEADRACE_SERVER_DRAIN_TIMEOUT_S="5",
        HEADRACE_SERVER_ALLOW_MODEL_DELETE="true",
        HEADRACE_ENGINE_MEMORY_BUDGET_BYTES="1GiB",
        HEADRACE_ENGINE_BANDS="[{max_context_tokens: 4096, max_sequences: 4}]",
        HEADRACE_ENGINE_SCHEDULING_STRATEGY="auto",
        HEADRACE_ENGINE_SCHEDULING_MAX_NUM_SEQS="null",
        HEADRACE_ENGINE_SCHEDULING_LINGER_S="1",
        HEADRACE_LOG_LEVEL="debug",
    )
    assert config.model.source == "123"
    assert config.model.aliases == ("a", "b")
    assert config.server.port == 9000
    assert config.server.drain_timeout_s == 5.0
    assert config.server.allow_model_delete is True
    assert config.engine.memory_budget_bytes == 1024**3
    assert config.engine.bands == (BandConfig(max_context_tokens=4096, max_sequences=4),)
    scheduling = config.engine.scheduling
    assert (scheduling.strategy, scheduling.max_num_seqs, scheduling.linger_s) == ("auto", None, 1.0)
    assert config.log_level == "debug"


def test_null_is_no_value_where_that_is_possible_and_empty_is_not_set() -> None:
    assert read(HEADRACE_ENGINE_THREADS="null", HEADRACE_SERVER_PORT="").engine.threads is None
    assert "expected a whole number" in complaint(HEADRACE_SERVER_PORT="null")


def test_a_list_may_be_yaml_too() -> None:
    assert read(HEADRACE_MODEL_ALIASES="[a, 'b c']").model.aliases == ("a", "b c")


@pytest.mark.parametrize(
    "name",
    ["HEADRACE_CACHE_DIR", "HEADRACE_ADMIN_KEY", "HEADRACE_SERVICE_HOST", "HEADRACE_PORT", "OTHER", "headrace_x"],
)
def test_names_that_are_somebody_elses_are_left_alone(name: str) -> None:
    assert read(**{name: "tcp://10.0.0.1:80"}) == Config()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HEADRACE_SERVER_PROT", "did you mean HEADRACE_SERVER_PORT?"),
        ("HEADRACE_ENGINE_SCHEDULING_STRATEGIE", "did you mean HEADRACE_ENGINE_SCHEDULING_STRATEGY?"),
        ("HEADRACE_SERVR_PORT", "did you mean HEADRACE_SERVER_PORT?"),
        ("HEADRACE_MODEL", "did you mean HEADRACE_MODEL_NAME?"),
        ("HEADRACE_LOG_LEVEL_", "did you mean HEADRACE_LOG_LEVEL?"),
        ("HEADRACE_LANES_REALTIME_PRIORITY", "set in the configuration file"),
        ("HEADRACE_TENANTS", "set in the configuration file"),
    ],
)
def test_a_mistyped_name_is_refused(name: str, said: str) -> None:
    message = complaint(**{name: "1"})
    assert message.startswith(f"{name}: ")
    assert said in message


def test_a_wrong_value_names_variable_and_key() -> None:
    assert complaint(HEADRACE_SERVER_PORT="many") == (
        'HEADRACE_SERVER_PORT: server.port: expected a whole number, got "many"'
    )
    assert complaint(HEADRACE_SERVER_PORT="99999") == (
        "HEADRACE_SERVER_PORT: server.port: 99999 is out of range (0 to 65535)"
    )


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(variables())), st.text()))
def test_any_values_are_a_configuration_or_a_config_error(env: dict[str, str]) -> None:
    try:
        assert isinstance(build("", name="", env=env, overrides={})[0], Config)
    except ConfigError as error:
        assert str(error)
