"""What a model source may be, and what the errors say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.models import store
from headrace.models.catalog import ModelSpec


def gguf_header(version: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, 0)


def test_a_catalog_name_is_pulled_when_missing(tiny_spec: ModelSpec) -> None:
    assert store.resolve("tiny") == store.path_of("tiny")


def test_any_gguf_of_the_user_is_taken_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine"
    path.write_bytes(gguf_header(3))
    assert store.resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert store.resolve("mine") == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.resolve("~/mine") == path


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else altogether", "not a GGUF file"),
        (b"GGUF\x03\x00", "cut off"),
        (gguf_header(1), "GGUF version 1; versions 2 and 3 are supported"),
        (gguf_header(99), "GGUF version 99"),
    ],
)
def test_other_files_are_refused_with_the_reason(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        store.resolve(str(path))


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model file no-such\.gguf"):
        store.resolve("no-such.gguf")
    with pytest.raises(ModelError, match="is a folder"):
        store.resolve(str(tmp_path))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2\?"):
        store.resolve("SmolLM")
    with pytest.raises(ModelError, match="known models: smollm2"):
        store.resolve("qqq")


def test_list_tells_what_is_installed(tiny_spec: ModelSpec) -> None:
    before = {status.name: status.path for status in store.list_models()}
    assert before == {"smollm2": None, "tiny": None}
    path = store.pull(tiny_spec)
    after = {status.name: status.path for status in store.list_models()}
    assert after == {"smollm2": None, "tiny": str(path)}


def test_remove_frees_the_space_and_may_be_followed_by_a_pull(tiny_spec: ModelSpec, cache: Path) -> None:
    size = store.pull(tiny_spec).stat().st_size
    assert store.remove("tiny") >= size
    assert not (cache / "tiny").exists()
    with pytest.raises(ModelError, match="not installed"):
        store.remove("tiny")
    with pytest.raises(ModelError, match="headrace model pull tiny"):
        store.path_of("tiny")
    store.pull(tiny_spec)


def test_cache_folder_that_cannot_be_made_is_a_model_error(
    tiny_spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be used: Not a directory"):
        store.pull(tiny_spec)
