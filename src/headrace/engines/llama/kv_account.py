"""The engine's account of where KV is (``kv.account``), made from those who hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from headrace.engines.llama.residents import Residents
from headrace.engines.llama.tiering import Tiering
from headrace.kv.account import KvAccount, KvHolding, KvLimits, KvPlace
from headrace.kv.sources import SourceTimes
from headrace.kv.tiers.families import together
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.scheduling.sequence import Slot

MOST_FAMILIES: Final = 100
"""Of stored blocks, in each place: the account is sent over a socket."""


def kv_limits(residents: Residents, token_bytes: Sequence[int]) -> KvLimits:
    """What streams, parking and the stores hold at most."""
    limits: dict[KvPlace, int | None] = {"ram": residents.parking.limit_bytes}
    if residents.tiering is not None:
        store = residents.tiering.tiers.store
        limits |= {"stored_ram": store.ram_quota_bytes, "stored_disk": store.disk_quota_bytes}
    streams = [(band.max_context_tokens, band.max_sequences) for band in residents.bands]
    return KvLimits(streams, token_bytes, limits)


def kv_account(residents: Residents, times: SourceTimes, token_bytes: Sequence[int]) -> KvAccount:
    """Every holding at the moment. Streams of running sequences count what is computed, which may be a part of a block
    more than what others can find of it. ``token_bytes``: KV bytes of a token in each band."""
    reuse, parking = residents.reuse, residents.parking
    holdings: list[KvHolding] = []
    owned: set[Slot] = set()
    for request_id, sequence in residents.running.items():
        slot, tokens = sequence.state.slot, sequence.state.computed_tokens
        assert slot is not None
        owned.add(slot)
        holdings.append(_stream(slot, tokens, reuse.shared_tokens(slot), token_bytes[slot.band], times, (request_id,)))
    for slot, tokens in reuse.held():
        if slot not in owned and tokens:
            holdings.append(_stream(slot, tokens, reuse.shared_tokens(slot), token_bytes[slot.band], times))
    for request_id, place, tokens, size in parking.places():
        restore_s = parking.read_s(request_id) + times.restore_s(tokens)
        compute_s = times.compute_s(0, tokens)
        holdings.append(
            KvHolding(
                request_id,
                place,
                tokens,
                size,
                (request_id,),
                restore_s=min(restore_s, compute_s),
                compute_s=compute_s,
            )
        )
    if residents.tiering is not None:
        holdings += _stored(residents.tiering)
    return KvAccount(holdings)


def _stored(tiering: Tiering) -> list[KvHolding]:
    """Stored blocks, by the first block of their sequences: the largest ones of each place, and all others together."""
    found: list[KvHolding] = []
    families = list(tiering.tiers.families())
    places: tuple[tuple[Literal["ram", "disk"], KvPlace], ...] = (("ram", "stored_ram"), ("disk", "stored_disk"))
    for tier, place in places:
        here = sorted([family for family in families if family.tier == tier], key=lambda family: -family.bytes)
        for family in [*here[:MOST_FAMILIES], *together(here[MOST_FAMILIES:])]:
            tokens = family.blocks * KV_BLOCK_TOKENS
            found.append(
                KvHolding(
                    family.name,
                    place,
                    tokens,
                    family.bytes,
                    restore_s=family.load_s,
                    compute_s=family.compute_s,
                )
            )
    return found


def _stream(
    slot: Slot, tokens: int, shared: int, bytes_per_token: int, times: SourceTimes, users: tuple[str, ...] = ()
) -> KvHolding:
    """What is in a stream is there already, and can be carried to another one."""
    return KvHolding(
        f"{slot.band}.{slot.stream}",
        "live" if users else "idle",
        tokens,
        tokens * bytes_per_token,
        users,
        band=slot.band,
        shared_tokens=min(shared, tokens),
        restore_s=0.0 if not users else times.carry_s(tokens),
        compute_s=times.compute_s(0, tokens),
    )
