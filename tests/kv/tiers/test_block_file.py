"""The file of a block: what was written is read, and whatever else the bytes are, the answer is a reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.kv.tiers.block_file import FORMAT_VERSION, HEADER_BYTES, Bad, decode_block, decode_header
from headrace.kv.tiers.codec import Codec
from tests.kv.tiers.blocks import KIND, OTHER_KIND, RAW_BYTES, block, block_bytes, kv_of

RUN_WIDTH_AT = 154
"""Where the header says the width of the first entries: 2."""
CODECS = st.sampled_from(list(Codec))


def read(data: bytes) -> tuple[bytes, bytes] | str:
    """Tokens and KV, or the reason."""
    decoded = decode_block(data, KIND.fingerprint, runs=KIND.runs)
    if isinstance(decoded, Bad):
        return decoded.reason
    return decoded[0].tokens, decoded[1].tobytes()


@pytest.mark.parametrize("codec", list(Codec))
def test_what_was_written_is_read(codec: Codec) -> None:
    """Packed or not."""
    assert read(block_bytes(codec)) == (block(1), kv_of([block(1)]).tobytes())


@given(codec=CODECS, place=st.integers(0, HEADER_BYTES + RAW_BYTES - 1), change=st.integers(1, 255))
def test_one_changed_byte_anywhere_is_noticed(codec: Codec, place: int, change: int) -> None:
    """In the header, the tokens or the KV."""
    data = bytearray(block_bytes(codec))
    data[place % len(data)] ^= change
    assert isinstance(read(bytes(data)), str)


@given(codec=CODECS, length=st.integers(0, HEADER_BYTES + RAW_BYTES - 1))
def test_a_shorter_file_is_noticed(codec: Codec, length: int) -> None:
    """Wherever it ends."""
    data = block_bytes(codec)
    assert read(data[: length % len(data)]) == "truncated"


@given(codec=CODECS, more=st.binary(min_size=1, max_size=64))
def test_a_longer_file_is_noticed(codec: Codec, more: bytes) -> None:
    """Something follows the KV."""
    assert read(block_bytes(codec) + more) == "length"


@given(st.binary(max_size=4 * HEADER_BYTES))
def test_any_bytes_give_a_reason(data: bytes) -> None:
    """And no exception."""
    assert isinstance(read(data), str)


@given(codec=CODECS, cuts=st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=16)), min_size=1, max_size=8))
def test_a_file_with_foreign_bytes_in_it_is_sound_or_has_a_reason(codec: Codec, cuts: list[tuple[int, bytes]]) -> None:
    """Several places overwritten at once: either nothing changed, or it is noticed."""
    sound = block_bytes(codec)
    data = bytearray(sound)
    for place, piece in cuts:
        data[place : place + len(piece)] = piece
    result = read(bytes(data))
    assert isinstance(result, str) == (bytes(data) != sound)


def with_header_field(offset: int, piece: bytes) -> bytes:
    """A file whose writer had put ``piece`` into the header: the header's checksum is right."""
    from headrace.kv.tiers.block_file import checksum

    data = bytearray(block_bytes())
    data[offset : offset + len(piece)] = piece
    data[HEADER_BYTES - 16 : HEADER_BYTES] = checksum(bytes(data[: HEADER_BYTES - 16]))
    return bytes(data)


@given(offset=st.integers(12, HEADER_BYTES - 17), piece=st.binary(min_size=1, max_size=40))
@example(offset=RUN_WIDTH_AT, piece=b"\x01")
def test_fields_that_no_writer_writes_are_refused_though_their_checksum_is_right(offset: int, piece: bytes) -> None:
    """Huge lengths, unknown codecs, widths of zero: never an exception, never KV of other tokens."""
    result = read(with_header_field(offset, piece[: HEADER_BYTES - 16 - offset]))
    assert isinstance(result, str) or result == (block(1), kv_of([block(1)]).tobytes())


def test_another_version_another_magic_and_another_model_have_reasons_of_their_own() -> None:
    """Each is dropped for what it is."""
    data = block_bytes()
    assert read(b"another0" + data[8:]) == "not_a_block"
    assert read(data[:8] + (FORMAT_VERSION + 1).to_bytes(2, "little") + data[10:]) == "version"
    foreign = decode_header(data, OTHER_KIND.fingerprint)
    assert isinstance(foreign, Bad) and foreign.reason == "foreign"


def test_a_block_of_another_size_is_refused_before_anything_is_unpacked() -> None:
    """The reader knows how large a block is, and of what entries."""
    decoded = decode_block(block_bytes(), KIND.fingerprint, runs=(*KIND.runs, *KIND.runs))
    assert isinstance(decoded, Bad) and decoded.reason == "length"


def test_the_tokens_must_be_those_of_the_address() -> None:
    """Tokens changed together with the header's checksum."""
    assert read(with_header_field(HEADER_BYTES - 16 - 4, np.int32(7).tobytes())) == "address"
