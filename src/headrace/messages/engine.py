"""Messages between the gateway and an engine process.

One frame is a 4-byte little-endian length and one msgpack-encoded message (``messages.framing``). The
gateway sends ``GatewayMessage``, the engine answers ``EngineMessage``. Times are seconds of the sending
process's monotonic clock, which on one machine is the same clock for both.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headrace.kv.account import KvHolding
from headrace.kv.band_layout import BandLayout
from headrace.kv.precision import KvDtype, at_least
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.kv.watermarks import KvLevel
from headrace.scheduling.knobs import SchedulingKnobs

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls", "content_filter"]
"""The last two come from remote engines only."""
PrefixSharing = Literal["tenant", "all"]
"""Whose requests may begin with KV that another one's prompt left: the same tenant's, or everybody's."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Applied in this order: ``logit_bias``, penalties (over generated tokens only),
    ``top_k``, ``temperature``, ``top_p``, ``min_p``, then a draw from ``seed``'s stream.

    ``temperature`` 0 is greedy. ``top_k`` 0 keeps all. ``logprobs`` None returns none, k >= 0 returns the
    chosen token's log-probability and the k most likely (natural log, of the distribution before
    temperature and truncation, after nothing else).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_text: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class TierPlan(Struct, frozen=True):
    """Stores of KV blocks beside the streams (``kv.tiers``): ``ram_bytes`` of host memory (None: a quarter of what the
    bands leave of the memory that is free at start, at most 8 GiB), ``disk_bytes`` of files in ``disk_path`` (None: no
    files). Contexts of more than ``compress_threshold`` tokens are packed at once."""

    ram_bytes: int | None
    disk_path: str | None = None
    disk_bytes: int = 0
    compress_threshold: int = 8192
    codec: CodecRule = "auto"


class Start(Struct, frozen=True, tag="start"):
    """The first message: which model to load and how. ``bands`` are (max_context_tokens, max_sequences);
    ``kv_dtypes`` the precision of each one's KV (beyond the list's end: f16), ``layouts`` its layout (contiguous).

    ``threads`` None leaves the number to the engine, which then follows what other processes use. ``prefix_cache``
    lets sequences begin with the KV that others have of the same first tokens, within ``prefix_sharing``.

    ``memory_budget_bytes`` bounds what is allocated for bands, ``kv_budget_bytes`` what sequences may hold of it
    together (None: all), ``parked_bytes`` the memory for sequences without a stream (None: a quarter of what is free
    at start), ``spill_bytes`` their files in ``spill_dir`` (None: no files). ``kv_tiers`` None: no stores.
    """

    model_path: str
    model_name: str
    bands: list[tuple[int, int]]
    scheduling: SchedulingKnobs = SchedulingKnobs()
    memory_budget_bytes: int | None = None
    threads: int | None = None
    gpu_layers: int = 0
    self_measure: bool = True
    prefix_cache: bool = True
    prefix_sharing: PrefixSharing = "tenant"
    kv_budget_bytes: int | None = None
    parked_bytes: int | None = None
    spill_dir: str | None = None
    spill_bytes: int = 0
    kv_tiers: TierPlan | None = None
    kv_dtypes: list[KvDtype] = []
    layouts: list[BandLayout] = []


class WireRequest(Struct, frozen=True):
    """A request in the JSON of its client, for engines that take no token ids.

    ``prompt`` is the JSON of ``messages`` or ``prompt``; ``fields`` are the other members that the engine gets as they
    came, as JSON without the braces around them: no model, no limit of tokens, no ``stream`` (``Submit`` and the
    engine say those). ``continuable``: an answer cut off may be taken up after its text, because nothing but text can
    have come before (no tools, no constrained output, no log-probabilities). ``continued`` is the text of the answer
    that was sent already, of ``continued_tokens`` tokens.
    """

    endpoint: Literal["chat", "completion"]
    prompt: bytes
    fields: bytes = b""
    continuable: bool = True
    continued: str = ""
    continued_tokens: int = 0
    model: str | None = None


