"""Which lane targets this machine can meet at all: arithmetic on the engine's self-measurement. Pure.

The prediction is for a lane's typical request on an otherwise idle machine, so it is the best case: a
target missed here is missed under any load, by any policy; one met here may still be missed under load.

- TTFT = prompt tokens / prefill rate + one step overhead for each prefill chunk
- TPOT = 1 / single-stream decode rate (measured over whole steps: the overhead is in it), and never less
  than the step overhead
- E2E = TTFT + (output tokens - 1) * TPOT
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.config.schema import Config
from headrace.lanes.lane import Lane
from headrace.messages.engine import SelfMeasurement


@dataclass(frozen=True)
class TargetFeasibility:
    """One SLO target (``p99_ttft_s``, ...) beside the prediction for it, both in seconds."""

    name: str
    target_s: float
    predicted_s: float

    @property
    def met(self) -> bool:
        return self.predicted_s <= self.target_s


@dataclass(frozen=True)
class LaneFeasibility:
    """The prediction for one lane's typical request, and its targets (empty: the lane has no SLO)."""

    lane: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    e2e_s: float
    targets: tuple[TargetFeasibility, ...]

    @property
    def met(self) -> bool:
        """Whether every target can be met; true for a lane without targets."""
        return all(target.met for target in self.targets)


def lane_feasibility(name: str, lane: Lane, measurement: SelfMeasurement, *, chunk_tokens: int) -> LaneFeasibility:
    """The prediction for one lane; prompts are computed ``chunk_tokens`` a step. A rate of 0 is endless."""
    prompt_tokens, output_tokens = lane.typical_prompt_tokens, lane.typical_output_tokens
    chunks = math.ceil(prompt_tokens / chunk_tokens)
    prefill_s = _seconds(prompt_tokens, measurement.prefill_tokens_per_s)
    ttft_s = prefill_s + chunks * measurement.step_overhead_s
    tpot_s = max(_seconds(1, measurement.decode_tokens_per_s), measurement.step_overhead_s)
    gaps = max(0, output_tokens - 1)
    e2e_s = ttft_s + gaps * tpot_s if gaps else ttft_s
    predictions = (
        ("p99_ttft_s", lane.slo.p99_ttft_s, ttft_s),
        ("p99_tpot_s", lane.slo.p99_tpot_s, tpot_s),
        ("p99_e2e_s", lane.slo.p99_e2e_s, e2e_s),
    )
    return LaneFeasibility(
        lane=name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        targets=tuple(
            TargetFeasibility(name=target_name, target_s=target_s, predicted_s=predicted_s)
            for target_name, target_s, predicted_s in predictions
            if target_s is not None
        ),
    )


def report(config: Config, measurement: SelfMeasurement) -> list[LaneFeasibility]:
    """Every lane's prediction, most urgent lane first (ties by name)."""
    scheduling = config.engine.scheduling
    chunk_tokens = min(scheduling.max_prefill_tokens, scheduling.step_tokens)
    ordered = sorted(config.lanes.items(), key=lambda item: (item[1].priority, item[0]))
    return [lane_feasibility(name, lane, measurement, chunk_tokens=chunk_tokens) for name, lane in ordered]


def _seconds(tokens: int, tokens_per_s: float) -> float:
    return tokens / tokens_per_s if tokens_per_s > 0 else math.inf
