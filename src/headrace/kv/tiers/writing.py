"""A block on its way to a file."""

from __future__ import annotations

from collections.abc import Callable

from headrace.kv.tiers.block_file import BlockHeader, checksum, encode_header
from headrace.kv.tiers.block_tree import BlockNode
from headrace.kv.tiers.codec import Codec, Payload, pack
from headrace.kv.tiers.disk import BlockFolder


def write_block(
    folder: BlockFolder, node: BlockNode, payload: Payload, codec: Codec, *, uid: bytes, parent_uid: bytes
) -> Callable[[], int | None]:
    """What writes ``node``, whose bytes are ``payload``, as the file ``uid`` that follows ``parent_uid``, packed by
    ``codec``. It may be called in another thread, and returns the file's length, None when it could not be written."""
    assert node.parent is not None
    kind, address, parent, depth, tokens = node.kind, node.address, node.parent.address, node.depth, node.tokens
    compute_s = node.compute_s

    def work() -> int | None:
        stored = payload
        if codec is not Codec.RAW and payload.codec is Codec.RAW:
            stored = pack(payload.data, codec, kind.runs)
        header = BlockHeader(
            kind.fingerprint,
            parent,
            address,
            uid,
            parent_uid,
            depth,
            tokens,
            kind.runs,
            stored.codec,
            stored.raw_bytes,
            stored.stored_bytes,
            compute_s,
            checksum(stored.data.data),
        )
        written = folder.write(kind.fingerprint, address, encode_header(header), stored.data.data)
        return header.file_bytes if written else None

    return work
