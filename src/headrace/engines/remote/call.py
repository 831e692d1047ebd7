"""One request to a remote server, from its first byte to the answer's last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace.engines.output_stream import OutputStream
from headrace.engines.remote.chunks import Piece, Usage, error_message, piece_of, read_chunk
from headrace.engines.remote.connection import Connection, Pool, post
from headrace.engines.remote.request_body import Dialect, compose
from headrace.engines.remote.sse import EventReader
from headrace.errors import RemoteFailure, RequestError
from headrace.messages.engine import FinishReason, SequenceOutput, Submit

_logger = logging.getLogger(__name__)

_MAX_ERROR_BYTES: Final = 64 * 1024
_CLIENT_FAULTS: Final = frozenset({400, 404, 413, 422})
_MAX_RETRY_AFTER_S: Final = 600.0
_END: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """Seconds: for a connection, from there to the first token, between two tokens, and for all of it."""

    connect_s: float = 5.0
    first_token_s: float = 60.0
    between_tokens_s: float = 30.0
    total_s: float = 1800.0


class Call:
    """Implements ``connection.Listener``: bytes come in, outputs go to ``stream``.

    A reader that is slow makes the connection wait (``OutputStream.bound``); time that it takes counts against no
    limit but ``total_s``.
    """

    def __init__(
        self,
        request: Submit,
        stream: OutputStream,
        pool: Pool,
        dialect: Dialect,
        timeouts: CallTimeouts,
        on_end: Callable[[Call], None],
        spawn: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.request = request
        self.stream = stream
        self._pool = pool
        self._dialect = dialect
        self._timeouts = timeouts
        self._on_end = on_end
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._message = b""
        self._fresh = True
        self._ended = False
        self._answered = False
        self._events = EventReader()
        self._status = 0
        self._streamed = False
        self._refusal = bytearray()
        self._retry_after_s: float | None = None
        self._usage: Usage | None = None
        self._finish: Piece | None = None
        self._done = False
        self._tokens = 0
        self._first = True
        self.begun = False
        """Whether a first token has come."""
        self._started_s = self._loop.time()
        self._sent_s = self._started_s
        self._last_s = self._started_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def context_tokens(self) -> int:
        """Prompt and answer so far, by headrace's count."""
        return self.request.prompt_count + self._tokens

    def start(self, headers: bytes) -> None:
        """Send the request; on a new connection when none is free."""
        if self.request.max_tokens == 0:
            self._end(SequenceOutput(self.request.request_id, finish="length", prompt_tokens=self.request.prompt_count))
            return
        try:
            path, body = compose(self.request, self._dialect)
        except RequestError as error:
            self._end(self._refused(400, str(error)))
            return
        identity = b"x-request-id: %b\r\naccept: text/event-stream\r\n" % self.request.request_id.encode(
            "ascii", "replace"
        )
        self._message = post(self._pool.address, path, headers + identity, body)
        self._timer = self._loop.call_later(self._timeouts.total_s, self._check_time)
        connection = self._pool.take()
        if connection is None:
            self._spawn(self._loop.create_task(self._connect()))
        else:
            self._fresh = False
            self._send(connection)

    def abort(self) -> None:
        """End it now; the reader gets an end with ``abort``."""
        self._end(SequenceOutput(self.request.request_id, finish="abort"))

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect()
        except RemoteFailure as error:
            self._end(error)
            return
        if self._ended:
            connection.release()
            return
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        self._sent_s = self._last_s = self._loop.time()
        self.stream.bound(self._pressed)
        self._arm()
        connection.send(self._message, self)

    # What the connection says:

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._answered = True
        self._status = status
        kind = headers.get(b"content-type", b"").lower()
        self._streamed = kind.startswith(b"text/event-stream")
        if status != 200:
            self._retry_after_s = _seconds(headers.get(b"retry-after"))
        elif not self._streamed:
            raise RemoteFailure("the engine answered with something that is no event stream", kind="junk")

    def body(self, piece: bytes) -> None:
        if self._status != 200:
            if len(self._refusal) < _MAX_ERROR_BYTES:
                self._refusal += piece[:_MAX_ERROR_BYTES]
            return
        for data in self._events.feed(piece):
            self._event(data)

    def ended(self, problem: RemoteFailure | None) -> None:
        if self._ended:
            return
        if problem is not None:
            if not self._fresh and not self._answered and problem.kind == "cut":
                # A kept connection that the server had closed meanwhile: nobody has seen the request.
                self._fresh = True
                self._connection = None
                self._spawn(self._loop.create_task(self._connect()))
                return
            self._end(problem)
        elif self._status != 200:
            self._end(self._not_ok())
        else:
            try:
                for data in self._events.finish():
                    self._event(data)
            except RemoteFailure as error:
                self._end(error)
                return
            if not self._ended:
                self._conclude()

    def _event(self, data: bytes) -> None:
        """One event. Raises RemoteFailure."""
        if self._ended or self._done:
            return
        if data == _END:
            self._done = True
            return
        chunk = read_chunk(data)
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            piece = piece_of(choice)
            if piece is not None:
                self._take(piece)

    def _take(self, piece: Piece) -> None:
        if self._finish is not None:
            return
        if piece.finish is not None:
            self._finish = piece
        if not (piece.text or piece.delta or piece.token_ids):
            return
        self._last_s = self._loop.time()
        ids = piece.token_ids
        count = len(ids) or 1
        self._tokens += count
        first = self._first
        self._first = False
        self.begun = True
        self.stream.push(
            SequenceOutput(
                self.request.request_id,
                piece.text,
                ids,
                piece.logprobs,
                None,
                None,
                None,
                None,
                self.request.prompt_count if first else 0,
                0,
                max(0.0, self._sent_s - self.request.arrived_s) if first else None,
                0 if ids else 1,
                piece.delta,
            )
        )

    def _conclude(self) -> None:
        """The response is whole: is the answer?"""
        finish, usage = self._finish, self._usage
        reason: FinishReason
        if finish is not None and finish.finish is not None:
            reason = finish.finish
        elif self._done and self.begun:
            reason = "stop"
        else:
            self._end(RemoteFailure("the engine's answer ended early", kind="cut"))
            return
        if reason == "error":
            self._end(RemoteFailure("the engine gave the request up", kind="cut"))
            return
        request = self.request
        counted = 0 if usage is None else usage.completion_tokens or 0
        first = self._first
        self._end(
            SequenceOutput(
                request_id=request.request_id,
                finish=reason,
                stop_reason=None if finish is None else finish.stop_reason,
                prompt_tokens=usage.prompt_tokens if usage is not None else request.prompt_count,
                cached_tokens=0 if usage is None else usage.cached_tokens,
                queue_wait_s=max(0.0, self._sent_s - request.arrived_s) if first else None,
                more_tokens=max(0, counted - self._tokens),
            )
        )

    def _not_ok(self) -> SequenceOutput | RemoteFailure:
        message = error_message(bytes(self._refusal))
        status = self._status
        if status in _CLIENT_FAULTS:
            return self._refused(status, message)
        if status in (429, 503):
            return RemoteFailure("the engine has no room", kind="busy", retry_after_s=self._retry_after_s)
        _logger.warning("request %s: the engine answers %d: %s", self.request.request_id, status, message)
        return RemoteFailure(f"the engine answered with status {status}", kind="status")

    def _refused(self, status: int, message: str) -> SequenceOutput:
        return SequenceOutput(self.request.request_id, finish="error", error=message, refused_status=status)

    def _end(self, last: SequenceOutput | RemoteFailure) -> None:
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, self._connection = self._connection, None
        if connection is not None and connection.listener is self:
            connection.abort()
        self._on_end(self)
        self.stream.push(last)

    def _pressed(self, pressed: bool) -> None:
        if self._connection is not None and self._connection.listener is self:
            self._connection.pause(pressed)
        self._last_s = self._loop.time()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due_s(), self._check_time)

    def _due_s(self) -> float:
        limits = self._timeouts
        total_s = self._started_s + limits.total_s
        if self.stream.pressed:
            return min(total_s, self._loop.time() + limits.between_tokens_s)
        step_s = self._last_s + limits.between_tokens_s if self.begun else self._sent_s + limits.first_token_s
        return min(total_s, step_s)

    def _check_time(self) -> None:
        """A limit may have passed: the timer is set anew only here, not with each token."""
        now_s = self._loop.time()
        if self._due_s() > now_s:
            self._arm()
            return
        limits = self._timeouts
        if now_s >= self._started_s + limits.total_s:
            self._end(RemoteFailure(f"the answer was not whole within {limits.total_s:g} s", kind="timeout"))
        elif self.begun:
            message = f"the engine sent no token for {limits.between_tokens_s:g} s"
            self._end(RemoteFailure(message, kind="timeout"))
        else:
            self._end(
                RemoteFailure(f"the engine sent no first token within {limits.first_token_s:g} s", kind="timeout")
            )


def _seconds(header: bytes | None) -> float | None:
    try:
        return None if header is None else min(_MAX_RETRY_AFTER_S, max(0.0, float(header)))
    except ValueError:
        return None
