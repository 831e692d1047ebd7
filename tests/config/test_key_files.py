"""Keys in files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace.config.load import build
from headrace.config.problems import ConfigProblems
from headrace.config.schema import Config

SECRET = "sk-very-secret-in-a-file"


def loaded(text: str) -> Config:
    return build(text, name="headrace.yaml", env={}, overrides={})[0]


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_a_file_holds_keys_and_digests_one_a_line(tmp_path: Path) -> None:
    """Empty lines and comments are skipped; what is kept are digests."""
    file = tmp_path / "keys"
    file.write_text(f"# two keys\n{SECRET}\r\n\n  {digest('second')}\n", encoding="utf-8")
    config = loaded(f"tenants: {{acme: {{api_keys: ['file:{file}', third]}}}}\nserver: {{admin_keys: [fourth]}}")
    assert config.tenants["acme"].api_keys == (digest(SECRET), digest("second"), digest("third"))


def test_admin_keys_may_stand_in_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(SECRET, encoding="utf-8")
    assert loaded(f"server: {{admin_keys: ['file:{file}']}}").server.admin_keys == (digest(SECRET),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no key"),
        (b"# only a comment\n", "holds no key"),
        (b"sk-very secret-in-a-file\n", "line 1: an API key may hold only printable"),
        (b"\xff\xfe\n", "line 1: an API key may hold only printable"),
        (b"env:sk-very\n", "line 1: expected a key"),
        (b"sha256:sk-very\n", "line 1: sha256: needs the 64"),
        (b"x" * 2**21, "is larger than"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place_and_without_its_content(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    """Above all an empty file must not leave a tenant, and with it the server, open."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigProblems) as caught:
        loaded(f"tenants:\n  acme:\n    api_keys: ['file:{file}']\n")
    (problem,) = str(caught.value).splitlines()
    assert problem.startswith("headrace.yaml:3: tenants.acme.api_keys[0]: ") and said in problem
    assert "sk-very" not in problem


def test_one_key_in_two_places_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(SECRET, encoding="utf-8")
    with pytest.raises(ConfigProblems, match=r"the same key as tenants\.a\.api_keys\[0\]"):
        loaded(f"tenants: {{a: {{api_keys: ['file:{file}']}}, b: {{api_keys: [{SECRET}]}}}}")
