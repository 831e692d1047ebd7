"""The engine process's end of the socket to the gateway."""

from __future__ import annotations

import select
import socket

from headrace.errors import EngineError
from headrace.messages import framing
from headrace.messages.engine import EngineMessage, GatewayMessage

_RECEIVE_BYTES = 1 << 18


class GatewayGone(Exception):
    """The other end of the socket is closed: nobody is left to serve."""


class Channel:
    """Messages over the socket that the gateway handed down."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = framing.FrameBuffer()
        self._seen: list[GatewayMessage] = []
        self._failure: EngineError | GatewayGone | None = None
        # Asking first costs less than the exception of a read that would block, which is the usual case.
        self._arrived = select.poll()
        self._arrived.register(connection, select.POLLIN)

    def receive(self, *, wait_s: float | None) -> list[GatewayMessage]:
        """Every message that has arrived, also those that ``look`` has shown; when there is none, sleeps up to
        ``wait_s`` for the first (None: as long as it takes). Raises GatewayGone, EngineError."""
        messages, self._seen = self._seen, []
        if self._failure is not None:
            raise self._failure
        if not messages and wait_s != 0:
            # select, since poll rounds to milliseconds and a merge window may be much shorter
            select.select([self._socket], [], [], wait_s)
        messages += self._read()
        while not messages and wait_s is None:  # a part of a frame
            messages += self._read(at_least_once=True)
        return messages

    def look(self) -> list[GatewayMessage]:
        """Messages that have arrived and were not shown yet; ``receive`` gives them again. Never raises: what went
        wrong is raised by ``receive``."""
        if self._failure is not None:
            return []
        try:
            fresh = self._read()
        except (GatewayGone, EngineError) as error:
            self._failure = error
            return []
        self._seen += fresh
        return fresh

    def _read(self, *, at_least_once: bool = False) -> list[GatewayMessage]:
        messages: list[GatewayMessage] = []
        while at_least_once or self._arrived.poll(0):
            at_least_once = False
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except ConnectionError as error:
                raise GatewayGone from error
            if not data:
                raise GatewayGone
            messages.extend(framing.decode_for_engine(body) for body in self._frames.feed(data))
            if messages and len(data) < _RECEIVE_BYTES:
                break
        return messages

    def send(self, message: EngineMessage) -> None:
        """Send one message, waiting while the gateway is slow to read. Raises GatewayGone."""
        frame = framing.encode(message)
        try:
            self._socket.sendall(frame)
        except ConnectionError as error:
            raise GatewayGone from error
