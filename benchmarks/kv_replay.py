"""A trace of conversations, replayed on the stores' own policies: what is found again, beside an ideal cache.

Nothing is computed: ``kv.tiers.block_store`` decides, the clock is the trace's, and blocks have a size but no bytes. A
request asks for its prompt's whole blocks of 128 tokens, which follow from the trace's ``hash_ids`` (blocks of 512 are
four each); when it has begun, its blocks are stored. It is as if answers took no time: what two requests at once have
in common counts as found by the second. Contexts over 8,192 tokens come in packed, others are packed when they are
cold.

The ideal cache of the same size has all blocks packed, and lets go what is asked for last (Belady). Sizes are shares
of the F16 bytes of all contexts of the trace, each request's for itself. How large packed and 8-bit blocks are is
measured on KV that SmolLM2 computes of this documentation.

``hot``: of what a returning session (one with at least two blocks of 512 tokens of an earlier request: the first one is
everybody's in the conversation trace) could find if nothing was ever let go, the share that is found in RAM. ``--from``
and ``--to`` say which part of the trace is counted; all before it is replayed.
"""

from __future__ import annotations

import argparse
import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import gguf.quants
import numpy as np

from benchmarks.harness import report
from benchmarks.kv_tiers import Setting, ask, read_pages
from headrace.bench.load.traces.reading import TraceFile
from headrace.engines.llama.build import build
from headrace.engines.llama.state_blocks import split_state
from headrace.engines.llama.threads import usable_cores
from headrace.kv.sources import SourceTimes
from headrace.kv.tiers.block_store import USES_FOR_DISK, BlockStore
from headrace.kv.tiers.block_tree import BlockKind, BlockNode, DiskRecord
from headrace.kv.tiers.codec import Codec, Payload, pack
from headrace.kv.tiers.kv_tiers import COLD_AFTER_S
from headrace.kv.tiers.planes import Bytes, Run
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.messages.engine import Start
from headrace.models.store import resolve
from headrace.scheduling.cost import CostModel
from headrace.scheduling.sequence import Slot

Q8_0 = gguf.GGMLQuantizationType.Q8_0
Q8_0_UNIT_BYTES = 34
ROOT = b"r" * 32
RAW_BLOCK_BYTES = 1 << 20
"""Of the replay's blocks in F16: only shares are reported."""
PACKED_FROM_TOKENS = 8192
DISK_LOAD_S = 0.01
"""A block of some MB from a disk of some 300 MB/s."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: when it comes, and its whole blocks. ``known``: how many of them some earlier one had; ``returning``:
    more than the beginning that all share."""

    at_s: float
    blocks: tuple[int, ...]
    known: int
    returning: bool


@dataclass(frozen=True, slots=True)
class Form:
    """How KV is kept. ``loose`` and ``packed`` are bytes of a block as it comes in and after packing, as shares of its
    F16 bytes."""

    name: str
    loose: float
    packed: float


