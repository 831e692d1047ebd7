"""KV of sequences that gave up their stream, kept in host memory until they get another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engines.llama.convert_state import MemoryFormat, converted
from headrace.engines.llama.stream_state import retarget
from headrace.kv.precision import KvDtype


@dataclass(frozen=True, slots=True)
class ParkedState:
    """A stream's state as libllama wrote it: stream ``stream`` of a context with ``streams`` streams held ``tokens``
    cells at ``dtype``. ``precision`` is the coarsest that its numbers went through."""

    data: bytearray | memoryview
    stream: int
    streams: int
    tokens: int
    dtype: KvDtype = "f16"
    precision: KvDtype = "f16"

    def for_context(self, streams: int) -> bytearray | memoryview | None:
        """The bytes that a context with ``streams`` streams reads into any of them; None when the state does not have
        the shape that can be rewritten."""
        if streams == self.streams:
            return self.data
        return retarget(
            self.data, stream=self.stream, source_streams=self.streams, target_streams=streams, tokens=self.tokens
        )

    def converted_for(
        self, streams: int, source: MemoryFormat | None, target: MemoryFormat | None
    ) -> bytearray | memoryview | None:
        """The same for a context of another precision; ``source`` and ``target`` are how the two contexts keep KV
        (None: not known)."""
        if source is None or target is None:
            return None
        return converted(
            self.data,
            source,
            target,
            stream=self.stream,
            source_streams=self.streams,
            target_streams=streams,
            tokens=self.tokens,
        )


class Parking:
    """Parked states by request id."""

    def __init__(self) -> None:
        self._states: dict[str, ParkedState] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def bytes(self) -> int:
        """Host memory that parked states take."""
        return sum([len(state.data) for state in self._states.values()])

    def park(self, request_id: str, state: ParkedState) -> None:
        """Keep ``state``. Raises ValueError when ``request_id`` is parked already."""
        if request_id in self._states:
            raise ValueError(f"{request_id} is parked already")
        self._states[request_id] = state

    def get(self, request_id: str) -> ParkedState | None:
        """The state, which stays parked; None when nothing of ``request_id`` is."""
        return self._states.get(request_id)

    def take(self, request_id: str) -> ParkedState | None:
        """Hand the state out and forget it; None when nothing of ``request_id`` is parked."""
        return self._states.pop(request_id, None)

    def check_integrity(self, waiting_tokens: Mapping[str, int]) -> str | None:
        """None when exactly the waiting sequences with computed tokens (``waiting_tokens``: request id -> computed
        tokens) are parked, each with as many; else what is wrong."""
        for request_id, tokens in waiting_tokens.items():
            state = self._states.get(request_id)
            parked = 0 if state is None else state.tokens
            if parked != tokens:
                return f"{request_id} waits with {tokens} tokens computed, {parked} are parked"
        for request_id in self._states:
            if request_id not in waiting_tokens:
                return f"{request_id} is parked but does not wait"
        return None