class Submit(Struct, frozen=True, tag="submit"):
    """One sequence to generate. ``request_id`` is unique among live sequences.

    ``max_tokens`` is the most tokens to generate (None: up to the model's context; 0: prefill only).
    ``deadline_s`` (first token due), ``finish_by_s`` (last token due), ``tpot_s`` (time per token between them) and
    ``priority`` (lower is more urgent) come from the lane; times are on the clock of ``arrived_s``.
    ``expected_tokens`` is the output length to expect, ``stream`` whether the client reads tokens as they come.
    ``min_kv_dtype``: it runs only in bands that keep KV at least this precisely (None: in any).

    ``wire`` is the request as a remote engine takes it. Without a vocabulary there are no ``prompt_tokens`` then, and
    ``estimated_prompt_tokens`` says how many there should be. ``session`` names the conversation that it belongs to.
    """

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    lane: str
    priority: int
    max_tokens: int | None = None
    deadline_s: float | None = None
    arrived_s: float = 0.0
    tenant: str | None = None
    tpot_s: float | None = None
    finish_by_s: float | None = None
    expected_tokens: int | None = None
    stream: bool = True
    min_kv_dtype: KvDtype | None = None
    wire: WireRequest | None = None
    estimated_prompt_tokens: int = 0
    session: str | None = None

    @property
    def prompt_count(self) -> int:
        """How many tokens the prompt has, or should have."""
        return len(self.prompt_tokens) or self.estimated_prompt_tokens


class Abort(Struct, frozen=True, tag="abort"):
    """Stop a sequence. It is freed before the next step; an event with finish ``abort`` follows, unless the
    sequence had ended already."""

    request_id: str


class Knobs(Struct, frozen=True, tag="knobs", omit_defaults=True):
    """Values that may change while running; None leaves them as they are. ``scheduling`` replaces the whole set.
    Raises ValueError for a value below 1: an engine could compute nothing with it."""

    threads: int | None = None
    scheduling: SchedulingKnobs | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """Ask for an ``EngineSnapshot``."""

    ask_id: int


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """End the process. Sequences still running end with finish ``abort``."""


