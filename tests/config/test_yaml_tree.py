"""YAML text to plain values: strict, bounded, with lines."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config.problems import ConfigProblems
from headrace.config.yaml_tree import MAX_TEXT_BYTES, Value, parse_yaml


def complaint(text: str | bytes) -> str:
    with pytest.raises(ConfigProblems) as caught:
        parse_yaml(text, "f.yaml")
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "\ufeff"])
def test_no_content_is_no_value(text: str) -> None:
    assert parse_yaml(text.encode(), "f.yaml").value is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0x10", 16),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("'1e3'", "1e3"),
        ("yes", True),
        ("~", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("[a, 'b']", ["a", "b"]),
        ("{1: a, on: b}", {"1": "a", "on": "b"}),
        ("!!str 5", "5"),
    ],
)
def test_values_are_what_people_mean(text: str, value: Value) -> None:
    found = parse_yaml(text, "f.yaml").value
    assert found == value
    assert type(found) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    tree = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - y\n", "f.yaml")
    assert tree.lines == {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 0): 4, ("b", "c", 1): 5}


def test_anchors_and_merge_keys_work_and_own_keys_win() -> None:
    tree = parse_yaml("base: &b {x: 1, y: 2}\nnext:\n  <<: *b\n  y: 3\nlast: *b\n", "f.yaml")
    assert tree.value == {"base": {"x": 1, "y": 2}, "next": {"x": 1, "y": 3}, "last": {"x": 1, "y": 2}}
    assert tree.lines[("next", "y")] == 4


def test_the_earlier_of_several_merged_mappings_wins() -> None:
    tree = parse_yaml("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}\n", "f.yaml")
    assert isinstance(tree.value, dict)
    assert tree.value["c"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "f.yaml:4: b.c: given twice (first on line 3)"),
        ("a: 1\n1: 2\n1: 3\n", "f.yaml:3: 1: given twice (first on line 2)"),
        ("a: [1\nb: 2\n", "f.yaml:2: not valid YAML"),
        ("a: *nowhere\n", "f.yaml:1: not valid YAML: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: not valid YAML: expected a single document"),
        ("a: !!python/object:os.system {}\n", "f.yaml:1: a: the tag"),
        ("a: !!binary aGk=\n", "f.yaml:1: a: the tag"),
        ("a: !!set {x}\n", "f.yaml:1: a: the tag"),
        ("? [a]\n: 1\n", "f.yaml:1: a key must be plain text"),
        ("a: {<<: 5}\n", "f.yaml:1: a: << needs a mapping"),
        ("a: &x\n  b: *x\n", "f.yaml:1: a.b: contains itself"),
        ("\n\na: b\x07c\n", "f.yaml:3: not valid YAML: the character"),
        (b"a: 1\nb: \xff\n", "f.yaml:2: not UTF-8 text"),
        ('a: "\\ud800"\n', "f.yaml:1: a: not valid Unicode text"),
        ("a: 0x" + "f" * 100, "f.yaml:1: a: not a valid int: too long"),
        ("a: !!int x\n", "f.yaml:1: a: not a valid int"),
        ("a: !!bool x\n", "f.yaml:1: a: not a valid bool"),
        ("[" * 5000, "f.yaml"),
        ("a: " + "[" * 50 + "]" * 50, "f.yaml:1: nested too deeply"),
        ("x" * (MAX_TEXT_BYTES + 1), "more than a configuration may have"),
    ],
)
def test_what_is_refused_is_refused_with_its_line(text: str | bytes, message: str) -> None:
    said = complaint(text)
    assert message in said
    assert "\n" not in said


def test_aliases_cannot_grow_a_small_text_without_measure() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 12):
        text += f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 10) + "]\n"
    assert "are aliases nested?" in complaint(text)


def test_every_problem_is_listed() -> None:
    assert complaint("a: 1\na: 2\nb: !!binary x\nc: !!int y\n").count("\n") == 2


_YAML_PIECES = st.lists(
    st.sampled_from(
        ["a", "b: ", "- ", "\n", "  ", "[", "]", "{", "}", "&x ", "*x", "<<: ", "!!int ", "!t ", "'", '"', "\\",
         "|", ">", "? ", ": ", ",", "%", "---", "...", "1", "1e9", "\t", "#", "@", "`", "\\UFFFFFFFF",
         "~", "=", "é"]
    )
).map("".join)  # fmt: skip


@settings(deadline=None)
@given(st.one_of(_YAML_PIECES, st.text(), st.binary()))
@example('"\\UFFFFFFFF"')
@example("%YAML 1.99999999999999999999\n---\n")
@example("!<tag:yaml.org,2002:int> ''")
@example("=")
@example("<<: {}")
@example("- <<")
@example("? &a\n: *a")
def test_any_text_is_a_tree_or_a_list_of_problems(text: str | bytes) -> None:
    try:
        parse_yaml(text, "f.yaml")
    except ConfigProblems as error:
        assert error.problems
        assert all(str(problem).isprintable() for problem in error.problems)
