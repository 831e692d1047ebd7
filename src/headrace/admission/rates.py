"""How fast the engine is: what a prediction is made with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from headrace.messages.engine import EngineLoad, Ready, SelfMeasurement
from headrace.scheduling.knobs import SchedulingKnobs

USUAL_BATCH: Final = 16
USUAL_MEMORY_S: Final = 180.0
_TICK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Rates of one engine. ``decode_step_s`` is one decode step of ``batch`` sequences, ``places`` how many
    sequences decode at once at most, ``chunk_tokens`` how many prompt tokens are computed between two decode steps
    at most, ``step_s`` what the last step took. A waiting sequence becomes ten priority points more urgent every
    ``ageing_s``."""

    prefill_tokens_per_s: float
    decode_step_s: float
    batch: int
    places: int
    chunk_tokens: int
    step_s: float = 0.0
    ageing_s: float = math.inf

    def decode_s(self, sequences: int) -> float:
        """One decode step of so many sequences. One more or less is one row more or less at the rate of prefill, but
        a smaller batch never takes longer, and never less than its share of the larger one."""
        if sequences < 1:
            return 0.0
        other_s = self.decode_step_s + (sequences - self.batch) / self.prefill_tokens_per_s
        if sequences >= self.batch:
            return other_s
        return max(self.decode_step_s * sequences / self.batch, other_s)

    @property
    def decode_token_s(self) -> float:
        """What an output token takes in a usual full batch: of ``USUAL_BATCH`` sequences, or of all places."""
        batch = min(USUAL_BATCH, self.places)
        return self.decode_s(batch) / batch

    def prefill_s(self, tokens: float) -> float:
        """Computing so many prompt tokens and nothing else: at least one step."""
        return max(tokens / self.prefill_tokens_per_s, self.decode_s(1))


@dataclass(slots=True)
class UsualTimes:
    """What a token has taken on average in the last minutes. What lanes ask for is compared over minutes
    (``admission.parts``): at the rates of the moment a machine that slows down would look like all of them asking for
    more at once."""

    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0
    _age_s: float = 0.0
    _noted_s: float = -math.inf

    def note(self, rates: EngineRates, now_s: float) -> None:
        """These are the rates since they were last noted; the first ones count until there are others."""
        passed_s, self._noted_s = now_s - self._noted_s, now_s
        first = math.isinf(passed_s)
        self._age_s += 0.0 if first else passed_s
        weight = 1.0 if first else -math.expm1(-passed_s / max(_TICK_S, min(USUAL_MEMORY_S, self._age_s)))
        self.prefill_token_s += weight * (1 / rates.prefill_tokens_per_s - self.prefill_token_s)
        self.decode_token_s += weight * (rates.decode_token_s - self.decode_token_s)


def rates_of(load: EngineLoad | None, ready: Ready | None, knobs: SchedulingKnobs) -> EngineRates | None:
    """What the engine says of itself: learned while serving, else measured at start. None when it knows neither."""
    if ready is None:
        return None
    # Not the knee of step time: whoever has a deadline that presses goes beyond it.
    places = [sum([band.max_sequences for band in ready.bands])]
    if knobs.max_num_seqs is not None:
        places.append(knobs.max_num_seqs)
    if load is not None and load.prefill_tokens_per_s > 0 and load.decode_step_s > 0:
        batch, prefill_tokens_per_s, decode_step_s = load.running + 1, load.prefill_tokens_per_s, load.decode_step_s
    elif ready.measurement is not None and _complete(ready.measurement):
        measured = ready.measurement
        batch, prefill_tokens_per_s = 1, measured.prefill_tokens_per_s
        decode_step_s = max(1 / measured.decode_tokens_per_s, measured.step_overhead_s)
    else:
        return None
    return EngineRates(
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_step_s=decode_step_s,
        batch=batch,
        places=max(1, min(places)),
        chunk_tokens=_chunk_tokens(knobs, prefill_tokens_per_s, decode_step_s),
        step_s=0.0 if load is None else load.step_s,
        ageing_s=knobs.ageing_s,
    )


def _chunk_tokens(knobs: SchedulingKnobs, prefill_tokens_per_s: float, decode_step_s: float) -> int:
    """As many prompt tokens as fit into an urgent step beside the decodes, within the limits for chunks."""
    fitting = int((knobs.urgent_step_s - decode_step_s) * prefill_tokens_per_s)
    return min(knobs.max_prefill_tokens, max(knobs.min_prefill_tokens, fitting))


def _complete(measurement: SelfMeasurement) -> bool:
    return measurement.prefill_tokens_per_s > 0 and measurement.decode_tokens_per_s > 0
