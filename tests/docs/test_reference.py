"""The reference is what the code says."""

from __future__ import annotations

import pytest

from scripts import make_reference


@pytest.mark.parametrize("page", ["configuration.md", "cli.md", "metrics.md", "headers.md"])
def test_a_page_is_what_the_script_writes(page: str) -> None:
    written = (make_reference.FOLDER / page).read_text(encoding="utf-8")
    assert written == make_reference.pages()[page], "run: python scripts/make_reference.py"


def test_nothing_else_lies_in_the_reference_folder() -> None:
    assert {file.name for file in make_reference.FOLDER.iterdir()} == set(make_reference.pages())
