"""How full and how fast the engine is, for whoever sends it work."""

from __future__ import annotations

from headrace.engines.llama.apply import Applier
from headrace.engines.llama.forward import Forward
from headrace.engines.llama.pressure import KvPressure
from headrace.engines.llama.residents import Residents
from headrace.engines.llama.step_costs import StepCosts
from headrace.kv.budget import BandBudget
from headrace.messages.engine import EngineLoad
from headrace.scheduling.cost import CostModel, prefill_pairs
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.step import StepPlan

REPORT_INTERVAL_S = 0.05


class LoadReport:
    """Builds ``EngineLoad`` from the engine's parts, and knows when one is due."""

    def __init__(
        self, residents: Residents, applier: Applier, forward: Forward, pressure: KvPressure, budget: BandBudget
    ) -> None:
        self._residents = residents
        self._applier = applier
        self._forward = forward
        self._pressure = pressure
        bands = residents.bands
        self._token_bytes = [budget.band_token_bytes(index) for index in range(len(bands))]
        tokens = [band.max_context_tokens * band.max_sequences for band in bands]
        self._total_tokens = sum(tokens)
        self._total_bytes = sum([many * each for many, each in zip(tokens, self._token_bytes, strict=True)])
        self._reported_counts = (-1, -1, "")
        self._reported_s = 0.0

    def due(self, now_s: float) -> bool:
        """True when sequences came or went, memory's level changed, or the last report is old; else steps are kept
        short without one."""
        counts = (
            len(self._residents.running),
            len(self._residents.waiting) + len(self._residents.fetching),
            self._pressure.level,
        )
        if counts == self._reported_counts and now_s - self._reported_s < REPORT_INTERVAL_S:
            return False
        self._reported_counts, self._reported_s = counts, now_s
        return True

    def load(
        self, plan: StepPlan, step_s: float, costs: StepCosts, knobs: SchedulingKnobs, batch_cap: int
    ) -> EngineLoad:
        """After a step of ``plan`` that took ``step_s``."""
        model, known = costs.model, costs.known
        residents, forward, pressure = self._residents, self._forward, self._pressure
        parking = residents.parking
        reuse = residents.reuse
        running = residents.running.values()
        used, used_bytes = 0, 0
        for sequence in running:
            slot = sequence.state.slot
            assert slot is not None
            used += sequence.state.computed_tokens
            used_bytes += sequence.state.computed_tokens * self._token_bytes[slot.band]
        return EngineLoad(
            running=len(running),
            waiting=len(residents.waiting) + len(residents.fetching),
            kv_used_tokens=used,
            kv_total_tokens=self._total_tokens,
            kv_used_bytes=used_bytes,
            kv_total_bytes=self._total_bytes,
            waiting_prefill_tokens=sum([s.state.uncached_tokens for s in residents.waiting.values()]),
            step_s=step_s,
            decode_tokens=forward.decode_tokens,
            prefill_tokens=forward.prefill_tokens,
            threads=forward.threads,
            step_error=model.error,
            prefill_tokens_per_s=prefill_rate(model, knobs) if known else 0.0,
            decode_step_s=self._decode_step_s(model) if known else 0.0,
            batch_cap=batch_cap,
            fragmentation=residents.slots.most_fragmented(),
            parked=len(parking),
            moves=self._applier.moves,
            victims=self._applier.victims,
            cut_steps=forward.cut_steps,
            strategy=plan.strategy,
            reason=plan.reason,
            prefix_query_tokens=reuse.totals.prompt_tokens,
            prefix_hit_tokens=reuse.totals.cached_tokens,
            prefix_saved_s=reuse.totals.saved_s,
            idle_residents=reuse.residents,
            idle_resident_tokens=reuse.resident_tokens,
            kv_level=pressure.level,
            kv_budget_tokens=pressure.budget_tokens,
            kv_held_tokens=pressure.held_tokens,
            kv_promised_tokens=pressure.promised_tokens,
            kv_drain_s=pressure.drain_s,
            kv_level_entries=dict(pressure.entries),
            kv_waste=self._waste(),
            kv_parked=pressure.parked,
            parked_bytes=parking.bytes,
            spilled=parking.on_disk,
            spilled_bytes=parking.disk_bytes,
            kv_spills=parking.spilled,
            kv_dropped=parking.dropped,
            kv_conversions=residents.conversions,
            tiers=None if residents.tiering is None else residents.tiering.load(),
        )

    def _waste(self) -> float:
        """Of the cells of streams in which somebody runs, the share that holds nothing."""
        cells = used = 0
        for sequence in self._residents.running.values():
            slot = sequence.state.slot
            assert slot is not None
            cells += self._residents.bands[slot.band].max_context_tokens
            used += sequence.state.computed_tokens
        return 1 - used / cells if cells else 0.0

    def _decode_step_s(self, model: CostModel) -> float:
        """Predicted: one decode step of all running sequences and one more in the shortest band."""
        rows = [0] * len(self._residents.bands)
        cells = [0] * len(self._residents.bands)
        for sequence in self._residents.running.values():
            slot = sequence.state.slot
            assert slot is not None
            rows[slot.band] += 1
            cells[slot.band] += sequence.state.computed_tokens
        rows[0] += 1
        return sum([model.call_s(count, context) for count, context in zip(rows, cells, strict=True) if count])


def prefill_rate(model: CostModel, knobs: SchedulingKnobs) -> float:
    """Predicted tokens per second of a full chunk at the beginning of a prompt."""
    chunk = min(knobs.max_prefill_tokens, knobs.step_tokens)
    return chunk / max(1e-9, model.call_s(chunk, 0, prefill_pairs(0, chunk)))
