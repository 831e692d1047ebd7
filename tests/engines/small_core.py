"""A core with two small bands."""

from __future__ import annotations

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs

BANDS = (Band(64, 3), Band(256, 2))


LIMITS = SchedulingKnobs(step_tokens=24, max_prefill_tokens=10, band_margin_tokens=8)
