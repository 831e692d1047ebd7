"""What the stores keep, write, let go and bring back, step by step, on real files."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.kv.tiers.address import root_address
from headrace.kv.tiers.block_file import Bad
from headrace.kv.tiers.codec import Codec
from headrace.kv.tiers.disk import BlockFolder
from headrace.kv.tiers.families import together
from headrace.kv.tiers.kv_tiers import WRITE_PAUSE_S
from headrace.kv.tiers.worker import Job, ThreadWorker
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from tests.kv.tiers.blocks import KIND, OTHER_KIND, RAW_BYTES, blocks, reader
from tests.kv.tiers.rig import FILE_BYTES, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a rig over the test's folder, after closing the one before."""
    made: list[Rig] = []

    def make(path: Path | None = tmp_path, **options: object) -> Rig:
        for before in made:
            before.close()
        made[:] = [Rig(path, **options)]  # type: ignore[arg-type]
        made[0].settle()
        return made[0]

    yield make
    for each in made:
        each.close()


def test_a_block_is_in_ram_after_its_stream_and_on_disk_after_its_second_use(rig: Callable[..., Rig]) -> None:
    """One sequence alone writes nothing."""
    stores = rig()
    stores.capture([1, 2])
    assert stores.places([1, 2]) == "rr"
    stores.begin([1, 3])
    assert stores.places([1, 2]) == "br"


def test_what_is_stored_is_not_stored_again(rig: Callable[..., Rig]) -> None:
    """The same beginning of two streams takes memory once."""
    stores = rig()
    stores.capture([1, 2])
    stores.capture([1, 3])
    assert stores.tiers.store.ram_blocks == 3
    assert stores.tiers.store.totals.deduplicated == 1


def test_two_captures_of_one_chain_on_their_way_at_once_are_stored_once(rig: Callable[..., Rig]) -> None:
    """The second one finds the first one's blocks under way."""
    stores = rig()
    stores.capture([1, 2], settle=False)
    stores.capture([1, 2, 3], settle=False)
    stores.settle()
    assert stores.places([1, 2, 3]) == "rrr"
    assert stores.tiers.store.totals.stored == 3


def test_a_restart_finds_what_is_on_disk(rig: Callable[..., Rig]) -> None:
    """And loads it into RAM again."""
    first = rig()
    first.capture([1, 2])
    first.begin([1, 2])
    again = rig()
    assert again.places([1, 2]) == "dd"
    assert again.load([1, 2, 3]) == 2
    assert again.places([1, 2]) == "bb"