GatewayMessage = Start | Submit | Abort | Knobs | Snapshot | Shutdown


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log-probability (natural log) of one token, and of the most likely tokens at that position.

    ``logprob`` is None only for the first prompt token, which nothing predicts. ``top`` holds
    ``(token_id, token_bytes, logprob)``, most likely first.
    """

    token_id: int
    token_bytes: bytes
    logprob: float | None
    top: list[tuple[int, bytes, float]]


class SequenceOutput(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step added to one sequence.

    ``text`` is complete UTF-8 and never contains a part of a stop string; it may be empty while bytes are
    held back. ``token_ids`` are the tokens sampled in this step (normally one). On the last output
    ``finish`` is set and every held-back byte has been released. The first output carries ``queue_wait_s`` and
    ``cached_tokens``: how many prompt tokens did not have to be computed.

    Of remote engines: ``more_tokens`` counts tokens whose ids are not known, ``delta`` is the JSON of what came
    besides text (tool calls, reasoning), and with ``finish`` ``error`` ``refused_status`` is the HTTP status with which
    the engine refused the request as its client's fault (0: it did not). An id of -1 in log-probabilities is unknown.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_wait_s: float | None = None
    more_tokens: int = 0
    delta: bytes | None = None
    refused_status: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) + self.more_tokens


class StepOutput(Struct, frozen=True, array_like=True, tag="step"):
    """Everything one step produced: one frame per step, whatever the batch size."""

    outputs: list[SequenceOutput]
    ended_s: float
    load: EngineLoad | None = None


class TierLoad(Struct, frozen=True):
    """The stores of KV blocks: what they hold, what waits to be stored, what is kept of files for sequences that wait
    (``fetched_bytes``), and, since the engine started, the prompt tokens loaded from each, blocks stored, found stored
    already, written to files, read from them beside the steps (``fetched``) and let go, blocks that could not be used
    (``bad``) or were not kept (``unsaved``), both by reason, and seconds that steps waited for copies."""

    ram_bytes: int = 0
    ram_quota_bytes: int = 0
    ram_blocks: int = 0
    disk_bytes: int = 0
    disk_quota_bytes: int = 0
    disk_blocks: int = 0
    queued: int = 0
    queued_bytes: int = 0
    fetched_bytes: int = 0
    ram_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    stored: int = 0
    deduplicated: int = 0
    written: int = 0
    fetched: int = 0
    ram_evicted: int = 0
    disk_evicted: int = 0
    copy_s: float = 0.0
    bad: dict[str, int] = {}
    unsaved: dict[str, int] = {}


class EngineLoad(Struct, frozen=True):
    """How full the engine is, sent with a step when it changed. Tokens are KV cells; ``step_s`` is the
    duration of the last step, ``decode_tokens`` and ``prefill_tokens`` what it held; ``step_error`` is the typical
    relative error of the engine's latest predictions of step time.

    ``prefill_tokens_per_s`` and ``decode_step_s`` are predicted: the rate of full prefill chunks, and one decode step
    of all running sequences and one more (0: not known yet). ``batch_cap`` is where the knee of step time is,
    ``fragmentation`` the largest share of holes in a band, ``parked`` sequences whose KV waits outside the streams.
    ``moves``, ``victims`` and ``cut_steps`` (ended early for something urgent) count since the engine started.
    ``strategy`` decided the last step, for ``reason``.

    Of prompts that began since the engine started: ``prefix_query_tokens`` are their tokens, ``prefix_hit_tokens``
    those that did not have to be computed, ``prefix_saved_s`` the engine time that this saved, by prediction.
    ``idle_residents`` streams keep the KV of sequences that have ended, ``idle_resident_tokens`` in all.
    ``lane_shares`` is each lane's share of engine time lately, 0 to 1.

    Of KV memory, projected (``scheduling.memory``): ``kv_held_tokens`` by running sequences, ``kv_promised_tokens``
    with those that wait, of ``kv_budget_tokens``; ``kv_level`` is the watermark's level, ``kv_drain_s`` the predicted
    time until long requests are taken again. ``kv_waste`` is the share of used streams' cells that hold nothing.
    ``parked`` sequences have ``parked_bytes`` in memory, ``spilled`` of them ``spilled_bytes`` in files. Since the
    engine started: each level was come to ``kv_level_entries`` times, ``kv_parked`` sequences gave up their stream for
    want of memory, ``kv_spills`` states went to a file, ``kv_dropped`` were lost and are computed again,
    ``kv_conversions`` streams came from a band of another precision."""

    running: int
    waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    kv_used_bytes: int
    kv_total_bytes: int
    waiting_prefill_tokens: int
    step_s: float
    decode_tokens: int
    prefill_tokens: int
    threads: int
    step_error: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    batch_cap: int = 0
    fragmentation: float = 0.0
    parked: int = 0
    moves: int = 0
    victims: int = 0
    cut_steps: int = 0
    strategy: str = ""
    reason: str = ""
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_saved_s: float = 0.0
    idle_residents: int = 0
    idle_resident_tokens: int = 0
    lane_shares: dict[str, float] = {}
    kv_level: KvLevel = "normal"
    kv_budget_tokens: int = 0
    kv_held_tokens: int = 0
    kv_promised_tokens: int = 0
    kv_drain_s: float = 0.0
    kv_level_entries: dict[str, int] = {}
    kv_waste: float = 0.0
    kv_parked: int = 0
    parked_bytes: int = 0
    spilled: int = 0
    spilled_bytes: int = 0
    kv_spills: int = 0
    kv_dropped: int = 0
    tiers: TierLoad | None = None
    kv_conversions: int = 0


class BandPlan(Struct, frozen=True):
    """One band's context: its longest sequence, how many at once, and the bytes of KV memory it takes at its
    precision; how that is laid out."""

    max_context_tokens: int
    max_sequences: int
    kv_bytes: int
    created: bool = False
    kv_dtype: KvDtype = "f16"
    layout: BandLayout = "contiguous"


class ModelInfo(Struct, frozen=True):
    """What is being served, read from the GGUF."""

    name: str
    path: str
    architecture: str
    parameters: int
    weight_bytes: int
    context_train_tokens: int
    max_context_tokens: int
    vocab_size: int
    kv_bytes_per_token: int


class SelfMeasurement(Struct, frozen=True):
    """A second of measuring on this machine, taken before the engine says it is ready."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_overhead_s: float


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine serves from now on. ``reductions`` says in words what had to give way to the memory budget,
    ``memory_notes`` what about the memory plan is not exact,
    ``processor`` what the build of libllama uses of the processor,
    ``other_cores`` how many cores other processes used while it started."""

    model: ModelInfo
    bands: list[BandPlan]
    memory_budget_bytes: int
    threads: int
    measurement: SelfMeasurement | None
    reductions: list[str] = []
    processor: str = ""
    other_cores: float = 0.0

    def longest_context(self, least: KvDtype | None) -> int:
        """Tokens of the longest sequence that bands of at least this precision hold; 0 when there is none."""
        if least is None:
            return self.model.max_context_tokens
        longest = max([band.max_context_tokens for band in self.bands if at_least(band.kv_dtype, least)], default=0)
        return min(longest, self.model.max_context_tokens)

    memory_notes: list[str] = []


class EngineSnapshot(Struct, frozen=True, array_like=True, tag="engine_snapshot"):
    ask_id: int
    load: EngineLoad
    bands: list[BandPlan]
    sequences: list[str]
    integrity: str | None
    """None when every account agrees, else what is wrong."""
    kv: list[KvHolding] = []
    """Where all KV is."""


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot go on (model unreadable, out of memory, library error); the process ends after it."""

    message: str


EngineMessage = StepOutput | Ready | EngineSnapshot | Fatal
