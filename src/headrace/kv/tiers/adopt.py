"""What an earlier run left on disk, taken into the account of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.kv.tiers.block_file import ROOT_UID, Bad, BlockHeader
from headrace.kv.tiers.block_store import BlockStore
from headrace.kv.tiers.block_tree import BlockKind, BlockNode, DiskRecord
from headrace.kv.tiers.disk import FoundFile


def adopt(
    store: BlockStore, kind: BlockKind, found: Sequence[FoundFile], used_s: Callable[[FoundFile], float]
) -> list[Path]:
    """Take the files of ``kind`` over, parents first, as far as the quota goes. ``used_s`` says when one was last used,
    on this run's clock. Returns the files that are to be removed: those that cannot be used, and those for which there
    is no room."""
    by_address: dict[bytes, BlockNode] = {}
    removed: list[Path] = []
    for file in found:
        header = file.header
        problem: Bad | None
        if isinstance(header, BlockHeader):
            if store.disk_bytes + file.file_bytes > store.disk_quota_bytes:
                store.totals.disk_evicted += 1
                removed.append(file.path)
                continue
            problem = _adopt_one(store, kind, header, file, by_address, used_s(file))
        else:
            problem = header
        if problem is not None:
            store.totals.count_bad(problem.reason)
            removed.append(file.path)
    return removed


def _adopt_one(
    store: BlockStore,
    kind: BlockKind,
    header: BlockHeader,
    file: FoundFile,
    by_address: dict[bytes, BlockNode],
    used_s: float,
) -> Bad | None:
    if header.runs != kind.runs:
        return Bad("length")
    if header.depth == 0:
        if header.parent_uid != ROOT_UID:
            return Bad("orphan")
        parent = store.tree.root(kind, header.parent)
    else:
        above = by_address.get(header.parent)
        if above is None or above.disk is None or above.disk.uid != header.parent_uid:
            return Bad("orphan")
        if above.depth + 1 != header.depth:
            return Bad("orphan")
        parent = above
    record = DiskRecord(header.uid, file.file_bytes)
    node = store.found(parent, header.tokens, record, compute_s=header.compute_s, used_s=used_s)
    if node is None:
        store.tree.prune(parent)
        return Bad("collision")
    by_address[header.address] = node
    return None