def test_one_folder_serves_one_process_at_a_time(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """The second one is told so."""
    rig()
    with pytest.raises(ConfigError, match="another process"):
        BlockFolder(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        BlockFolder(tmp_path / "file")


@pytest.mark.timeout(20)
def test_a_pipe_named_like_a_block_is_no_block_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Opening one to read waits for a writer, by default for ever."""
    folder, fingerprint, address = BlockFolder(tmp_path), b"\1" * 32, b"\2" * 32
    path = folder.block_path(fingerprint, address)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    (found,) = folder.scan(fingerprint)
    assert isinstance(found.header, Bad) and found.header.reason == "unreadable"
    assert folder.read(fingerprint, address) is None
    folder.close()


def test_full_ram_lets_go_what_is_worth_least(rig: Callable[..., Rig]) -> None:
    """A block that others used, and one that takes long to compute, stay."""
    stores = rig(None, ram_blocks=3)
    stores.capture([1], compute_s=1.0)
    stores.capture([2], compute_s=1.0)
    stores.capture([3], compute_s=5.0)
    stores.begin([1])
    stores.capture([4], compute_s=1.0)
    assert [stores.places([number]) for number in (1, 2, 3, 4)] == ["r", "", "r", "r"]


def test_worth_falls_while_nobody_asks(rig: Callable[..., Rig]) -> None:
    """Ten half-lives later even a block that took long gives way."""
    stores = rig(None, ram_blocks=1)
    stores.capture([1], compute_s=100.0)
    stores.capture([2], compute_s=1.0)
    assert stores.places([1]) == "r"
    stores.now_s = 1200.0
    stores.capture([2], compute_s=1.0)
    assert (stores.places([1]), stores.places([2])) == ("", "r")
    assert stores.tiers.store.totals.unsaved == {"worth_less": 1}


def test_a_chain_goes_from_its_end(rig: Callable[..., Rig]) -> None:
    """No prefix loses its middle."""
    stores = rig(None, ram_blocks=3)
    stores.capture([1, 2, 3])
    stores.now_s = 500.0
    stores.capture([9])
    assert stores.places([1, 2, 3]) == "rr"


def test_full_disk_quota_lets_go_files_that_are_worth_least(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """And they are gone from the folder."""
    stores = rig(disk_blocks=2)
    for number in (1, 2, 3):
        stores.capture([number])
        stores.begin([number])
        stores.now_s += 60.0
    assert [stores.places([number]) for number in (1, 2, 3)] == ["r", "b", "b"]
    assert len(list(tmp_path.rglob("*.kv"))) == 2


def test_a_write_that_fails_leaves_nothing_and_the_next_ones_wait(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """The blocks stay in RAM; after a pause files are written again."""
    stores = rig()
    stores.capture([1, 2])
    stores.files.fail = 0
    stores.begin([1, 2])
    assert stores.places([1, 2]) == "rr"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    stores.begin([1, 2])
    assert stores.places([1, 2]) == "rr"
    stores.now_s += WRITE_PAUSE_S
    stores.begin([1, 2])
    assert stores.places([1, 2]) == "bb"


def test_a_file_after_one_that_could_not_be_written_does_not_stay(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """It names a file that is not there."""
    stores = rig()
    stores.capture([1, 2])
    stores.files.fail = 0
    stores.tiers.began(stores.root, b"".join(blocks([1, 2])))
    stores.settle()
    assert stores.tiers.store.totals.bad == {"orphan": 1}
    assert not list(tmp_path.rglob("*.kv"))


def test_nothing_is_written_before_the_folder_was_looked_through(tmp_path: Path) -> None:
    """It might be there, with others that name it."""
    stores = Rig(tmp_path)
    stores.worker.todo.clear()  # a look that takes long
    data = blocks([1])
    stores.tiers.capture(
        KIND, stores.root, data, reader(data), group="", compute_s=lambda _: 1.0, context_tokens=1, held_bytes=0
    )
    stores.settle()
    stores.begin([1])
    assert stores.places([1]) == "r"
    stores.close()


def test_a_file_that_was_let_go_is_removed_before_it_is_written_again(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Not after."""
    stores = rig()
    stores.capture([1])
    stores.begin([1])
    (node,) = stores.tiers.store.tree.stored_prefix(stores.root, b"".join(blocks([1])))
    stores.tiers.store.drop_file(node)
    stores.begin([1])
    assert stores.places([1]) == "b"
    assert len(list(tmp_path.rglob("*.kv"))) == 1


def constant(_data: bytes) -> bytes:
    """All addresses are the same."""
    return bytes(32)


def by_tokens(data: bytes) -> bytes:
    """Addresses that do not know what went before, nor the tokens' parity."""
    return bytes([len(data) % 251, data[-4] & 1]) + bytes(30)


def test_contents_with_one_address_are_kept_apart(rig: Callable[..., Rig]) -> None:
    """The second one is not written, and the first one not taken for it."""
    stores = rig(digest=constant)
    stores.capture([1])
    stores.capture([2])
    stores.begin([1])
    stores.begin([2])
    assert (stores.places([1]), stores.places([2])) == ("b", "r")
    assert stores.tiers.store.totals.bad == {"collision": 1}
    again = rig(digest=constant)
    assert (again.load([1]), again.load([2])) == (1, 0)


def test_a_file_follows_only_the_very_file_that_it_was_written_after(tmp_path: Path) -> None:
    """Another content with that file's address has come into its place while nothing ran."""
    uids = itertools.count(1)
    one, other = (
        Rig(tmp_path / "one", digest=by_tokens, uids=uids),
        Rig(tmp_path / "other", digest=by_tokens, uids=uids),
    )
    one.settle()
    other.settle()
    for stores, chain in ((one, [1, 2]), (other, [3])):
        stores.capture(chain)
        stores.begin(chain)
    (place,) = [path for path in (tmp_path / "other").rglob("*.kv")]
    one.close()
    other.close()
    shutil.copy(place, tmp_path / "one" / place.relative_to(tmp_path / "other"))
    again = Rig(tmp_path / "one", digest=by_tokens)
    again.settle()
    assert (again.load([3, 2]), again.load([1, 2])) == (1, 0)
    assert again.tiers.store.totals.bad == {"orphan": 1}
    again.close()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "empty"])
