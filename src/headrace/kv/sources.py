"""Where a new sequence's prefix comes from, and into which stream: the cheapest by predicted time.

Each way costs its own time, to get the prefix and compute the rest of the prompt, and what it takes from others:

| way | own time beside computing the rest | taken from others |
|---|---|---|
| ``take_over`` an idle stream, cut to the common prefix | nothing | what the resident had beyond it |
| ``copy`` another stream of the band inside libllama, which copies whole streams | ``move_s`` | the stream |
| ``carry`` any stream's state out and into this one | by its tokens | the stream |
| ``restore`` what the sequence itself had parked in RAM | half a carry | the stream |
| ``ram``, ``disk``: load what the stores have (``kv.tiers``) | as long as such loads took | the stream |
| ``compute`` everything | nothing | the stream |

The least sum wins; a way whose own time is not below computing everything is never taken. At least one prompt token,
the last, is always computed: its logits give the first output token. A sequence with parked KV never begins with less
than that: it was planned with it, and text that goes on from the same KV cannot turn at a near tie.

**Which stream.** A stream costs what its resident is worth (nothing when it is empty), plus the move that will sooner
or later close the gap when it touches no live stream: libllama computes only consecutive streams together, so a
sequence apart from the others costs every step a pass or padding rows. The least cost wins, then the lowest stream.
On an idle band that is: empty streams first, lowest first, then the resident worth least. Beside live streams a
worthless resident next to them goes before an empty stream further off, and a valuable one stays when a move costs
less than it is worth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headrace.scheduling.bands import Band
from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.sequence import Slot
from headrace.scheduling.step import StepTimes

SourceKind = Literal["compute", "take_over", "copy", "carry", "restore", "ram", "disk"]

_RESTORE_SHARE: Final = 0.5
"""A parked state has been written already; only reading it back is left of a carry."""
_MEMORY: Final = 0.3
CONVERT_S_PER_TOKEN: Final = 2e-4
"""Prior for turning one token's KV into another precision: about 10 ns a number, 23,040 bytes of F16 a token."""


class CarryTime:
    """Seconds a token for reading a stream's state out of libllama and writing it into another stream: what it took
    lately. The prior is DESIGN's: 11 ms for 1,900 tokens of 23 KB each, and as much again for the buffer."""

    def __init__(self, s_per_token: float = 1.2e-5) -> None:
        self.s_per_token = s_per_token

    def learn(self, tokens: int, took_s: float) -> None:
        """Take in what carrying ``tokens`` took. Nothing is learned from an empty stream."""
        if tokens > 0 and took_s > 0:
            self.s_per_token += _MEMORY * (took_s / tokens - self.s_per_token)


