"""One replica: a virtual engine, what the gateway counts of it, and the KV that it keeps for later prompts."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.admission.accuracy import Accuracy
from headrace.admission.front import Front
from headrace.admission.lengths import OutputLengths
from headrace.admission.rates import EngineRates, rates_of
from headrace.config.schema import Config
from headrace.kv.sources import SourceTimes
from headrace.messages.engine import BandPlan, EngineLoad, ModelInfo, Ready
from headrace.routing.prompt_rate import learned_rate
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import Call, prefill_pairs
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.simulate.baselines.policies import baseline_policy, is_baseline, knobs_for
from headrace.simulate.engine_shape import EngineShape, Listener
from headrace.simulate.fleet.engine_times import Paced, times_of
from headrace.simulate.fleet.flight import Flight
from headrace.simulate.fleet.prefix_cache import PrefixCache
from headrace.simulate.fleet.routes import Seen
from headrace.simulate.fleet.scenario import EngineSpec, Group, Role
from headrace.simulate.requests import VirtualRequest
from headrace.simulate.simulation import Event
from headrace.simulate.virtual_engine import VirtualEngine

_DEFAULT_TOKENS: Final = SchedulingKnobs().step_tokens


class Replica:
    """``serving``: requests may be sent to it. It is not while it warms up, drains or is known to be down.
    ``counts`` of the gateway: ``flights`` that it has, and prompt tokens of those without a first token."""

    def __init__(
        self,
        name: str,
        group: Group,
        config: Config,
        listener: Listener,
        source: random.Random,
        *,
        accuracy: Accuracy,
        lengths: OutputLengths,
        learns: bool,
    ) -> None:
        spec = group.engine
        self.name = name
        self.role: Role = group.role
        self.spec = spec
        self.told = not is_baseline(spec.policy)
        self.bands = bands_of(spec)
        self._times = times_of(spec)
        self.believed = Paced(self._times)
        self.engine = VirtualEngine(
            EngineShape(
                self.bands,
                layout=spec.layout,
                kv_travels=self.told,
                copy_s_per_token=0.0 if spec.layout == "fused" else 3e-6,
                cuts=self.told and spec.layout != "fused",
                noise=spec.noise,
                kv_tokens=spec.kv_tokens,
                watermarks=self.told,
                joins_decodes=True,
            ),
            self._times,
            source,
            policy=baseline_policy(spec.policy),
            knobs=_knobs(spec, config),
            believed=self.believed,
            learn=self._learn if learns else None,
            listener=listener,
            token_times=True,
        )
        self.front = Front(lengths=lengths, accuracy=accuracy)
        self.cache = PrefixCache(self._cache_room, spec.tiers, spec.kv_bytes_per_token)
        self.flights: dict[str, Flight] = {}
        self.started: dict[str, Flight] = {}
        self.doors: dict[str, deque[Flight]] = {}
        self.waiting_tokens = 0
        self.prefill_tokens_per_s = 0.0
        self.places = sum([band.max_sequences for band in self.bands])
        self.serving = False
        self.draining = False
        self.down_until_s = -math.inf
        self.link_free_s = 0.0
        self.fetch_free_s = 0.0
        self.frozen_until_s = -math.inf
        self.seen: Seen | None = None
        self.up_since_s: float | None = None
        self.up_s = 0.0
        self.routed = self.shed = self.lost = 0
        self._ready = _ready(self.bands)
        self._rates: EngineRates | None = None
        self._rates_at = (-1, -1)
        self._kv_tokens = spec.kv_tokens or sum([band.max_context_tokens * band.max_sequences for band in self.bands])

    # ------------------------------------------------------------------------------------------- its life

    def begin(self, now_s: float) -> None:
        """It serves from now on."""
        self.serving, self.draining = True, False
        if self.up_since_s is None:
            self.up_since_s = now_s

    def order(self, now_s: float) -> None:
        """It is paid for from now on, and will serve once it is warm."""
        self.up_since_s = now_s

    def retire(self, now_s: float) -> None:
        """It is not paid for any more."""
        self.serving = self.draining = False
        if self.up_since_s is not None:
            self.up_s += now_s - self.up_since_s
            self.up_since_s = None

    def paid_s(self, now_s: float) -> float:
        """For how long it has been paid for."""
        return self.up_s + (0.0 if self.up_since_s is None else now_s - self.up_since_s)

    def die(self, now_s: float, for_s: float) -> Iterable[Event]:
        """All that is in it is lost; it serves again after ``for_s``."""
        self.down_until_s = now_s + for_s
        self.cache.clear()
        return self.engine.restart(now_s, for_s)

    # -------------------------------------------------------------------------------------------- requests

    def submit(self, flight: Flight, request: VirtualRequest, now_s: float) -> Iterable[Event]:
        """A request goes into the engine."""
        events = self.engine.submit(request, now_s)
        flight.known = self.engine.records.get(request.request_id)
        return events

    def take(self, flight: Flight) -> None:
        """The gateway sends it a request."""
        self.flights[flight.request_id] = flight
        self.waiting_tokens += flight.planned.input_tokens
        self.routed += 1

    def begins(self, flight: Flight, now_s: float) -> None:
        """A first token came back. Its time tells the rate of prompts, as the real gateway measures it."""
        computed = flight.planned.input_tokens - flight.cached_tokens
        if flight.stage != "decode":
            self.prefill_tokens_per_s = learned_rate(self.prefill_tokens_per_s, computed, now_s - flight.sent_s)
        if flight.request_id not in self.started:
            self.started[flight.request_id] = flight
            self.waiting_tokens -= flight.planned.input_tokens

    def leave(self, flight: Flight) -> None:
        """A request has left, however."""
        if self.started.pop(flight.request_id, None) is None:
            self.waiting_tokens -= flight.planned.input_tokens
        del self.flights[flight.request_id]

    def learn_progress(self, now_s: float) -> None:
        """Tell the ledger which tokens came since it was told last."""
        self.engine.settle(now_s)
        ledger = self.front.ledger
        for flight in self.started.values():
            if flight.ticket is not None and flight.known is not None:
                entry = flight.ticket.entry
                new = flight.known.output_tokens - entry.generated[0]
                if new:
                    ledger.generated(entry, 0, new)

    def fits(self, flight: Flight) -> bool:
        """Whether its prompt has a place in the longest band."""
        return flight.planned.input_tokens < self.bands[-1].max_context_tokens

    # ------------------------------------------------------------------------------------- what is seen of it

    def rates(self, now_s: float) -> EngineRates | None:
        """How fast it is, as its engine reports it after a step."""
        engine = self.engine
        engine.settle(now_s)
        at = (engine.steps, len(self.flights))
        if at != self._rates_at:
            self._rates_at = at
            running = engine.running
            cells = sum([sequence.computed_tokens for sequence in running])
            chunk = min(engine.knobs.max_prefill_tokens, engine.knobs.step_tokens)
            load = EngineLoad(
                running=len(running),
                waiting=0,
                kv_used_tokens=cells,
                kv_total_tokens=self._kv_tokens,
                kv_used_bytes=0,
                kv_total_bytes=1,
                waiting_prefill_tokens=0,
                step_s=engine.last_step_s,
                decode_tokens=len(running),
                prefill_tokens=0,
                threads=1,
                prefill_tokens_per_s=chunk / self.believed.call_s(chunk, 0, prefill_pairs(0, chunk)),
                decode_step_s=self.believed.call_s(len(running) + 1, cells),
            )
            self._rates = rates_of(load, self._ready, engine.knobs)
        return self._rates

    def look(self, now_s: float, *, with_wait: bool) -> Seen:
        """What it is like now; the predicted wait only where it is asked for."""
        rates = self.rates(now_s) if with_wait else None
        wait_s = 0.0
        if rates is not None:
            wait_s = rates.prefill_s(self.waiting_tokens) if self.waiting_tokens else 0.0
            wait_s += rates.step_s / 2 if self.flights else 0.0
            beyond = len(self.flights) - rates.places
            if beyond > 0:
                wait_s += beyond * rates.decode_token_s * self._typical_output()
        return Seen(
            len(self.flights),
            self.waiting_tokens,
            wait_s,
            places=self.places,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )

    def source_times(self) -> SourceTimes:
        """What decides whether a prefix is fetched or computed."""
        return SourceTimes(self.believed, 0.0, self.engine.knobs.max_prefill_tokens)

    def check_integrity(self) -> str | None:
        """None when all accounts agree; else what is wrong."""
        self.front.ledger.check_integrity()
        waiting = sum([f.planned.input_tokens for name, f in self.flights.items() if name not in self.started])
        if waiting != self.waiting_tokens:
            return f"{self.name}: {self.waiting_tokens} waiting tokens counted, {waiting} there"
        return self.cache.check_integrity() or self.engine.check_integrity()

    def _typical_output(self) -> float:
        flights = list(self.flights.values())
        return sum([flight.expected_tokens for flight in flights]) / len(flights) if flights else 0.0

    def _cache_room(self) -> int:
        return self._kv_tokens - sum([sequence.computed_tokens for sequence in self.engine.running])

    def _learn(self, calls: Sequence[Call], took_s: float) -> None:
        expected_s = sum([self.believed.call_s(call.rows, call.context_tokens, call.pairs) for call in calls])
        self.believed.learn(expected_s, took_s)


def bands_of(spec: EngineSpec) -> tuple[Band, ...]:
    """An engine's streams by context length."""
    if spec.bands:
        return tuple([Band(band.max_context_tokens, band.max_sequences) for band in spec.bands])
    return (Band(spec.max_context_tokens, spec.max_sequences),)


def _knobs(spec: EngineSpec, config: Config) -> SchedulingKnobs:
    fields = msgspec.structs.asdict(spec.scheduling)
    fields["strategy"] = "continuous"
    knobs = SchedulingKnobs(
        **fields,
        band_caps=tuple([band.max_running or band.max_sequences for band in spec.bands]) or None,
        lane_caps={name: lane.max_running for name, lane in config.lanes.items() if lane.max_running is not None},
        lane_weights={name: lane.weight for name, lane in config.lanes.items()},
    )
    return knobs_for(spec.policy, knobs, told=spec.scheduling.step_tokens != _DEFAULT_TOKENS)


def _ready(bands: Sequence[Band]) -> Ready:
    """What the engine says of itself at its start, as far as anything here asks."""
    longest = bands[-1].max_context_tokens
    model = ModelInfo("simulated", "", "", 0, 0, longest, longest, 1, 1)
    return Ready(model, [BandPlan(band.max_context_tokens, band.max_sequences, 1) for band in bands], 1, 1, None)
