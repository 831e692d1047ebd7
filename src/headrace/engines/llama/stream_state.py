"""Moving one stream's KV between contexts with different numbers of streams.

libllama writes a sequence's state as a magic number and the sequence id (4 bytes each), then the context's
number of streams and, per stream, a cell count followed by that stream's cells when there are any (all
little-endian 32-bit). It refuses a state whose number of streams is not the target's, although only one
stream holds anything. ``retarget`` rewrites that frame and leaves the cells as they are. It is pure, and
returns None for whatever does not have exactly this shape (models whose memory is of another kind); the
caller then computes the tokens again.
"""

from __future__ import annotations

import struct

_PREFIX_BYTES = 8
_COUNT_BYTES = 4


def retarget(
    data: bytes | bytearray | memoryview, *, stream: int, source_streams: int, target_streams: int, tokens: int
) -> bytearray | None:
    """``data`` of a context with ``source_streams`` streams, where ``stream`` holds ``tokens`` cells, as a
    context with ``target_streams`` streams would have written it."""
    before = _PREFIX_BYTES + _COUNT_BYTES + _COUNT_BYTES * stream
    after_bytes = _COUNT_BYTES * (source_streams - 1 - stream)
    if len(data) < before + _COUNT_BYTES + after_bytes:
        return None
    counts = struct.unpack_from(f"<{stream + 2}I", data, _PREFIX_BYTES)
    if counts[0] != source_streams or any(counts[1:-1]) or counts[-1] != tokens:
        return None
    end = len(data) - after_bytes
    if any(data[end:]):
        return None
    return bytearray().join(
        (
            data[:_PREFIX_BYTES],
            struct.pack("<I", target_streams),
            data[before:end],
            bytes(_COUNT_BYTES * (target_streams - 1)),
        )
    )
