"""Everything the HTTP routes need, handed in once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.admission.quota import Quotas
from headrace.api.gateway import Clock, Gateway
from headrace.api.live import LiveConfig
from headrace.api.prompt_sizes import PromptSizes
from headrace.api.store import CompletionStore
from headrace.engines.fleet.fleet import Fleet
from headrace.engines.protocol import Engine, Tokenizer
from headrace.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Deps:
    """``clock`` is monotonic seconds, ``wall_clock`` seconds since the epoch, ``new_id`` gives a fresh
    unguessable word of letters and digits. ``started_at_s`` (wall clock) is what models say as ``created``."""

    live: LiveConfig
    engine: Engine
    tokenizer: Tokenizer
    gateway: Gateway
    store: CompletionStore
    metrics: Metrics
    clock: Clock
    wall_clock: Callable[[], float]
    new_id: Callable[[], str]
    started_at_s: float
    fleet: Fleet | None = None
    """The engine, where it is a fleet of groups."""
    prompt_sizes: PromptSizes = field(default_factory=PromptSizes)
    quotas: Quotas = field(default_factory=Quotas)