def test_a_damaged_file_is_dropped_with_what_follows_it(rig: Callable[..., Rig], tmp_path: Path, damage: str) -> None:
    """What is before it still loads, and the file is gone."""
    first = rig()
    first.capture([1, 2, 3])
    first.begin([1, 2, 3])
    nodes = first.tiers.store.tree.stored_prefix(first.root, b"".join(blocks([1, 2, 3])))
    assert first.folder is not None
    path = first.folder.block_path(KIND.fingerprint, nodes[1].address)
    again = rig()
    data = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            os.truncate(path, len(data) - 1)
        case "flipped":
            data[-1] ^= 4
            path.write_bytes(data)
        case "removed":
            path.unlink()
        case _:
            path.write_bytes(b"")
    assert again.load([1, 2, 3]) == 1
    again.settle()
    assert again.places([1, 2, 3]) == "b"
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    assert sum(again.tiers.store.totals.bad.values()) == 2


def test_unfinished_files_are_removed_at_start(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """A process was killed while it wrote."""
    first = rig()
    first.capture([1])
    first.begin([1])
    (path,) = tmp_path.rglob("*.kv")
    path.with_suffix(".partial").write_bytes(b"half")
    again = rig()
    assert not list(tmp_path.rglob("*.partial"))
    assert again.load([1]) == 1


def test_files_of_another_model_stay_until_their_room_is_needed(tmp_path: Path) -> None:
    """Whoever serves two models in turns finds both, as long as the quota allows."""
    first = Rig(tmp_path)
    first.settle()
    first.capture([1])
    first.begin([1])
    first.close()
    second = Rig(tmp_path, disk_blocks=2)
    second.settle()
    second.tiers.open(OTHER_KIND)
    second.settle()
    root = root_address(OTHER_KIND.fingerprint, ("", "all", None))
    for number, there in ((5, 2), (6, 2)):
        data = blocks([number])
        second.tiers.capture(
            OTHER_KIND, root, data, reader(data), group="", compute_s=lambda _: 1.0, context_tokens=1, held_bytes=0
        )
        second.settle()
        second.tiers.began(root, data[0])
        second.settle()
        assert len(list(tmp_path.rglob("*.kv"))) == there
    second.close()


def test_long_contexts_are_packed_at_once_and_cold_blocks_later(rig: Callable[..., Rig]) -> None:
    """The threshold of these stores is 1,000 tokens; RAM is more than half full."""
    stores = rig(None, codec="zstd", ram_blocks=3)
    stores.capture([1], tokens=1001)
    stores.capture([2], tokens=1000)
    stores.capture([3], tokens=1000)

    def codecs() -> list[Codec | None]:
        found = []
        for number in (1, 2, 3):
            (node,) = stores.tiers.store.tree.stored_prefix(stores.root, blocks([number])[0])
            found.append(None if node.ram is None else node.ram.codec)
        return found

    assert codecs() == [Codec.ZSTD_PLANES, Codec.RAW, Codec.RAW]
    stores.now_s = 60.0
    stores.begin([3])
    stores.now_s = 121.0
    stores.settle()
    assert codecs() == [Codec.ZSTD_PLANES, Codec.ZSTD_PLANES, Codec.RAW]
    assert [stores.load([number]) for number in (1, 2, 3)] == [1, 1, 1]


def test_a_full_queue_refuses_and_leaves_no_trace(rig: Callable[..., Rig]) -> None:
    """Nothing is promised that is not done."""
    stores = rig(None, most_jobs=1)
    assert stores.capture([1], settle=False)
    assert not stores.capture([2], settle=False)
    stores.settle()
    assert (stores.places([1]), stores.places([2])) == ("r", "")


def test_what_can_be_had_is_offered_up_to_every_change_of_place(rig: Callable[..., Rig]) -> None:
    """RAM alone is one offer, RAM and disk a second, dearer one."""
    first = rig()
    first.capture([1, 2, 3])
    first.begin([1, 2, 3])
    stores = rig()
    assert stores.load([1]) == 1
    found = stores.tiers.stored(stores.root, b"".join(blocks([1, 2, 3])))
    assert [(prefix.kind, prefix.tokens) for prefix in found] == [
        ("ram", KV_BLOCK_TOKENS),
        ("disk", 3 * KV_BLOCK_TOKENS),
    ]
    assert found[0].load_s < found[1].load_s


def test_a_tenants_blocks_are_nobody_elses() -> None:
    """Namespaces have roots of their own: a tenant named like nobody is not nobody, and what everybody shared is not
    what those without a tenant share."""
    roots = {
        root_address(KIND.fingerprint, namespace)
        for namespace in (
            ("", "all", None),
            ("", "tenant", None),
            ("", "tenant", ""),
            ("", "tenant", "a"),
            ("a", "tenant", None),
            ("a", "tenant", ""),
            ("", "tenant", "all"),
        )
    }
    assert len(roots) == 7


def test_the_thread_does_jobs_in_order_and_hands_errors_over() -> None:
    """An unexpected exception is the engine's, not lost."""
    worker = ThreadWorker(most_bytes=10)
    order: list[object] = []
    for number in range(5):
        assert worker.submit(Job(lambda number=number: number, order.append))  # type: ignore[misc]
    worker.close(10.0)
    assert order == [0, 1, 2, 3, 4]
    assert not worker.submit(Job(lambda: None, order.append))

    def fail() -> object:
        raise ValueError("unexpected")

    failing = ThreadWorker(most_bytes=10)
    failing.submit(Job(fail, order.append))
    with pytest.raises(ValueError, match="unexpected"):
        failing.close(10.0)


def test_the_threads_queue_is_bounded_by_bytes_but_takes_one_job_of_any_size() -> None:
    """A state larger than the bound is stored when nothing else waits."""
    worker = ThreadWorker(most_bytes=10)
    try:
        assert worker.has_room(1000)
        assert worker.submit(Job(lambda: None, lambda _: None, held_bytes=1000))
        assert not worker.has_room(1)
        assert worker.has_room(0)
    finally:
        worker.close(10.0)


def test_what_is_stored_is_told_by_the_first_block_of_its_sequences(rig: Callable[..., Rig]) -> None:
    """Once for each tier, with what it costs to bring back; the smaller ones can be added up."""
    stores = rig()
    stores.capture([1, 2])
    stores.capture([1, 3], compute_s=2.0)
    stores.capture([4])
    stores.begin([4])
    found = {(family.name, family.tier): family for family in stores.tiers.families()}
    one, four = [stores.tiers.store.tree.stored_prefix(stores.root, blocks([n])[0])[0].address.hex() for n in (1, 4)]
    assert set(found) == {(one[:16], "ram"), (four[:16], "ram"), (four[:16], "disk")}
    first = found[(one[:16], "ram")]
    assert (first.blocks, first.bytes, first.compute_s) == (3, 3 * RAW_BYTES, 4.0)
    assert found[(four[:16], "disk")].bytes == FILE_BYTES
    (total,) = together([family for family in found.values() if family.tier == "ram"])
    assert (total.blocks, total.bytes, total.compute_s) == (4, 4 * RAW_BYTES, 5.0)
    assert together([]) == []
