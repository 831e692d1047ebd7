"""Step times from a profile of each layer's kernels, in the form that LLMServingSim writes.

A folder for a model at one tensor parallelism holds ``dense.csv`` (layer, tokens, time_us), ``per_sequence.csv``
(layer, sequences, time_us) and ``attention.csv`` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us: all decodes
with the same context). The times are one layer's; a model has as many as its configuration says. Mixed contexts are
looked up at their mean: a profile's correction for skewed ones (``skew_fit.csv``) is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.errors import ConfigError
from headrace.simulate.hardware.interpolate import Curve, Surface, bracket
from headrace.simulate.hardware.table_files import csv_rows
from headrace.simulate.hardware.work import Work

_PER_LAYER = {
    "layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1, "down_proj": 1,
}  # fmt: skip
"""How often a layer computes each."""
_ONCE = ("embedding", "final_layernorm")
_PER_SEQUENCE = ("lm_head", "sampler")
_US = 1e-6


class LayerProfile:
    """``StepTimes`` of a dense model of ``layers`` layers. ``step_s`` passes with every pass beside its kernels.

    Raises ConfigError for a folder that is not such a profile.
    """

    def __init__(self, folder: Path, *, layers: int, step_s: float = 0.0, copy_s_per_token: float = 0.0) -> None:
        if layers < 1:
            raise ConfigError(f"{folder}: a model has at least one layer, not {layers}")
        self.source = f"kernels measured in {folder}, {layers} layers"
        dense, sequences = _curves(folder / "dense.csv", "tokens"), _curves(folder / "per_sequence.csv", "sequences")
        for name in (*_PER_LAYER, *_ONCE):
            if name not in dense:
                raise ConfigError(f"{folder / 'dense.csv'}: the layer {name!r} is missing")
        for name in _PER_SEQUENCE:
            if name not in sequences:
                raise ConfigError(f"{folder / 'per_sequence.csv'}: the layer {name!r} is missing")
        self._dense = [(layers * times, dense[name]) for name, times in _PER_LAYER.items()]
        self._dense += [(1, dense[name]) for name in _ONCE]
        self._per_sequence = [sequences[name] for name in _PER_SEQUENCE]
        self._attention = _Attention(folder / "attention.csv")
        self._layers = layers
        self._step_s = step_s
        self._copy_s_per_token = copy_s_per_token
        self._rows_us: dict[int, float] = {}
        self._sampled_us: dict[int, float] = {}

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass of which only the sums are known (``Work.of_call`` says what is assumed)."""
        return self.pass_s(Work.of_call(rows, context_tokens, pairs))

    def pass_s(self, work: Work) -> float:
        """One forward pass."""
        rows = work.rows
        if not rows:
            return 0.0
        rows_us = self._rows_us.get(rows)
        if rows_us is None:
            rows_us = self._rows_us[rows] = sum([times * curve(rows) for times, curve in self._dense])
        sampled = max(1, work.sequences)  # the sampler computes a row for every sequence of the batch
        sampled_us = self._sampled_us.get(sampled)
        if sampled_us is None:
            sampled_us = self._sampled_us[sampled] = sum([curve(sampled) for curve in self._per_sequence])
        attention_us = self._attention(
            work.prompt_tokens,
            sum([chunk.done for chunk in work.chunks]),
            work.decodes,
            work.context_tokens / work.decodes if work.decodes else 0.0,
        )
        return self._step_s + _US * (rows_us + sampled_us + self._layers * attention_us)

    def move_s(self, tokens: int, band: int) -> float:
        """Copying a sequence's KV, which the profile does not hold."""
        return self._copy_s_per_token * tokens


class _Attention:
    """Over (prompt tokens, decodes) a grid, at each place of which there is a surface over both contexts."""

    def __init__(self, path: Path) -> None:
        points: dict[tuple[float, float], dict[float, list[tuple[float, float]]]] = {}
        for (chunk, before, decodes, context, time_us), _ in csv_rows(
            path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
        ):
            points.setdefault((chunk, decodes), {}).setdefault(before, []).append((context, time_us))
        if not points:
            raise ConfigError(f"{path} has no measurements")
        self._chunks = sorted({chunk for chunk, _ in points})
        self._decodes = sorted({decodes for _, decodes in points})
        self._surfaces = {
            place: Surface({before: Curve(line) for before, line in lines.items()}) for place, lines in points.items()
        }

    def __call__(self, prompt_tokens: int, before_tokens: int, decodes: int, context_tokens: float) -> float:
        low_c, high_c, share_c = bracket(self._chunks, prompt_tokens)
        low_d, high_d, share_d = bracket(self._decodes, decodes)
        if not prompt_tokens:
            high_c, share_c = low_c, 0.0
        if not decodes:
            high_d, share_d = low_d, 0.0
        corners = [
            [self._at(self._chunks[c], self._decodes[d], before_tokens, context_tokens) for d in (low_d, high_d)]
            for c in (low_c, high_c)
        ]
        below, above = [line[0] + share_d * (line[1] - line[0]) for line in corners]
        return max(0.0, below + share_c * (above - below))

    def _at(self, chunk: float, decodes: float, before_tokens: int, context_tokens: float) -> float:
        """At a place of the grid. Nothing was measured of an empty pass: it takes nothing. Where a combination is too
        large to have been measured, both halves were, and are added."""
        if not chunk and not decodes:
            return 0.0
        surface = self._surfaces.get((chunk, decodes))
        if surface is not None:
            return surface(before_tokens, context_tokens)
        return self._at(chunk, 0, before_tokens, 0.0) + self._at(0, decodes, 0, context_tokens)


def _curves(path: Path, axis: str) -> Mapping[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for (place, time_us), (layer,) in csv_rows(path, (axis, "time_us"), ("layer",)):
        points.setdefault(layer, []).append((place, time_us))
    return {layer: Curve(line) for layer, line in points.items()}
