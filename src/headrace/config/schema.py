"""The shape of the configuration: frozen, strict, complete with defaults.

``config.load`` reads it from YAML, environment and flags; ``config.template`` writes a commented one.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import Struct, field

from headrace.admission.quota import TenantLimits
from headrace.config.groups import FleetConfig, GroupConfig
from headrace.kv.band_layout import BandLayout
from headrace.kv.precision import KvDtype
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.lanes.defaults import default_lanes
from headrace.lanes.lane import Lane
from headrace.messages.engine import PrefixSharing
from headrace.scheduling.knobs import SchedulingKnobs, Strategy

_LIVE: Final = SchedulingKnobs()


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """``source`` is a name that ``headrace model list`` knows or a path to a GGUF. ``name`` is what
    ``/v1/models`` says (default: from the source). ``aliases`` are further names clients may use."""

    source: str = "smollm2"
    name: str | None = None
    aliases: tuple[str, ...] = ()


class TlsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """HTTPS, with a certificate chain and its key in PEM files. Without a certificate the server speaks plain HTTP."""

    certificate: str | None = None
    key: str | None = None
    minimum_version: Literal["1.2", "1.3"] = "1.2"


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP edge. ``unsupported_params``: what to do with request fields that headrace knows but cannot
    honour (audio, web search, ...): ``ignore`` them and say so in ``x-headrace-ignored``, or ``reject``
    with 400. ``store_dir`` keeps completions asked for with ``store: true`` (None: the state folder), at
    most ``max_stored_completions`` of them (the oldest go first). ``max_choices`` is the most sequences of
    one request: prompts times ``n`` or ``best_of``. ``admin_keys`` open the admin API, written like tenants'
    keys; without any it answers only to clients on the same machine."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    max_queue: int = 256
    max_choices: int = 128
    unsupported_params: Literal["ignore", "reject"] = "ignore"
    allow_model_delete: bool = False
    store_dir: str | None = None
    max_stored_completions: int = 1000
    trust_tenant_header: bool = True
    admin_keys: tuple[str, ...] = ()
    tls: TlsConfig = TlsConfig()

    def __repr__(self) -> str:
        """Like any struct's, but says only how many admin keys there are."""
        return f"ServerConfig({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, f"<{len(value)} hidden>" if name == "admin_keys" else value) for name, value in shown]


class Tenant(Struct, frozen=True, forbid_unknown_fields=True):
    """Who sends requests. ``api_keys`` are literal keys, ``env:NAME``, ``file:PATH``, or ``sha256:HEX`` of a key.
    ``lanes`` limits the tenant (empty: all); ``default_lane`` applies when nothing more specific names one. After
    loading only the keys' digests are kept (as ``sha256:HEX``), and no repr shows them. The rates let what comes in
    ``burst_s`` seconds come at once; what is over a limit gets 429."""

    api_keys: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    default_lane: str | None = None
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    burst_s: float = 60.0

    @property
    def limits(self) -> TenantLimits:
        """What the tenant may ask for."""
        return TenantLimits(self.requests_per_min, self.tokens_per_min, self.max_concurrent, self.burst_s)

    def __repr__(self) -> str:
        """Like any struct's, but says only how many keys there are."""
        return f"Tenant({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, f"<{len(value)} hidden>" if name == "api_keys" else value) for name, value in shown]


class BandConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A range of context length: sequences up to ``max_context_tokens`` (and longer than the band below),
    at most ``max_sequences`` at once. KV memory is there for ``max_sequences``; ``max_running`` lets fewer of
    them run, and is live (the knob ``band_caps.N``). KV is kept at ``kv_dtype``; anything but f16 needs a result of
    ``headrace kv gate`` for this model. ``layout`` says how its memory is laid out."""

    max_context_tokens: int
    max_sequences: int
    max_running: int | None = None
    kv_dtype: KvDtype = "f16"
    layout: BandLayout = "contiguous"


class SchedulingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine makes batches: the keys of ``scheduling.knobs.SchedulingKnobs``. All of them are live, by a
    reload or as knobs (``headrace knobs``).

    ``step_tokens`` bounds decode and prompt tokens of one step, ``max_prefill_tokens`` the prompt tokens in it.
    ``dynamic`` gathers requests for ``merge_window_s`` or until there are ``merge_max``. ``hybrid`` keeps steps
    shorter than ``urgent_step_s`` while requests with a target are alive and for ``linger_s`` after, and shorter
    than ``idle_step_s`` else, by prompt chunks of ``min_prefill_tokens`` to ``max_prefill_tokens``."""

    strategy: Strategy = _LIVE.strategy
    max_num_seqs: int | None = _LIVE.max_num_seqs
    max_prefill_tokens: int = _LIVE.max_prefill_tokens
    step_tokens: int = _LIVE.step_tokens
    band_margin_tokens: int = _LIVE.band_margin_tokens
    merge_window_s: float = _LIVE.merge_window_s
    merge_max: int = _LIVE.merge_max
    min_prefill_tokens: int = _LIVE.min_prefill_tokens
    linger_s: float = _LIVE.linger_s
    urgent_step_s: float = _LIVE.urgent_step_s
    idle_step_s: float = _LIVE.idle_step_s
    ageing_s: float = _LIVE.ageing_s
    knee_gain: float = _LIVE.knee_gain
    kv_warn: float = _LIVE.kv_warn
    kv_refuse: float = _LIVE.kv_refuse
    kv_move: float = _LIVE.kv_move
    kv_gap: float = _LIVE.kv_gap
    kv_long_tokens: int = _LIVE.kv_long_tokens


class KvMemoryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much KV sequences may hold. ``budget_bytes``: all that run, together (None: as much as their streams).
    ``parked_bytes``: memory for those that gave up their stream (None: a quarter of what is free at start); beyond it
    the coldest go to files in ``spill_dir``, at most ``spill_bytes``, or are computed again (None: no files)."""

    budget_bytes: int | None = None
    parked_bytes: int | None = None
    spill_dir: str | None = None
    spill_bytes: int = 8 * 2**30


class KvTiersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Stores of KV blocks beside the streams: ``ram_bytes`` of host memory (None: a quarter of what the bands leave of
    the memory that is free at start, at most 8 GiB; 0: no stores) and, with ``disk_path``, ``disk_bytes`` of files.
    Contexts of more than ``compress_threshold`` tokens are packed when they come in."""

    ram_bytes: int | None = None
    disk_path: str | None = None
    disk_bytes: int = 16 * 2**30
    compress_threshold: int = 8192
    codec: CodecRule = "auto"


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The embedded engine. ``threads`` None: as many as there are cores, lowered while other processes keep
    cores busy. ``memory_budget_bytes`` None: half of the memory that is free at start; it bounds KV memory.
    An engine with work that reports no step for ``stall_timeout_s`` is taken for hung and restarted.
    ``prefix_sharing``: whose requests may begin with KV that another one's prompt left. ``kv_memory`` bounds what
    sequences hold of the KV memory, ``kv_tiers`` keeps what they leave."""

    threads: int | None = None
    memory_budget_bytes: int | None = None
    bands: tuple[BandConfig, ...] = (
        BandConfig(max_context_tokens=2048, max_sequences=32),
        BandConfig(max_context_tokens=8192, max_sequences=16),
        BandConfig(max_context_tokens=16384, max_sequences=8),
        BandConfig(max_context_tokens=131072, max_sequences=1),
    )
    scheduling: SchedulingConfig = SchedulingConfig()
    kv_memory: KvMemoryConfig = KvMemoryConfig()
    kv_tiers: KvTiersConfig = KvTiersConfig()
    gpu_layers: int = 0
    start_timeout_s: float = 120.0
    stall_timeout_s: float = 120.0
    self_measure: bool = True
    prefix_cache: bool = True
    prefix_sharing: PrefixSharing = "tenant"
    kv_gate: Literal["require", "run"] = "require"


class TunerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A tuner that tries single steps of scheduling's knobs on live traffic and keeps those that bring more goodput.

    It measures for ``window_s`` at a time, ``settle_s`` after each change, and goes at most ``max_steps`` steps away
    from what is configured. A request that misses its SLO takes ``violation_penalty`` good ones from the reward."""

    enabled: bool = False
    window_s: float = 60.0
    settle_s: float = 15.0
    min_requests: int = 20
    max_steps: int = 2
    violation_penalty: float = 1.0


class ControlConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What headrace changes by itself while it serves."""

    tuner: TunerConfig = TunerConfig()


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """One whole configuration. ``default_lane`` takes what no rule recognises. Without ``groups`` the embedded engine
    serves every lane; with them ``default_group`` serves the lanes that name none (None: the only group there is)."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    control: ControlConfig = ControlConfig()
    fleet: FleetConfig = FleetConfig()
    groups: dict[str, GroupConfig] = {}
    default_group: str | None = None
    lanes: dict[str, Lane] = field(default_factory=default_lanes)
    default_lane: str = "interactive"
    tenants: dict[str, Tenant] = {}
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def embeds_engine(self) -> bool:
        """Whether headrace runs its own engine."""
        return not self.groups or any(group.kind == "embedded" for group in self.groups.values())

    def group_of(self, lane: Lane) -> str:
        """The name of the lane's group; call it only where there are groups."""
        return lane.group or self.default_group or next(iter(self.groups))
