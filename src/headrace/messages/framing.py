"""Length-prefixed msgpack frames over a stream socket."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from headrace.errors import EngineError
from headrace.messages.engine import EngineMessage, GatewayMessage

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
_HEADER: Final = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_gateway_decoder = msgspec.msgpack.Decoder(GatewayMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: GatewayMessage | EngineMessage) -> bytes:
    """One frame, ready to send."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class FrameBuffer:
    """Collects received bytes and yields whole frame bodies, however the bytes were split."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Add received bytes; gives every frame body completed by them. Each call's result must be read to its
        end before the next call.

        Raises EngineError when a length is beyond ``MAX_FRAME_BYTES``: the stream is out of step.
        """
        if not self._data and len(data) >= _HEADER.size:
            # Nearly every read is exactly one frame: no copy into the buffer and out again.
            (length,) = _HEADER.unpack_from(data)
            if len(data) == _HEADER.size + length and length <= MAX_FRAME_BYTES:
                return (data[_HEADER.size :],)
        return self._split(data)

    def _split(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while len(self._data) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"a frame of {length} bytes is beyond the limit of {MAX_FRAME_BYTES}")
            end = _HEADER.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEADER.size : end])
            del self._data[:end]
            yield body


def decode_for_engine(body: bytes) -> GatewayMessage:
    """A frame body that the gateway sent. Raises EngineError when it is not a known message."""
    try:
        return _gateway_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineError(f"unreadable message from the gateway: {error}") from error


def decode_for_gateway(body: bytes) -> EngineMessage:
    """A frame body that the engine sent. Raises EngineError when it is not a known message."""
    try:
        return _engine_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineError(f"unreadable message from the engine: {error}") from error
