"""Which beginnings of prompts a replica has KV of, and where: accelerator memory first, slower tiers behind it.

A prompt is a row of blocks, each named so that two prompts share a name exactly where they share all tokens up to
there: a trace names its blocks itself, a workload's shared prefix and a conversation's history are cut into blocks of
``KV_BLOCK_TOKENS``. A block lives in one tier; the one that was used longest ago makes room and moves to the next
tier, or is gone from the last. A block is only used when every block before it is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from headrace.bench.planned import PlannedRequest
from headrace.kv.sources import SourceTimes
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.simulate.fleet.scenario import Tier

Block = Hashable


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's blocks, ``block_tokens`` each, of which others may have some too."""

    blocks: tuple[Block, ...] = ()
    block_tokens: int = KV_BLOCK_TOKENS


NO_BLOCKS = Prompt()


def prompt_of(planned: PlannedRequest, *, with_output: bool = False) -> Prompt:
    """The blocks of a request's prompt, ``with_output`` also those that a conversation's next turn will begin with."""
    prefix = planned.prefix
    if prefix is not None and prefix.hash_ids:
        return Prompt(tuple([("trace", block) for block in prefix.hash_ids]), prefix.block_tokens)
    if prefix is None and planned.session is None:
        return NO_BLOCKS
    blocks: list[Block] = []
    if prefix is not None:
        shared = min(prefix.tokens, planned.input_tokens) // KV_BLOCK_TOKENS
        blocks += [("prefix", prefix.key, number) for number in range(shared)]
    if planned.session is not None:
        tokens = planned.input_tokens + (planned.output_tokens if with_output else 0)
        blocks += [("session", planned.session, number) for number in range(len(blocks), tokens // KV_BLOCK_TOKENS)]
    return Prompt(tuple(blocks))


@dataclass(frozen=True, slots=True)
class Found:
    """Of a prompt: ``here_tokens`` are in accelerator memory, ``fetched_tokens`` after them in slower tiers, from
    which fetching them takes ``fetch_s``."""

    here_tokens: int = 0
    fetched_tokens: int = 0
    fetch_s: float = 0.0


class PrefixCache:
    """One replica's. ``room_tokens`` says how much accelerator memory running sequences leave it."""

    def __init__(self, room_tokens: Callable[[], int], tiers: Sequence[Tier], kv_bytes_per_token: int) -> None:
        self._room_tokens = room_tokens
        self._sizes = [0, *[tier.tokens for tier in tiers]]
        self._s_per_token = [0.0, *[kv_bytes_per_token / (tier.gb_per_s * 1e9) for tier in tiers]]
        self._held: list[OrderedDict[Block, int]] = [OrderedDict() for _ in self._sizes]
        self._tokens = [0] * len(self._sizes)
        self.asked_tokens = 0
        self.hit_tokens = 0

    def tokens(self, tier: int) -> int:
        """Tokens that a tier holds; 0 is accelerator memory."""
        return self._tokens[tier]

    def cached_tokens(self, prompt: Prompt) -> int:
        """How much of a prompt's beginning is here, in whichever tier. Changes nothing."""
        count = 0
        for block in prompt.blocks:
            if self._tier_of(block) is None:
                break
            count += 1
        return count * prompt.block_tokens

    def find(self, prompt: Prompt, prompt_tokens: int, times: SourceTimes) -> Found:
        """What a prompt of ``prompt_tokens`` begins with. Slower tiers give what is there only as far as fetching it
        takes less time than computing it (a cache can be slower than recomputing). The prompt's last token is always
        computed."""
        self.asked_tokens += prompt_tokens
        most = max(0, prompt_tokens - 1)
        here = fetched = 0
        fetch_s = 0.0
        for block in prompt.blocks:
            tier = self._tier_of(block)
            if tier is None or here + fetched + prompt.block_tokens > most:
                break
            if tier == 0 and not fetched:
                here += prompt.block_tokens
            else:
                fetched += prompt.block_tokens
                fetch_s += prompt.block_tokens * self._s_per_token[tier]
            self._held[tier].move_to_end(block)
        if fetched and fetch_s >= times.compute_s(here, here + fetched):
            fetched, fetch_s = 0, 0.0
        self.hit_tokens += here + fetched
        return Found(here, fetched, fetch_s)

    def store(self, prompt: Prompt) -> None:
        """All of these blocks are in accelerator memory now, as far as there is room."""
        for block in prompt.blocks:
            tier = self._tier_of(block)
            if tier is not None:
                self._tokens[tier] -= self._held[tier].pop(block)
            self._put(block, prompt.block_tokens, 0)
        self._make_room(0)

    def shrink(self) -> None:
        """Running sequences may need more memory than they did: give them what they take."""
        if self._tokens[0]:
            self._make_room(0)

    def clear(self) -> None:
        """The replica died: all is gone."""
        for held in self._held:
            held.clear()
        self._tokens = [0] * len(self._tokens)

    def check_integrity(self) -> str | None:
        """None when counts agree and no block is in two tiers; else what is wrong."""
        if self._tokens != [sum(held.values()) for held in self._held]:
            return "token counts and blocks do not agree"
        if len(set().union(*self._held)) != sum([len(held) for held in self._held]):
            return "a block is in two tiers"
        over = [tier for tier in range(1, len(self._sizes)) if self._tokens[tier] > self._sizes[tier]]
        return f"tiers {over} hold more than fits" if over else None

    def _tier_of(self, block: Block) -> int | None:
        for tier, held in enumerate(self._held):
            if block in held:
                return tier
        return None

    def _put(self, block: Block, tokens: int, tier: int) -> None:
        self._held[tier][block] = tokens
        self._tokens[tier] += tokens

    def _make_room(self, tier: int) -> None:
        """The blocks that were used longest ago go on to the next tier until the others fit."""
        size = self._room_tokens() if tier == 0 else self._sizes[tier]
        held = self._held[tier]
        moved = False
        while self._tokens[tier] > size and held:
            block, tokens = held.popitem(last=False)
            self._tokens[tier] -= tokens
            if tier + 1 < len(self._held):
                self._put(block, tokens, tier + 1)
                moved = True
        if moved:
            self._make_room(tier + 1)