@dataclass(slots=True)
class Found:
    """In blocks of 128 tokens. ``most_bytes``: what both stores held at their fullest."""

    asked: int = 0
    hits: int = 0
    returning_known: int = 0
    returning_hot: int = 0
    most_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Of all blocks that were asked for."""
        return self.hits / max(1, self.asked)

    @property
    def hot_rate(self) -> float:
        """Of what returning sessions could find, what they found in RAM."""
        return self.returning_hot / max(1, self.returning_known)


def read_trace(path: Path, share: float) -> list[Request]:
    """The requests of ``share`` of all conversations, whole ones."""
    requests: list[Request] = []
    seen: set[int] = set()
    for row in TraceFile(path):
        ids = row.hash_ids
        conversation = ids[1] if len(ids) > 1 else len(requests)
        if zlib.crc32(conversation.to_bytes(8, "little")) >= share * 2**32:
            continue
        each = row.block_tokens // KV_BLOCK_TOKENS
        whole = row.input_tokens // KV_BLOCK_TOKENS
        blocks = tuple([each * number + part for number in ids for part in range(each)][:whole])
        known = 0
        while known < len(blocks) and blocks[known] in seen:
            known += 1
        seen.update(blocks)
        requests.append(Request(row.at_ns / 1e9, blocks, known, known >= 2 * each))
    return requests


def ideal_hits(requests: Sequence[Request], blocks: int, counted: range) -> int:
    """Hits, in the ``counted`` requests, of a cache of so many blocks that knows what comes."""
    asked = [(number, block) for number, request in enumerate(requests) for block in request.blocks]
    never = len(asked)
    following = [never] * len(asked)
    latest: dict[int, int] = {}
    for place in range(len(asked) - 1, -1, -1):
        following[place] = latest.get(asked[place][1], never)
        latest[asked[place][1]] = place
    cache: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for place, (number, block) in enumerate(asked):
        hits += block in cache and number in counted
        cache[block] = following[place]
        heapq.heappush(heap, (-following[place], block))
        while len(cache) > blocks:
            until, least = heapq.heappop(heap)
            if cache.get(least) == -until:
                del cache[least]
    return hits


@dataclass(slots=True)
class Replay:
    """One run over the stores."""

    form: Form
    store: BlockStore
    kind: BlockKind = field(default_factory=lambda: BlockKind(b"f" * 32, RAW_BLOCK_BYTES, ()))
    times: SourceTimes = field(default_factory=lambda: SourceTimes(CostModel(), 0.0, 512))
    now_s: float = 0.0

    def run(self, requests: Sequence[Request], counted: range) -> Found:
        """What the ``counted`` requests find."""
        found = Found()
        for number, request in enumerate(requests):
            self.now_s = request.at_s
            blocks = [_tokens(block) for block in request.blocks]
            nodes = self.store.tree.stored_prefix(ROOT, b"".join(blocks))
            hot = sum([node.ram is not None for node in nodes])
            if number in counted:
                found.asked += len(blocks)
                found.hits += len(nodes)
                if request.returning:
                    found.returning_known += request.known
                    found.returning_hot += hot
            self._take_in(blocks, nodes)
            found.most_bytes = max(found.most_bytes, self.store.ram_bytes + self.store.disk_bytes)
        problem = self.store.check_integrity()
        if problem is not None:
            raise RuntimeError(problem)
        return found

    def _take_in(self, blocks: list[bytes], nodes: list[BlockNode]) -> None:
        """The request begins with what there is, and what it lacks is stored."""
        store, long = self.store, len(blocks) * KV_BLOCK_TOKENS > PACKED_FROM_TOKENS
        for node in store.note_use(ROOT, b"".join(blocks), self.now_s):
            if node.uses >= USES_FOR_DISK:
                self._write(node)
        for node in nodes:
            if node.ram is None and node.disk is not None:
                store.put(node, self._payload(packed=False))
        first = store.known(ROOT, blocks)
        held = store.hold(self.kind, ROOT, blocks, first)
        wanted = True
        for depth, node in enumerate(held, first):
            node.group, node.used_s = "chat", self.now_s
            node.compute_s = self.times.compute_s(depth * KV_BLOCK_TOKENS, (depth + 1) * KV_BLOCK_TOKENS)
            node.pack_tried = long
            wanted = wanted and store.put(node, self._payload(packed=long))
        for node in reversed(held):
            store.release(node)
        self._pack_cold()

    def _pack_cold(self) -> None:
        while 2 * self.store.ram_bytes > self.store.ram_quota_bytes:
            node = self.store.coldest_raw(self.now_s, COLD_AFTER_S)
            if node is None:
                return
            node.pack_tried = True
            self.store.put(node, self._payload(packed=True))

    def _write(self, node: BlockNode) -> None:
        above = node.parent
        size = int(self.form.packed * RAW_BLOCK_BYTES)
        if above is None or (above.parent is not None and above.disk is None) or not self.store.reserve(node, size):
            return
        self.store.doomed.clear()
        self.store.wrote(node, size, DiskRecord(b"", size), in_order=True)

    def _payload(self, *, packed: bool) -> Payload:
        size = int((self.form.packed if packed else self.form.loose) * RAW_BLOCK_BYTES)
        data = np.broadcast_to(np.zeros(1, np.uint8), (size,))
        return Payload(Codec.ZSTD_PLANES if packed else Codec.RAW, data, RAW_BLOCK_BYTES)


def _tokens(block: int) -> bytes:
    return np.full(KV_BLOCK_TOKENS, block, np.int32).tobytes()


def measured_forms(threads: int, tokens: int) -> list[Form]:
    """Sizes of real KV: F16 as it is computed, and the same numbers as Q8_0. Raises RuntimeError where V is not kept in
    rows, of which Q8_0 makes its units."""
    model = str(resolve("smollm2"))
    core = build(Start(model, "smollm2", [(tokens + 64, 1)], threads=threads, self_measure=False)).core
    pages = read_pages(Setting(model, threads, tokens, 1, 1))
    ask(core, "pages", pages[:tokens], 1)
    held = core.residents.reuse.tokens(Slot(0, 0))
    state = split_state(core.context(0).save_stream(0), stream=0, streams=1, tokens=held)
    if state is None or state.layout.transposed:
        raise RuntimeError("KV of this model is not in rows")
    halves = [state.block(depth) for depth in range(held // KV_BLOCK_TOKENS)]
    core.close()
    eighths = [gguf.quants.quantize(block.view(np.float16).astype(np.float32), Q8_0) for block in halves]
    raw = len(halves[0])
    forms = []
    for name, blocks, unit in (("F16", halves, 2), ("Q8_0", eighths, Q8_0_UNIT_BYTES)):
        loose = sum([len(block) for block in blocks]) / len(blocks) / raw
        packed = sum([_packed_bytes(block, unit) for block in blocks]) / len(blocks) / raw
        forms.append(Form(name, loose, packed))
    return forms


def _packed_bytes(block: Bytes, unit: int) -> int:
    return pack(block, Codec.ZSTD_PLANES, (Run(len(block), unit),)).stored_bytes


def tiers(budget_bytes: int, ram_share: float) -> BlockStore:
    """Stores of ``budget_bytes``, ``ram_share`` of them in RAM."""
    ram = int(budget_bytes * ram_share)
    return BlockStore(ram, budget_bytes - ram, disk_load_s=lambda: DISK_LOAD_S)


def part(requests: Sequence[Request], from_s: float, to_s: float) -> range:
    """The numbers of the requests that come in a part of the trace."""
    numbers = [number for number, request in enumerate(requests) if from_s <= request.at_s < to_s]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_replay", description=__doc__)
    parser.add_argument("trace", type=Path, help="a Mooncake trace, such as conversation_trace.jsonl")
    parser.add_argument("--share", type=float, default=1.0, help="of all conversations")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--ram", type=float, nargs="+", default=[1.0, 0.25], help="share of a size that is RAM")
    parser.add_argument("--from", type=float, default=0.0, dest="from_s", help="seconds")
    parser.add_argument("--to", type=float, default=1e9, dest="to_s", help="seconds")
    parser.add_argument("--tokens", type=int, default=2000, help="of KV that is packed for the sizes")
    options = parser.parse_args()
    requests = read_trace(options.trace, options.share)
    counted = part(requests, options.from_s, options.to_s)
    forms = measured_forms(usable_cores(), options.tokens)
    asked = sum([len(request.blocks) for request in requests])
    distinct = len({block for request in requests for block in request.blocks})
    known = sum([requests[number].known for number in counted])
    kept = {"raw": 1.0, "shared": distinct / asked}
    for form in forms:
        kept |= {f"shared, {form.name}": distinct / asked * form.loose}
        kept |= {f"shared, {form.name}, packed": distinct / asked * form.packed}
    rows, data = [], []
    for form in forms:
        for size in options.sizes:
            budget = int(size * asked * RAW_BLOCK_BYTES)
            ideal = ideal_hits(requests, budget // int(form.packed * RAW_BLOCK_BYTES), counted)
            for ram in options.ram:
                found = Replay(form, tiers(budget, ram)).run(requests, counted)
                outcome = {
                    "form": form.name,
                    "size": size,
                    "ram_share": ram,
                    "hit_rate": found.hit_rate,
                    "ideal_hit_rate": ideal / max(1, found.asked),
                    "of_ideal": found.hits / max(1, ideal),
                    "hot": found.hot_rate,
                    "stored": found.most_bytes / (asked * RAW_BLOCK_BYTES),
                }
                data.append(outcome)
                rows.append(
                    [
                        form.name,
                        f"{size:g}",
                        f"{ram:g}",
                        *[f"{100 * float(outcome[key]):.1f} %" for key in ("hit_rate", "ideal_hit_rate", "of_ideal")],
                        f"{100 * found.hot_rate:.1f} %",
                        f"{float(outcome['stored']):.3f}",
                    ]
                )
    report(
        "kv_replay",
        f"python -m benchmarks.kv_replay conversation_trace.jsonl --share {options.share:g} "
        f"--from {options.from_s:g} --to {options.to_s:g}",
        ["KV", "size", "RAM of it", "found", "ideal finds", "of ideal", "hot, returning", "stored / raw F16"],
        rows,
        {
            "requests": len(requests),
            "blocks": asked,
            "distinct": distinct,
            "known_in_part": known,
            "forms": {form.name: {"loose": form.loose, "packed": form.packed} for form in forms},
            "kept_all": kept,
            "runs": data,
        },
    )


if __name__ == "__main__":
    main()