@dataclass(frozen=True, slots=True)
class SourceTimes:
    """Predicted seconds of every way. ``chunk_tokens`` is how much of a prompt one step computes. Not ``copies``: the
    engine does not copy streams inside libllama (out and in again costs less where the KV is in host memory)."""

    steps: StepTimes
    carry_s_per_token: float
    chunk_tokens: int
    copies: bool = True
    convert_s_per_token: float = CONVERT_S_PER_TOKEN

    def compute_s(self, from_tokens: int, to_tokens: int) -> float:
        """Computing the tokens after the first ``from_tokens`` up to ``to_tokens``, in chunks. Exact for times that
        are linear in pairs, as ``CostModel``'s are: its full chunks are taken as so many average ones."""
        chunks, rest = divmod(to_tokens - from_tokens, self.chunk_tokens)
        total_s = 0.0
        if chunks:
            whole = chunks * self.chunk_tokens
            pairs = prefill_pairs(from_tokens, whole)
            total_s += chunks * self.steps.call_s(self.chunk_tokens, 0, pairs // chunks)
            from_tokens += whole
        if rest:
            total_s += self.steps.call_s(rest, 0, prefill_pairs(from_tokens, rest))
        return total_s

    def carry_s(self, tokens: int, *, converts: bool = False) -> float:
        """Carrying a stream that holds ``tokens``; with ``converts`` into a band of another precision."""
        return (self.carry_s_per_token + (self.convert_s_per_token if converts else 0.0)) * tokens

    def restore_s(self, tokens: int) -> float:
        """Putting a parked state of so many tokens, which is in memory, into a stream."""
        return _RESTORE_SHARE * self.carry_s(tokens)


@dataclass(frozen=True, slots=True)
class Candidate:
    """``slot`` holds ``length`` tokens, the first ``tokens`` of which begin the prompt. ``take_s``: what taking its
    stream costs others, seconds; None when it cannot be taken (live, or of another band)."""

    slot: Slot
    tokens: int
    length: int
    take_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The stores can put the first ``tokens`` tokens of the prompt into a stream in ``load_s``; ``kind`` is the slowest
    place that any of it comes from."""

    kind: Literal["ram", "disk"]
    tokens: int
    load_s: float


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """A stream that nobody runs in, and what using it costs others, seconds."""

    stream: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class Source:
    """``holder`` gives the first ``tokens`` tokens (``compute`` and ``restore`` have none). ``own_s`` is the predicted
    time until the prompt is computed, ``saved_s`` how much less that is than computing all of it."""

    kind: SourceKind
    holder: Slot | None
    tokens: int
    own_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence goes to ``slot`` and begins with what ``source`` gives."""

    slot: Slot
    source: Source


def apart(stream: int, live: Collection[int]) -> bool:
    """True when a sequence in ``stream`` would be computed by itself although others run in the band."""
    return bool(live) and stream - 1 not in live and stream + 1 not in live


def stream_choices(
    streams: int, live: Collection[int], resident_s: Mapping[int, float], gap_s: float
) -> list[StreamChoice]:
    """The streams of a band that nobody runs in, best first. ``resident_s`` is what each resident is worth, ``gap_s``
    a move that closes a gap; both in seconds."""
    choices = []
    for stream in range(streams):
        if stream in live:
            continue
        gap = gap_s if apart(stream, live) else 0.0
        choices.append(StreamChoice(stream, resident_s.get(stream, 0.0) + gap))
    choices.sort(key=lambda choice: (choice.cost_s, choice.stream))
    return choices


def place(
    candidates: Iterable[Candidate],
    choices: Sequence[StreamChoice],
    *,
    prompt_tokens: int,
    band: int,
    bands: Sequence[Band],
    times: SourceTimes,
    parked_tokens: int = 0,
    stored: Sequence[StoredPrefix] = (),
) -> Placement:
    """Where a sequence of ``prompt_tokens`` that enters ``band`` begins. ``candidates`` come longest common prefix
    first and are read only as far as one could still win; ``parked_tokens`` of its KV wait in RAM, ``stored`` is what
    the stores have. Raises ValueError when no stream is free."""
    if not choices:
        raise ValueError(f"band {band} has no stream that nobody runs in")
    all_s = times.compute_s(0, prompt_tokens)
    best_s = all_s + choices[0].cost_s
    best = Placement(Slot(band, choices[0].stream), Source("compute", None, 0, all_s, 0.0))

    def offer(kind: SourceKind, holder: Slot | None, tokens: int, stream: int, own_s: float, others_s: float) -> None:
        nonlocal best, best_s
        if own_s < all_s and own_s + others_s < best_s:
            best_s = own_s + others_s
            best = Placement(Slot(band, stream), Source(kind, holder, tokens, own_s, all_s - own_s))

    least = 1
    if parked_tokens > 0 and prompt_tokens > 1:
        least = min(parked_tokens, prompt_tokens - 1)
        own_s = times.restore_s(parked_tokens) + times.compute_s(least, prompt_tokens)
        best_s = own_s + choices[0].cost_s
        best = Placement(best.slot, Source("restore", None, least, own_s, max(0.0, all_s - own_s)))
    for prefix in stored:
        tokens = min(prefix.tokens, prompt_tokens - 1, bands[band].max_context_tokens)
        if tokens >= least:
            own_s = prefix.load_s + times.compute_s(tokens, prompt_tokens)
            offer(prefix.kind, None, tokens, choices[0].stream, own_s, choices[0].cost_s)
    common, rest_s = 0, all_s
    for candidate in candidates:
        tokens = min(candidate.tokens, prompt_tokens - 1)
        if tokens < least:
            break
        if tokens != common:  # many hold the same system prompt
            common, rest_s = tokens, times.compute_s(tokens, prompt_tokens)
        if rest_s >= best_s:
            break  # the next ones have less of the prompt, so more to compute
        if candidate.take_s is not None:
            offer("take_over", candidate.slot, tokens, candidate.slot.stream, rest_s, candidate.take_s)
        other = next((choice for choice in choices[:2] if Slot(band, choice.stream) != candidate.slot), None)
        if other is None:
            continue
        if times.copies and candidate.slot.band == band:
            copy_s = times.steps.move_s(candidate.length, band) + rest_s
            offer("copy", candidate.slot, tokens, other.stream, copy_s, other.cost_s)
        if candidate.length <= bands[band].max_context_tokens:
            converts = bands[candidate.slot.band].kv_dtype != bands[band].kv_dtype
            carry_s = times.carry_s(candidate.length, converts=converts) + rest_s
            offer("carry", candidate.slot, tokens, other.stream, carry_s, other.cost_s)
    return best
