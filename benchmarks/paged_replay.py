"""A replay of requests by the rules of vLLM's V1 scheduler, with KV blocks one by one.

Small and apart from the simulator: what it adds is the block pool, so that a preempted request finds what is left of
its blocks when it comes back, as vLLM's prefix cache lets it. Running requests catch up first, in the order in which
they entered; who finds no block takes those of the one that entered last; in a step without such a preemption waiting
ones enter, each only if its whole prompt fits, within ``step_tokens``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.simulate.hardware.work import Chunk, Work


@dataclass
class Replayed:
    """One request: its trace, and when it got what."""

    name: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    known_tokens: int = 0
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    preempted: int = 0


class BlockPool:
    """Blocks of KV; free ones keep what they held until they are taken again, the one freed first."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._held: dict[int, tuple[str, int]] = {}
        self._where: dict[tuple[str, int], int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, request: Replayed, tokens: int) -> int:
        """More blocks for a request that is to have ``tokens`` in all."""
        return max(0, -(-tokens // self.block_tokens) - len(request.blocks))

    def grow(self, request: Replayed, tokens: int) -> bool:
        """Blocks up to ``tokens``; False, and nothing taken, where there are too few."""
        needed = self.needed(request, tokens)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            block, _ = self._free.popitem(last=False)
            before = self._held.pop(block, None)
            if before is not None:
                del self._where[before]
            request.blocks.append(block)
        return True

    def release(self, request: Replayed) -> None:
        """All of a request's blocks, its last first; full ones can be found again."""
        for index in range(len(request.blocks) - 1, -1, -1):
            block = request.blocks[index]
            if (index + 1) * self.block_tokens <= request.computed_tokens:
                self._held[block] = (request.name, index)
                self._where[(request.name, index)] = block
            self._free[block] = None
        request.blocks = []

    def found(self, request: Replayed) -> list[int]:
        """Blocks of the request that are still there, from its first on, short of its last token."""
        blocks: list[int] = []
        for index in range((request.known_tokens - 1) // self.block_tokens):
            block = self._where.get((request.name, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take_back(self, request: Replayed, blocks: Sequence[int]) -> None:
        """Blocks that were found."""
        for block in blocks:
            del self._free[block]
            del self._where[self._held.pop(block)]
        request.blocks = list(blocks)
        request.computed_tokens = len(blocks) * self.block_tokens


@dataclass(frozen=True)
class Limits:
    """vLLM's own: ``max_num_batched_tokens``, ``max_num_seqs``, blocks and their size."""

    blocks: int
    block_tokens: int = 16
    step_tokens: int = 2048
    sequences: int = 256


def replay(requests: Sequence[Replayed], limits: Limits, pass_s: Callable[[Work], float]) -> int:
    """Serve all of them; their times are in them afterwards. Returns the number of preemptions."""
    pool = BlockPool(limits.blocks, limits.block_tokens)
    coming = deque(sorted(requests, key=lambda request: request.arrived_s))
    waiting: deque[Replayed] = deque()
    running: list[Replayed] = []
    now_s, preemptions = 0.0, 0
    for request in coming:
        request.known_tokens = request.prompt_tokens
    while coming or waiting or running:
        if not waiting and not running:
            now_s = max(now_s, coming[0].arrived_s)
        while coming and coming[0].arrived_s <= now_s:
            waiting.append(coming.popleft())
        parts, victims = _schedule(pool, waiting, running, limits)
        preemptions += victims
        if not parts:
            raise RuntimeError("a request does not fit into all blocks")
        decodes = [request for request, tokens in parts if tokens == 1]
        chunks = tuple([Chunk(request.computed_tokens, tokens) for request, tokens in parts if tokens > 1])
        now_s += pass_s(Work(len(decodes), sum([request.computed_tokens for request in decodes]), chunks))
        for request, tokens in parts:
            request.computed_tokens += tokens
            if request.computed_tokens < request.known_tokens:
                continue
            request.known_tokens += 1
            request.last_token_s = now_s
            if request.known_tokens == request.prompt_tokens + 1:
                request.first_token_s = now_s
            if request.known_tokens == request.prompt_tokens + request.output_tokens:
                pool.release(request)
                running.remove(request)
    return preemptions


def _schedule(
    pool: BlockPool, waiting: deque[Replayed], running: list[Replayed], limits: Limits
) -> tuple[list[tuple[Replayed, int]], int]:
    budget, victims, place = limits.step_tokens, 0, 0
    parts: list[tuple[Replayed, int]] = []
    while place < len(running) and budget > 0:
        request = running[place]
        tokens = min(request.known_tokens - request.computed_tokens, budget)
        while not pool.grow(request, request.computed_tokens + tokens):
            victim = running.pop()
            pool.release(victim)
            victim.computed_tokens = 0
            victim.preempted += 1
            victims += 1
            waiting.appendleft(victim)
            if victim is request:
                return parts, victims
        parts.append((request, tokens))
        budget -= tokens
        place += 1
    while not victims and waiting and budget > 0 and len(running) < limits.sequences:
        request = waiting[0]
        found = pool.found(request)
        whole = -(-request.known_tokens // limits.block_tokens) - len(found)
        if whole > pool.free - len(found):
            break
        pool.take_back(request, found)
        tokens = min(request.known_tokens - request.computed_tokens, budget)
        pool.grow(request, request.computed_tokens + tokens)
        waiting.popleft()
        running.append(request)
        parts.append((request, tokens))
        budget -= tokens
    return parts, victims
