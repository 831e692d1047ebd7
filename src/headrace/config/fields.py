"""What each configuration key means and which numbers it takes: one table beside the schema.

``config.validate`` checks the ranges, ``config.template`` and the reference in ``docs`` print the meanings.
A test fails when a key of the schema is missing here or the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from headrace.config.groups import (
    DnsConfig,
    FleetConfig,
    GroupConfig,
    ProbeConfig,
    ReplicaConfig,
    RetryConfig,
    TimeoutConfig,
)
from headrace.config.schema import (
    BandConfig,
    Config,
    ControlConfig,
    EngineConfig,
    KvMemoryConfig,
    KvTiersConfig,
    ModelConfig,
    SchedulingConfig,
    ServerConfig,
    Tenant,
    TlsConfig,
    TunerConfig,
)
from headrace.control.breaker import BreakerConfig
from headrace.lanes.lane import SLO, Fallback, Lane, LaneMatch


@dataclass(frozen=True)
class Note:
    """A key's meaning in one sentence, and its range when it is a number (both ends allowed; with
    ``above_minimum`` the lower end is not)."""

    text: str
    minimum: float | None = None
    maximum: float | None = None
    above_minimum: bool = False

    @property
    def range_text(self) -> str:
        """The range for a person: ``1 to 65535``, ``above 0, at most 3600``; empty when there is none."""
        if self.minimum is None or self.maximum is None:
            return ""
        if self.above_minimum:
            return f"above {self.minimum:g}, at most {_whole(self.maximum)}"
        return f"{_whole(self.minimum)} to {_whole(self.maximum)}"

    def holds(self, value: float) -> bool:
        """Whether a number is within the range (NaN never is)."""
        if self.minimum is None or self.maximum is None:
            return True
        above = value > self.minimum if self.above_minimum else value >= self.minimum
        return above and value <= self.maximum


def _whole(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"


def _seconds(text: str, *, maximum: float = 3600, above: bool = True) -> Note:
    return Note(text, minimum=0, maximum=maximum, above_minimum=above)


def _tokens(text: str, *, minimum: int = 1) -> Note:
    return Note(text, minimum=minimum, maximum=16 * 1024 * 1024)


def _count(text: str, *, minimum: int = 1, maximum: int = 1_000_000) -> Note:
    return Note(text, minimum=minimum, maximum=maximum)


def notes() -> dict[type[Struct], dict[str, Note]]:
    """The table: schema struct -> key -> note."""
    return {
        Config: {
            "model": Note("What is served."),
            "server": Note("The HTTP edge."),
            "engine": Note("The embedded engine."),
            "control": Note("What headrace changes by itself while it serves; live, by SIGHUP."),
            "fleet": Note("What holds for all groups of engines."),
            "groups": Note(
                "Engines by group name; without any, the embedded engine serves every lane. Live, by SIGHUP."
            ),
            "default_group": Note("The group of lanes that name none; null: the only group there is."),
            "lanes": Note(
                "Classes of traffic by name. They merge over the default lanes, key by key; a lane set to"
                " null is removed."
            ),
            "default_lane": Note("The lane of a request that no rule recognises."),
            "tenants": Note("Who sends requests, by name. Once one has a key, every request needs a key."),
            "log_level": Note("The least severe messages that are logged."),
        },
        ModelConfig: {
            "source": Note("A name that `headrace model list` knows, or the path of a GGUF file."),
            "name": Note("What /v1/models says; null takes it from the source."),
            "aliases": Note("Further names that clients may use for the model."),
        },
        ServerConfig: {
            "host": Note("The address to listen on; 0.0.0.0 for every interface."),
            "port": _count("The TCP port to listen on; 0 takes any free one.", minimum=0, maximum=65535),
            "max_body_bytes": Note("The largest request body; beyond it 413. Units as in 16MiB work.", 1024, 2**31),
            "body_timeout_s": _seconds("How long a request's body may take to arrive; then 408."),
            "write_timeout_s": _seconds("How long a client may leave a stream unread before it is cut."),
            "drain_timeout_s": _seconds("How long running requests may take to finish after SIGTERM.", above=False),
            "max_queue": _count("Requests waiting for a place, over all lanes; beyond it 429."),
            "max_choices": _count("Sequences of one request at most: prompts times n or best_of.", maximum=4096),
            "unsupported_params": Note(
                "Request fields that headrace knows but cannot honour: ignore them and say so in"
                " x-headrace-ignored, or reject with 400."
            ),
            "allow_model_delete": Note("Whether DELETE /v1/models/NAME is allowed."),
            "store_dir": Note("Where completions asked for with store: true are kept; null: the state folder."),
            "max_stored_completions": _count("Stored completions at most; the oldest go first.", minimum=0),
            "trust_tenant_header": Note(
                "Whether x-tenant-id names the tenant while no tenant has keys (with keys, the key decides)."
            ),
            "admin_keys": Note(
                "Keys for /admin, as env:NAME, file:PATH, sha256:HEX of the key, or the key itself; without any,"
                " /admin answers only to clients on the same machine."
            ),
            "tls": Note("HTTPS; renewed certificates are read by SIGHUP."),
        },
        TlsConfig: {
            "certificate": Note("PEM file: the server's certificate, then those between it and the root; null: HTTP."),
            "key": Note("PEM file with the certificate's private key, not encrypted."),
            "minimum_version": Note("The oldest TLS that is spoken."),
        },
        EngineConfig: {
            "threads": _count(
                "Compute threads; null: as many as cores, fewer while other processes keep cores busy.",
                maximum=1024,
            ),
            "memory_budget_bytes": Note(
                "The bound of KV memory; null: half of what is free at start. Units as in 2GiB work.",
                2**20,
                2**46,
            ),
            "bands": Note("Ranges of context length, shortest first; each has a context of its own."),
            "scheduling": Note("How batches are made; live, by SIGHUP or `headrace knobs`."),
            "kv_memory": Note("How much KV memory sequences may hold, and where they go when it is full."),
            "kv_tiers": Note("Stores in RAM and on disk for the KV that sequences leave."),
            "gpu_layers": _count("Model layers computed on the GPU; 0 none.", minimum=0, maximum=10_000),
            "start_timeout_s": _seconds("How long loading the model may take."),
            "stall_timeout_s": _seconds(
                "An engine with work that reports no step for this long is taken for hung and restarted."
            ),
            "self_measure": Note("Whether to measure this machine at start and say which lane targets it can meet."),
            "prefix_cache": Note(
                "Whether a prompt begins with the KV of the same first tokens where a stream still holds it."
            ),
            "prefix_sharing": Note(
                "Within what prompts share KV: tenant, so that no time to a first token tells anything of another"
                " tenant's prompts, or all."
            ),
            "kv_gate": Note(
                "What serve does when a band's kv_dtype has no result of the gate for this model: require stops with"
                " the command that makes one, run makes it first."
            ),
        },
        KvMemoryConfig: {
            "budget_bytes": Note(
                "KV that all running sequences may hold together; null: what their streams do. Units as in 2GiB work.",
                2**16,
                2**46,
            ),
            "parked_bytes": Note(
                "Memory for the KV of sequences that gave up their stream; null: a quarter of what is free at start.",
                0,
                2**46,
            ),
            "spill_dir": Note("Where their KV goes beyond that; null: it is dropped and computed again."),
            "spill_bytes": Note("What files in spill_dir may take.", 0, 2**50),
        },
        KvTiersConfig: {
            "ram_bytes": Note(
                "Host memory for KV that sequences leave; 0: none; null: a quarter of what bands leave, at most 8GiB.",
                0,
                2**46,
            ),
            "disk_path": Note("Folder for block files, of this engine alone; null: none."),
            "disk_bytes": Note("What files in disk_path may take.", 0, 2**50),
            "compress_threshold": _tokens("Contexts longer than this are packed when they are stored."),
            "codec": Note("Whether blocks are packed: auto (as measured on this machine), zstd, or none."),
        },
        BandConfig: {
            "max_context_tokens": _tokens("The longest sequence (prompt and output) of the band.", minimum=16),
            "max_sequences": _count("Sequences of the band at once.", maximum=256),
            "max_running": _count(
                "How many of the band's sequences may run at once; null: all of max_sequences.", maximum=256
            ),
            "kv_dtype": Note(
                "How keys and values are kept: f16, q8_0 (17/32 of its memory) or q4_0 (9/32); the latter two only"
                " where `headrace kv gate` found them good enough for this model."
            ),
            "layout": Note(
                "How the band's KV memory is laid out: contiguous gives each sequence a stream of cells; paged takes"
                " cells one by one from a pool as large as all streams, so a shared prefix is held once and steps are"
                " slower; chunked is contiguous with prompts computed 128 tokens at a time, which saves intermediate"
                " results and no KV; streaming is contiguous, with parked sequences in files at once (needs"
                " kv_memory.spill_dir): no layer reads cells from disk while it computes."
            ),
        },
        SchedulingConfig: {
            "strategy": Note(
                "How batches are made: static and dynamic run whole batches, continuous decodes first, hybrid keeps"
                " each lane's targets, auto chooses by the traffic."
            ),
            "max_num_seqs": _count("Sequences in the engine at once, over all bands; null: what the bands hold."),
            "max_prefill_tokens": _count("Prompt tokens of one step at most.", maximum=65536),
            "step_tokens": _count(
                "Decode and prompt tokens of one step at most; above its value at start needs a restart.",
                maximum=65536,
            ),
            "band_margin_tokens": _count(
                "Output room with which a sequence's first band is chosen.", minimum=0, maximum=65536
            ),
            "merge_window_s": _seconds("Of dynamic: how long requests gather into a batch.", maximum=60, above=False),
            "merge_max": _count("Of dynamic: requests that make a batch full.", maximum=1024),
            "min_prefill_tokens": _count(
                "Of hybrid: the smallest prompt chunk, unless the prompt's rest is smaller.", maximum=65536
            ),
            "linger_s": _seconds(
                "Of hybrid: how long steps stay short after the last request with a target.", above=False
            ),
            "urgent_step_s": _seconds("Of hybrid: the longest step while requests with a target are alive."),
            "idle_step_s": _seconds("Of hybrid: the longest step without them; the next arrival waits behind it."),
            "ageing_s": _seconds("Of hybrid: a waiting request becomes ten priority points more urgent in this time."),
            "knee_gain": Note("Of hybrid: the batch grows only while doubling it adds this share of throughput.", 0, 1),
            "kv_warn": Note("The share of the KV budget, projected, from which on memory is said to be scarce.", 0, 10),
            "kv_refuse": Note("The share from which on new requests of long contexts get 429.", 0, 10),
            "kv_move": Note("The share from which on cold sequences are parked outside the streams.", 0, 10),
            "kv_gap": Note("How far below its share each of these levels is left.", 0, 1, above_minimum=True),
            "kv_long_tokens": _tokens("From which projected length on a context is long."),
        },
        ControlConfig: {
            "tuner": Note("Searches scheduling's knobs by trials on live traffic."),
        },
        TunerConfig: {
            "enabled": Note("Whether it runs; switched off, what it set goes back to the configuration."),
            "window_s": Note("How long one setting is measured at a time.", 1, 3600),
            "settle_s": _seconds("How long after a change nothing is counted.", above=False),
            "min_requests": _count("A window in which fewer requests ended decides nothing."),
            "max_steps": _count("Steps that a knob may be away from its configured value.", maximum=4),
            "violation_penalty": Note("Good requests that one missed SLO takes from the reward.", 0, 100),
        },
        FleetConfig: {
            "zone": Note("The zone of this gateway; null: no zone is preferred."),
            "zone_cost_s": _seconds("What a replica in another zone costs more when one is chosen.", above=False),
            "alert_webhook": Note(
                "Where alerts go as Alertmanager's JSON (http://HOST:9093/api/v2/alerts); null: only into the log."
            ),
            "prefix_blocks": _count("Blocks of 256 bytes of prompts that are remembered, over all groups."),
            "session_memory_s": _seconds("How long a session's replica is remembered.", maximum=86400),
        },
        GroupConfig: {
            "kind": Note("What the engines are; openai: any OpenAI-compatible server, embedded: headrace's own."),
            "model": Note("The name that the engines know the model by; clients may use it too."),
            "description": Note("For people."),
            "replicas": Note("The group's servers."),
            "dns": Note("Names whose addresses are the group's servers."),
            "file": Note("A YAML file with the key replicas, read again when it changes; null: none."),
            "api_key": Note("The key that the engines want, as env:NAME; null: none."),
            "priority_order": Note(
                "What the engines make of a request's priority; none: they are not told. vLLM: lower_first, with"
                " --scheduling-policy priority."
            ),
            "max_in_flight": _count("Requests that a replica has at once at most.", maximum=65536),
            "min_in_flight": _count("The least that a replica's limit falls to.", maximum=65536),
            "max_context_tokens": _tokens("Prompt and answer of a request at most; null: what the engine says."),
            "queue_wait_s": _seconds("How long a request waits for a place before it fails."),
            "unavailable_wait_s": _seconds("How long it waits while no replica is well.", above=False),
            "timeouts": Note("Limits of one request."),
            "health": Note("How it is found out whether a replica is well."),
            "retry": Note("Further tries of a request that failed."),
        },
        ReplicaConfig: {
            "url": Note("http://HOST:PORT, without /v1."),
            "zone": Note("Where it is; null: nowhere in particular."),
            "weight": Note("How much it takes of what is shared evenly.", 0.01, 100),
            "draining": Note("Whether it gets no new requests."),
        },
        DnsConfig: {
            "url": Note("http://NAME:PORT; every address of NAME is a replica."),
            "zone": Note("Where they are; null: nowhere in particular."),
            "weight": Note("How much each takes of what is shared evenly.", 0.01, 100),
            "refresh_s": _seconds("How often the name is asked again."),
        },
        TimeoutConfig: {
            "connect_s": _seconds("For a connection."),
            "first_token_s": _seconds("From sending to the first token."),
            "between_tokens_s": _seconds("Between two tokens."),
            "total_s": _seconds("For the whole answer, waiting and further tries included.", maximum=86400),
        },
        ProbeConfig: {
            "path": Note("What is asked for; null: /health (vllm, sglang, llama-server), /ready, or /v1/models."),
            "interval_s": _seconds("How often it is asked."),
            "timeout_s": _seconds("How long the answer may take."),
            "unhealthy_after": _count("Probes in a row that fail until it is not well.", maximum=1000),
            "healthy_after": _count("Probes in a row that succeed until it is well again.", maximum=1000),
            "failures": _count("Requests in a row that fail until it rests.", maximum=1000),
            "rest_s": _seconds("How long it rests at first; then one request tries it."),
            "max_rest_s": _seconds("How long it rests at most."),
            "progress_s": _seconds("How long begun streams may all be silent."),
            "metrics": Note("Whether to read its /metrics."),
            "metrics_stale_s": _seconds("How long what they said counts; then it counts as not known."),
        },
        RetryConfig: {
            "tries": _count("Tries of a request in all.", maximum=10),
            "backoff_s": _seconds("The longest pause before the second try; doubled for the next.", above=False),
            "budget": Note("Further tries for each request that came, on average.", 0, 10),
            "reserve": _count("Further tries that may be saved up.", minimum=0),
        },
        BreakerConfig: {
            "enabled": Note("Whether there is one."),
            "p99_ttft_s": _seconds("It opens when the averaged P99 of the time to the first token is above this."),
            "window_s": _seconds("The length of a window."),
            "windows": _count("Windows whose P99s are averaged.", maximum=1000),
            "min_requests": _count("Windows with fewer ended requests are left out."),
            "failures": _count("Requests in a row that fail and open it at once.", maximum=10_000),
            "cool_down_s": _seconds("How long it stays open before requests try the replica."),
            "max_cool_down_s": _seconds("How long at most, when tries fail again and again."),
            "probes": _count("Tries that must all be fast enough for it to close.", maximum=100),
            "batch_cap": _count("Requests that the replica has at once at most while it is not closed.", maximum=65536),
        },
        Lane: {
            "description": Note("For people."),
            "slo": Note("Targets that 99 % of the lane's requests must meet."),
            "priority": Note("Lower is more urgent.", -1000, 1000),
            "match": Note("How requests are recognised as this lane's without naming it."),
            "max_running": _count("Sequences of the lane in the engine at once; null: no cap of its own."),
            "max_queue": _count(
                "Requests of the lane waiting for a place, 429 beyond it; null: no cap of its own.", minimum=0
            ),
            "min_kv_dtype": Note(
                "The coarsest precision of KV that the lane takes: its sequences go only to bands with at least that;"
                " null: to any."
            ),
            "max_prompt_tokens": _tokens("The longest prompt that the lane takes, 400 beyond it; null: any."),
            "max_tokens": _tokens("The cap on a request's output tokens; null: none."),
            "default_max_tokens": _tokens("Output tokens for a request that does not say; null: what fits."),
            "typical_prompt_tokens": _tokens("The prompt for which serve says whether the SLO can be met."),
            "typical_output_tokens": _tokens("The output for which serve says whether the SLO can be met."),
            "weight": Note("The share of engine time under contention, against other lanes' weights.", 0.01, 1000),
            "overload": Note(
                "What becomes of a request whose answer is predicted beyond patience: shed it with 429, degrade it to"
                " the fallback, or queue it all the same."
            ),
            "patience": Note(
                "How many times its target an answer may take and still be of use; for a target that is out of reach"
                " even on an idle engine, at least ten times what it takes there.",
                1,
                1000,
            ),
            "fallback": Note("The cheaper answer of overload: degrade, and of a group that cannot serve."),
            "group": Note("The group of engines that serves the lane; null: default_group."),
            "hedge_after_s": _seconds(
                "After this long without a first token a second replica gets the request too; null: never."
            ),
            "breaker": Note("When a replica of the group is too slow for this lane."),
        },
        Fallback: {
            "max_tokens": _tokens("Output tokens of a degraded answer at most; null: no fewer than asked for."),
            "model": Note(
                "The model that the fallback group is asked for; without groups, a name of the served model."
            ),
            "group": Note("The group that takes over when the lane's own cannot serve it; null: none."),
        },
        SLO: {
            "p99_ttft_s": _seconds("Time to first token: sent to first token; null: no target.", maximum=86400),
            "p99_tpot_s": _seconds(
                "Time per output token after the first: (E2E - TTFT) / (n - 1); null: no target.", maximum=86400
            ),
            "p99_e2e_s": _seconds("End to end: sent to last token; null: no target.", maximum=86400),
        },
        LaneMatch: {
            "path_prefixes": Note("URL path prefixes: /realtime makes /realtime/v1/... this lane's."),
            "model_aliases": Note("Model names in requests that mean the served model in this lane."),
            "prompt_tokens_over": _tokens("Prompts longer than this belong here; null: no rule.", minimum=0),
        },
        Tenant: {
            "api_keys": Note("Keys as env:NAME, file:PATH (one key a line), sha256:HEX of the key, or the key itself."),
            "lanes": Note("The lanes that the tenant may use; empty: all."),
            "default_lane": Note("The tenant's lane when neither a header nor a path names one."),
            "requests_per_min": Note("Requests per minute; beyond it 429. Null: no limit.", 0, 1e9, True),
            "tokens_per_min": Note(
                "Prompt and output tokens per minute, together; beyond it 429. Null: no limit.", 0, 1e12, True
            ),
            "max_concurrent": _count("Requests at once; beyond it 429. Null: no limit."),
            "burst_s": Note("How many seconds' worth of the two rates may come at once.", 1, 86400),
        },
    }
