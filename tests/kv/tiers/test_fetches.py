"""What is read from disk beside the steps, for sequences that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from tests.kv.tiers.blocks import KIND, blocks
from tests.kv.tiers.rig import Rig


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes stores that find blocks 1, 2, 3 on disk, from an earlier run."""
    first = Rig(tmp_path)
    first.settle()
    first.capture([1, 2, 3])
    first.begin([1, 2, 3])
    first.close()
    made: list[Rig] = []

    def make(**options: int) -> Rig:
        made.append(Rig(tmp_path, **options))  # type: ignore[arg-type]
        made[0].settle()
        assert made[0].places([1, 2, 3]) == "ddd"
        return made[0]

    yield make
    for each in made:
        each.close()


def fetch(stores: Rig, name: str) -> bool:
    """``name`` waits for blocks 1, 2, 3."""
    return stores.tiers.fetch(name, stores.root, b"".join(blocks([1, 2, 3])))


def kinds(stores: Rig) -> list[str]:
    """Where the stores say that blocks 1, 2, 3 come from."""
    return [prefix.kind for prefix in stores.tiers.stored(stores.root, b"".join(blocks([1, 2, 3])))]


def test_what_was_fetched_is_in_memory_until_it_is_released(on_disk: Callable[..., Rig]) -> None:
    """Before the worker has read it, and after, it is on disk."""
    stores = on_disk()
    assert fetch(stores, "a") and not stores.tiers.fetches.ready("a")
    assert kinds(stores) == ["disk"]
    stores.settle()
    assert stores.tiers.fetches.ready("a") and kinds(stores) == ["ram"]
    stores.tiers.fetches.release("a")
    assert kinds(stores) == ["disk"] and stores.tiers.fetches.bytes == 0
    assert stores.tiers.check_integrity() is None


def test_what_was_fetched_is_kept_though_ram_is_full_of_what_is_worth_more(on_disk: Callable[..., Rig]) -> None:
    """Somebody waits for it. Loading it needs no file, and does not push the others out."""
    stores = on_disk(ram_blocks=1)
    stores.capture([9], compute_s=1e6)
    fetch(stores, "a")
    stores.settle()
    for path in list(stores.path.rglob("*.kv")):
        path.unlink()
    assert stores.load([1, 2, 3]) == 3
    assert stores.places([9]) == "r"
    totals = stores.tiers.store.totals
    assert totals.fetched == 3 and totals.disk_hit_tokens == 3 * KV_BLOCK_TOKENS and not totals.bad


def test_two_who_wait_for_the_same_keep_it_until_both_have_it(on_disk: Callable[..., Rig]) -> None:
    """Whoever is first."""
    stores = on_disk()
    assert fetch(stores, "a") and fetch(stores, "b")
    stores.settle()
    stores.tiers.fetches.release("a")
    assert kinds(stores) == ["ram"]
    stores.tiers.fetches.release("b")
    assert kinds(stores) == ["disk"]


def test_a_fetch_that_was_given_up_leaves_nothing(on_disk: Callable[..., Rig]) -> None:
    """Its blocks are read for nobody."""
    stores = on_disk()
    fetch(stores, "a")
    stores.tiers.fetches.release("a")
    stores.settle()
    assert kinds(stores) == ["disk"] and stores.tiers.store.totals.fetched == 0


def test_fetches_have_a_bound_but_one_of_any_size_is_taken(on_disk: Callable[..., Rig]) -> None:
    """Three blocks are more than two, and fetched; then nothing more."""
    stores = on_disk(fetched_blocks=2)
    assert fetch(stores, "a")
    assert not fetch(stores, "b")
    stores.settle()
    assert not stores.tiers.fetches.ready("a") or kinds(stores) == ["ram"]
    stores.tiers.fetches.release("a")
    assert fetch(stores, "b")


def test_a_damaged_file_is_dropped_with_what_follows_it(on_disk: Callable[..., Rig]) -> None:
    """What was read before it is there."""
    stores = on_disk()
    nodes = stores.tiers.store.tree.stored_prefix(stores.root, b"".join(blocks([1, 2, 3])))
    assert stores.folder is not None
    stores.folder.block_path(KIND.fingerprint, nodes[1].address).write_bytes(b"")
    fetch(stores, "a")
    stores.settle()
    assert stores.tiers.fetches.ready("a")
    assert stores.places([1, 2, 3]) == "d" and kinds(stores) == ["ram"]
    assert stores.tiers.store.totals.bad == {"truncated": 1, "orphan": 1}


def test_nothing_to_read_is_no_fetch(on_disk: Callable[..., Rig]) -> None:
    """All is in RAM, or not stored."""
    stores = on_disk()
    assert stores.load([1, 2, 3]) == 3
    assert not fetch(stores, "a")
    assert not stores.tiers.fetch("a", stores.root, blocks([7])[0])


def test_one_name_has_one_fetch(on_disk: Callable[..., Rig]) -> None:
    """Else nobody could say what a release means."""
    stores = on_disk()
    fetch(stores, "a")
    with pytest.raises(ValueError, match="already"):
        fetch(stores, "a")


def test_no_more_is_offered_from_disk_than_there_is_time_for(on_disk: Callable[..., Rig]) -> None:
    """Beside others, files are read for as long as a step can wait."""
    stores = on_disk()
    a_block_s = stores.tiers.times.block_from_disk_s(KIND.raw_bytes)
    data = b"".join(blocks([1, 2, 3]))
    assert not stores.tiers.stored(stores.root, data, 0.5 * a_block_s)
    assert [p.tokens for p in stores.tiers.stored(stores.root, data, 3.5 * a_block_s)] == [3 * KV_BLOCK_TOKENS]
