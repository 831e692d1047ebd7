"""One account of where KV is: who holds it, where, how much of it, who uses it, and what it costs to bring back.

It is a view, made from the state holders when somebody asks (``engines.llama.kv_account``): an account kept beside them
would cost every step something, and could differ from them. ``check_integrity`` says whether what they say is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec import Struct

from headrace.kv.token_blocks import KV_BLOCK_TOKENS

KvPlace = Literal["live", "idle", "ram", "disk", "stored_ram", "stored_disk"]
"""A stream that somebody runs in; a stream that keeps what an ended sequence left; host memory or a file for somebody
who is parked; host memory or files for blocks that nobody uses at the moment (``kv.tiers``)."""
PLACES: Final[tuple[KvPlace, ...]] = ("live", "idle", "ram", "disk", "stored_ram", "stored_disk")
IN_STREAMS: Final[tuple[KvPlace, ...]] = ("live", "idle")
OF_NOBODY: Final[tuple[KvPlace, ...]] = ("idle", "stored_ram", "stored_disk")


class KvHolding(Struct, frozen=True):
    """The KV of one sequence's first ``tokens`` tokens in one place, ``bytes`` there; of stored blocks, all those whose
    sequences have the same first block. ``name`` is the place's name for it: ``band.stream``, the id of the request
    that is parked, or the beginning of that first block's address. ``users`` are the requests whose KV it is (none:
    kept for whoever comes). ``shared_tokens`` of it are in whole blocks that another stream holds too. ``restore_s`` is
    the predicted time to have it in a stream again, ``compute_s`` that to compute it anew."""

    name: str
    place: KvPlace
    tokens: int
    bytes: int
    users: tuple[str, ...] = ()
    band: int | None = None
    shared_tokens: int = 0
    restore_s: float = 0.0
    compute_s: float = 0.0

    @property
    def blocks(self) -> int:
        """KV blocks, the last one perhaps not full."""
        return -(-self.tokens // KV_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class PlaceTotal:
    """Sums over one place."""

    holdings: int = 0
    tokens: int = 0
    bytes: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class KvLimits:
    """What each place holds at most. ``stream_tokens`` by band; None where there is no limit."""

    stream_tokens: Sequence[tuple[int, int]]
    """Per band: tokens of a stream, and how many streams."""
    token_bytes: Sequence[int]
    """Per band: KV bytes of a token."""
    bytes: Mapping[KvPlace, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvAccount:
    """Every holding."""

    holdings: Sequence[KvHolding]

    def total(self, place: KvPlace) -> PlaceTotal:
        """Sums over a place."""
        return _sum([holding for holding in self.holdings if holding.place == place])

    def used_by(self, request_id: str) -> list[KvHolding]:
        """Where the KV of a request is."""
        return [holding for holding in self.holdings if request_id in holding.users]

    def waste_ratio(self, limits: KvLimits) -> float:
        """Of the cells of streams in which somebody runs, the share that holds nothing. 0 when nobody runs."""
        cells = used = 0
        for holding in self.holdings:
            if holding.place == "live" and holding.band is not None:
                cells += limits.stream_tokens[holding.band][0]
                used += holding.tokens
        return 1 - used / cells if cells else 0.0

    def check_integrity(self, limits: KvLimits) -> str | None:
        """None when the account is possible; else what is wrong."""
        seen: set[tuple[str, str]] = set()
        users: dict[str, KvPlace] = {}
        streams = [0] * len(limits.stream_tokens)
        for holding in self.holdings:
            problem = _holding_problem(holding, limits)
            if problem is not None:
                return problem
            key = (holding.name, _kind(holding.place))
            if key in seen:
                return f"{holding.name} is accounted for twice"
            seen.add(key)
            if holding.band is not None:
                streams[holding.band] += 1
            for user in holding.users:
                if user in users:
                    return f"{user} has KV in two places: {users[user]} and {holding.place}"
                users[user] = holding.place
        for band, (used, (_, there)) in enumerate(zip(streams, limits.stream_tokens, strict=True)):
            if used > there:
                return f"band {band} has {there} streams, {used} hold something"
        for place, most in limits.bytes.items():
            held = self.total(place).bytes
            if most is not None and held > most:
                return f"{held} bytes are in {place}, which holds {most}"
        return None


def _kind(place: KvPlace) -> str:
    """Names are of one holding among streams, among the parked, and in each store."""
    return "stream" if place in IN_STREAMS else place if place in OF_NOBODY else "parked"


def _holding_problem(holding: KvHolding, limits: KvLimits) -> str | None:
    if holding.tokens < 0 or holding.bytes < 0:
        return f"{holding.name} has {holding.tokens} tokens in {holding.bytes} bytes"
    if not 0 <= holding.shared_tokens <= holding.tokens:
        return f"{holding.name} shares {holding.shared_tokens} of {holding.tokens} tokens"
    if holding.place in IN_STREAMS:
        if holding.band is None or not 0 <= holding.band < len(limits.stream_tokens):
            return f"{holding.name} is in a stream of no band"
        most = limits.stream_tokens[holding.band][0]
        if holding.tokens > most:
            return f"{holding.name} has {holding.tokens} tokens in a stream of {most}"
        if holding.bytes != holding.tokens * limits.token_bytes[holding.band]:
            return f"{holding.name} has {holding.bytes} bytes for {holding.tokens} tokens"
    elif holding.band is not None:
        return f"{holding.name} is in {holding.place} and in band {holding.band} at once"
    if holding.place in OF_NOBODY and holding.users:
        return f"{holding.name} is {holding.place} and used by {holding.users[0]}"
    if holding.place not in OF_NOBODY and len(holding.users) != 1:
        return f"{holding.name} is {holding.place} and has {len(holding.users)} users"
    return None


def _sum(holdings: Iterable[KvHolding]) -> PlaceTotal:
    count = tokens = size = blocks = 0
    for holding in holdings:
        count += 1
        tokens += holding.tokens
        size += holding.bytes
        blocks += holding.blocks
    return PlaceTotal(count, tokens, size, blocks)
