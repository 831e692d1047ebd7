"""Parked KV in files: whole or not at all, of this process alone, and never another sequence's or damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.spill import SpillStore, read_state, write_state
from headrace.errors import ConfigError


def state(fill: int = 7, size: int = 5000) -> ParkedState:
    return ParkedState(bytearray([fill] * size), 3, 8, 128)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SpillStore]:
    made = SpillStore(tmp_path, 1 << 30)
    yield made
    made.close()


def written(store: SpillStore, count: int) -> None:
    """Until so many states are in files."""
    deadline_s = time.monotonic() + 30
    while store.totals.written < count:
        assert time.monotonic() < deadline_s
        assert store.settle() == []
        time.sleep(0.001)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_what_was_written_is_read_back_and_its_file_is_gone(store: SpillStore, tmp_path: Path) -> None:
    assert store.put("a", state())
    written(store, 1)
    assert len(files(tmp_path)) == 1 and store.tokens("a") == 128 and store.read_s("a") > 0
    back = store.take("a")
    assert back is not None and (bytes(back.data), back.stream, back.streams, back.tokens) == (
        bytes(state().data),
        3,
        8,
        128,
    )
    assert files(tmp_path) == [] and len(store) == 0 and store.bytes == 0
    assert store.take("a") is None


def test_before_it_is_written_it_is_read_from_memory(store: SpillStore, tmp_path: Path) -> None:
    assert store.put("a", state())
    assert store.take("a") is not None
    assert store.put("a", state(8))  # again, under the same name, with the first one perhaps still being written
    written(store, 1)
    back = store.take("a")
    assert back is not None and back.data[0] == 8
    store.settle()
    assert store.check_integrity() is None


def test_the_limit_holds(tmp_path: Path) -> None:
    store = SpillStore(tmp_path, 11_000)
    assert store.put("a", state()) and store.put("b", state())
    assert not store.put("c", state())
    store.drop("a")
    assert store.put("c", state())
    store.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_gives_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Cut, lengthened, or with any byte changed."""
    path = tmp_path / "1.kv"
    write_state(path, "a", state(size=300))
    good = path.read_bytes()
    damage = data.draw(st.sampled_from(["flip", "cut", "more", "random"]))
    if damage == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    elif damage == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif damage == "more":
        bad = good + data.draw(st.binary(min_size=1, max_size=50))
    else:
        bad = data.draw(st.binary(max_size=600))
    path.write_bytes(bad)
    assert read_state(path, "a") is None
    path.write_bytes(good)
    assert read_state(path, "a") is not None
    assert read_state(path, "b") is None, "another request's file"


def test_a_file_that_was_damaged_meanwhile_is_lost_and_counted(store: SpillStore, tmp_path: Path) -> None:
    store.put("a", state())
    written(store, 1)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert store.take("a") is None and store.totals.lost == 1 and store.check_integrity() is None


def test_closing_removes_everything(tmp_path: Path) -> None:
    store = SpillStore(tmp_path, 1 << 30)
    for number in range(5):
        store.put(f"r{number}", state())
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []


CHILD = """
import sys
from pathlib import Path
from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.spill import SpillStore
store = SpillStore(Path(sys.argv[1]), 1 << 40)
print("began", flush=True)
number = 0
while True:
    store.put(f"r{number}", ParkedState(bytearray(8_000_000), 0, 8, 128))
    store.settle()
    if number > 20:
        store.drop(f"r{number - 20}")
    number += 1
"""


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path, after_s: float) -> None:
    """At any moment, in the middle of a file too. What a living process has stays."""
    living = SpillStore(tmp_path, 1 << 30)
    living.put("mine", state())
    written(living, 1)
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"began\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 2
    SpillStore(tmp_path, 1 << 30).close()
    (left,) = tmp_path.iterdir()
    assert [path.parent for path in files(tmp_path)] == [left]
    assert living.take("mine") is not None
    living.close()


FULL = """
import resource, signal, sys, time
from pathlib import Path
from headrace.engines.llama.parking import ParkedState, Parking
from headrace.engines.llama.spill import SpillStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
parking = Parking(0, SpillStore(Path(sys.argv[1]), 1 << 30))
assert parking.park("small", ParkedState(bytearray(5000), 0, 8, 100)) == []
assert parking.park("large", ParkedState(bytearray(50000), 0, 8, 200)) == []
lost = []
while not lost:
    lost = parking.settle()
    time.sleep(0.001)
assert lost == ["large"], lost
assert (len(parking), parking.on_disk, parking.dropped, parking.tokens("large")) == (1, 1, 1, None)
assert parking.get("small").tokens == 100
assert not list(Path(sys.argv[1]).rglob("*.partial"))
parking.close()
"""


def test_without_space_on_the_disk_a_state_is_lost_and_said_to_be(tmp_path: Path) -> None:
    """The operating system refuses to write a part of it; nothing is left of it, and others stay."""
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "not written" in ended.stderr


def test_a_folder_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(ConfigError, match="spill_dir"):
        SpillStore(in_the_way / "folder", 1)


def test_a_slow_disk_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One state of any size may wait to be written; more only up to a bound."""
    monkeypatch.setattr("headrace.engines.llama.spill.MOST_PENDING_BYTES", 8000)
    store = SpillStore(tmp_path, 1 << 30)
    assert store.put("a", state(size=20_000))
    if store.pending_bytes:
        assert not store.put("b", state())
    written(store, 1)
    assert store.put("b", state())
    store.close()
    assert os.listdir(tmp_path) == []
