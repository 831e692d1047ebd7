"""KV of sequences that gave up their stream, kept in host memory, or in files, until they get another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.engines.llama.convert_state import MemoryFormat, converted
from headrace.engines.llama.stream_state import retarget
from headrace.kv.account import KvPlace
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


class Spill(Protocol):
    """Where parked states go when memory for them is full (``engines.llama.spill.SpillStore``)."""

    @property
    def bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __contains__(self, request_id: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def size(self, request_id: str) -> int: ...

    def tokens(self, request_id: str) -> int: ...

    def read_s(self, request_id: str) -> float: ...

    def put(self, request_id: str, state: ParkedState) -> bool: ...

    def take(self, request_id: str) -> ParkedState | None: ...

    def drop(self, request_id: str) -> None: ...

    def settle(self) -> list[str]: ...

    def check_integrity(self) -> str | None: ...

    def close(self) -> None: ...


class Parking:
    """Parked states by request id: at most ``limit_bytes`` in host memory (None: no limit), the coldest beyond that in
    ``spill``, and those that find no place there dropped, to be computed again.

    The coldest is the one with the highest rank (``scheduling.order``): it comes back last.
    """

    def __init__(self, limit_bytes: int | None = None, spill: Spill | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._spill = spill
        self._states: dict[str, ParkedState] = {}
        self._ranks: dict[str, float] = {}
        self._bytes = 0
        self.spilled = 0
        """States that went on to a file, since the beginning."""
        self.dropped = 0
        """States that are lost and computed again: no room anywhere, not written, or damaged."""

    def __len__(self) -> int:
        return len(self._states) + (0 if self._spill is None else len(self._spill))

    @property
    def bytes(self) -> int:
        """Host memory that parked states take, besides those that are just being written."""
        return self._bytes

    @property
    def disk_bytes(self) -> int:
        """What parked states take in files."""
        return 0 if self._spill is None else self._spill.bytes

    @property
    def on_disk(self) -> int:
        """How many parked states are in files."""
        return 0 if self._spill is None else len(self._spill)

    def park(self, request_id: str, state: ParkedState, rank_s: float = 0.0, *, to_disk: bool = False) -> list[str]:
        """Keep ``state``; ``to_disk``: in a file, and in memory only where files have no room. Returns the requests,
        perhaps this one, whose state had to be dropped for it: their tokens must be computed again. Raises ValueError
        when ``request_id`` is parked already."""
        if self.tokens(request_id) is not None:
            raise ValueError(f"{request_id} is parked already")
        if to_disk and self._spill is not None and self._spill.put(request_id, state):
            self.spilled += 1
            return []
        self._states[request_id] = state
        self._ranks[request_id] = rank_s
        self._bytes += len(state.data)
        dropped: list[str] = []
        while self.limit_bytes is not None and self._bytes > self.limit_bytes:
            coldest = max(self._states, key=lambda name: (self._ranks[name], name))
            cold = self._pop(coldest)
            if self._spill is not None and self._spill.put(coldest, cold):
                self.spilled += 1
            else:
                dropped.append(coldest)
        self.dropped += len(dropped)
        return dropped

    def settle(self) -> list[str]:
        """Requests whose state was lost since the last call because its file could not be written: their tokens must
        be computed again. To be called before every step; does not wait."""
        lost = [] if self._spill is None else self._spill.settle()
        self.dropped += len(lost)
        return lost

    def tokens(self, request_id: str) -> int | None:
        """Tokens that are parked of ``request_id``; None when nothing is."""
        state = self._states.get(request_id)
        if state is not None:
            return state.tokens
        if self._spill is not None and request_id in self._spill:
            return self._spill.tokens(request_id)
        return None

    def read_s(self, request_id: str) -> float:
        """Predicted time to have a parked state in memory; 0 when it is there."""
        return self._spill.read_s(request_id) if self._spill is not None and request_id in self._spill else 0.0

    def get(self, request_id: str) -> ParkedState | None:
        """The state, which stays parked, in memory from now on; None when nothing of ``request_id`` is, or no longer:
        its file was damaged."""
        if self._spill is not None and request_id in self._spill:
            state = self._spill.take(request_id)
            if state is None:
                self.dropped += 1
                return None
            # For as long as it takes to put it into a stream, beyond the limit perhaps.
            self._states[request_id], self._ranks[request_id] = state, 0.0
            self._bytes += len(state.data)
        return self._states.get(request_id)

    def drop(self, request_id: str) -> None:
        """Forget what is parked of ``request_id``, if anything."""
        if request_id in self._states:
            self._pop(request_id)
        elif self._spill is not None:
            self._spill.drop(request_id)

    def _pop(self, request_id: str) -> ParkedState:
        del self._ranks[request_id]
        state = self._states.pop(request_id)
        self._bytes -= len(state.data)
        return state

    def places(self) -> Iterator[tuple[str, KvPlace, int, int]]:
        """Of every parked state: request id, where it is, tokens, bytes."""
        for request_id, state in self._states.items():
            yield request_id, "ram", state.tokens, len(state.data)
        for request_id in self._spill or ():
            assert self._spill is not None
            yield request_id, "disk", self._spill.tokens(request_id), self._spill.size(request_id)

    def close(self) -> None:
        """Forget everything, files too."""
        self._states.clear()
        self._ranks.clear()
        self._bytes = 0
        if self._spill is not None:
            self._spill.close()

    def check_integrity(self, waiting_tokens: Mapping[str, int]) -> str | None:
        """None when exactly the waiting sequences with computed tokens (``waiting_tokens``: request id -> computed
        tokens) are parked, each with as many, within the limits; else what is wrong."""
        for request_id, tokens in waiting_tokens.items():
            parked = self.tokens(request_id) or 0
            if parked != tokens:
                return f"{request_id} waits with {tokens} tokens computed, {parked} are parked"
        in_files = () if self._spill is None else self._spill
        for request_id in (*self._states, *in_files):
            if request_id not in waiting_tokens:
                return f"{request_id} is parked but does not wait"
        if self._states.keys() != self._ranks.keys() or self._states.keys() & set(in_files):
            return "parked states are counted differently"
        held = sum([len(state.data) for state in self._states.values()])
        if held != self._bytes:
            return f"{self._bytes} parked bytes counted, {held} there"
        if self.limit_bytes is not None and held > self.limit_bytes:
            return f"{held} bytes are parked, the limit is {self.limit_bytes}"
        return None if self._spill is None else self._spill.check_integrity()
