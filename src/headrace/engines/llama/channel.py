"""The engine process's end of the socket to the gateway."""

from __future__ import annotations

import select
import socket

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
        # Asking first costs less than the exception of a read that would block, which is the usual case.
        self._arrived = select.poll()
        self._arrived.register(connection, select.POLLIN)

    def receive(self, *, wait: bool) -> list[GatewayMessage]:
        """Every message that has arrived; with ``wait`` sleeps until there is one. Raises GatewayGone."""
        messages: list[GatewayMessage] = []
        while (wait and not messages) or self._arrived.poll(0):
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
