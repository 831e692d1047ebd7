"""The file that ``headrace init`` writes."""

from __future__ import annotations

import re

from headrace.config.fields import notes
from headrace.config.load import build
from headrace.config.schema import Config, Tenant
from headrace.config.template import example_lane, example_tenant, template
from headrace.config.yaml_tree import parse_yaml
from headrace.lanes.lane import SLO, Lane, LaneMatch


def test_it_loads_to_exactly_the_defaults() -> None:
    assert build(template(), name="t", env={}, overrides={})[0] == Config()


def test_every_key_of_the_schema_is_in_it() -> None:
    shown = set(re.findall(r"(\w+):", template()))
    assert {key for table in notes().values() for key in table} <= shown


def test_its_examples_are_right_and_show_every_key() -> None:
    text = "lanes:\n" + indented(example_lane()) + "tenants:\n" + indented(example_tenant())
    config, _ = build(text, name="t", env={"ACME_API_KEY": "sk-acme"}, overrides={})
    assert config.lanes["support"].priority == 15
    assert config.tenants["acme"].lanes == ("interactive", "batch")
    tree = parse_yaml(text, "t")
    keys = {path[-1] for path in tree.lines}
    assert {key for kind in (Lane, SLO, LaneMatch, Tenant) for key in notes()[kind]} <= keys


def test_the_examples_in_it_are_those_examples() -> None:
    def bare(text: str) -> str:
        return "".join(line.lstrip(" #") + "\n" for line in text.splitlines())

    for example in (example_lane(), example_tenant()):
        assert bare(example) in bare(template())


def test_no_line_is_too_long_for_a_terminal() -> None:
    assert max(map(len, template().splitlines())) <= 110


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
