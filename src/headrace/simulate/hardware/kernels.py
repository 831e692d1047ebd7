"""Measured kernels in place of a roofline's formulas, in the form of aiconfigurator's Parquet tables.

A folder holds any of ``*gemm_perf.parquet``, ``*custom_allreduce_perf.parquet``, ``*context_attention_perf.parquet``
and ``*generation_attention_perf.parquet``; times are milliseconds of one kernel. What a table does not reach (another
type, heads that were not measured, a matrix beyond the largest) is left to the formulas: an answer is then None.

Reading Parquet needs the package pyarrow (``headrace[tables]``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from headrace.errors import ConfigError
from headrace.simulate.hardware.interpolate import Curve, Surface, bracket
from headrace.simulate.hardware.precision import WeightType

_MS = 1e-3
_GEMM_TYPES: Final[dict[WeightType, str]] = {"f16": "bfloat16", "fp8": "fp8"}
_KV_TYPES: Final = {"bf16": "bfloat16", "f16": "bfloat16", "fp8": "fp8"}


class Kernels(Protocol):
    """Seconds of one kernel, or None where it was not measured. ``source`` says where they are from."""

    @property
    def source(self) -> str: ...

    def matrix_s(self, stored: WeightType, rows: int, inputs: int, outputs: int) -> float | None:
        """``rows`` through a matrix."""

    def all_reduce_s(self, message_bytes: float, members: int) -> float | None:
        """A sum of 16-bit numbers over ``members``, at every one of them."""

    def decode_attention_s(
        self, heads: int, kv_heads: int, head_entries: int, kv: str, decodes: int, context_tokens: float
    ) -> float | None:
        """One layer's, of ``decodes`` sequences with ``context_tokens`` each."""

    def prompt_attention_s(self, heads: int, kv_heads: int, head_entries: int, kv: str, tokens: float) -> float | None:
        """One layer's, of a prompt from its beginning."""


class ParquetKernels:
    """``Kernels`` of a folder. Raises ConfigError for a folder without any of the tables, or without pyarrow."""

    def __init__(self, folder: Path) -> None:
        tables = {
            name: sorted(folder.glob(f"*{name}_perf.parquet"))
            for name in ("gemm", "custom_allreduce", "context_attention", "generation_attention")
        }
        if not any(tables.values()):
            raise ConfigError(f"{folder} holds no table of kernels (*gemm_perf.parquet and the like)")
        self.source = f"kernels measured in {folder.name}"
        self._gemm = {kind: _Gemm(rows) for kind, rows in _grouped(tables["gemm"], ("gemm_dtype",), _GEMM).items()}
        self._all_reduce = {
            members: Curve([(size, latency * _MS) for size, latency in rows])
            for (members, backend), rows in _grouped(
                tables["custom_allreduce"], ("num_gpus", "backend"), ("message_size", "latency")
            ).items()
            if backend == "vllm_graph"
        }
        self._decode: dict[tuple[int, int, int, str], Surface] = {}
        for place, rows in _grouped(
            tables["generation_attention"], _ATTENTION, ("batch_size", "step", "latency")
        ).items():
            curves: dict[float, list[tuple[float, float]]] = {}
            for batch, step, latency in rows:
                curves.setdefault(batch, []).append((step, latency * _MS))
            if place[-1] == 0:
                self._decode[place[:4]] = Surface({batch: Curve(line) for batch, line in curves.items()})
        self._prompt: dict[tuple[int, int, int, str], Curve] = {}
        for place, rows in _grouped(tables["context_attention"], _ATTENTION, ("batch_size", "isl", "latency")).items():
            line = [(tokens, latency * _MS) for batch, tokens, latency in rows if batch == 1]
            if place[-1] == 0 and line:
                self._prompt[place[:4]] = Curve(line)

    def matrix_s(self, stored: WeightType, rows: int, inputs: int, outputs: int) -> float | None:
        table = self._gemm.get((_GEMM_TYPES.get(stored, ""),))
        return None if table is None else table.time_s(rows, inputs, outputs)

    def all_reduce_s(self, message_bytes: float, members: int) -> float | None:
        curve = self._all_reduce.get(members)
        return None if curve is None else curve(message_bytes)

    def decode_attention_s(
        self, heads: int, kv_heads: int, head_entries: int, kv: str, decodes: int, context_tokens: float
    ) -> float | None:
        surface = self._decode.get((heads, kv_heads, head_entries, _KV_TYPES.get(kv, "")))
        return None if surface is None else surface(decodes, context_tokens)

    def prompt_attention_s(self, heads: int, kv_heads: int, head_entries: int, kv: str, tokens: float) -> float | None:
        curve = self._prompt.get((heads, kv_heads, head_entries, _KV_TYPES.get(kv, "")))
        return None if curve is None else curve(tokens)


_GEMM: Final = ("k", "n", "m", "latency")
_ATTENTION: Final = ("num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size")


class _Gemm:
    """Seconds per weight over inputs, outputs (both by their logarithms) and rows."""

    def __init__(self, rows: Iterable[Sequence[float]]) -> None:
        points: dict[tuple[float, float], list[tuple[float, float]]] = {}
        for inputs, outputs, count, latency in rows:
            points.setdefault((inputs, outputs), []).append((count, latency * _MS / (inputs * outputs)))
        self._curves = {place: Curve(line) for place, line in points.items()}
        self._inputs = sorted({inputs for inputs, _ in points})
        self._outputs = sorted({outputs for _, outputs in points})

    def time_s(self, rows: int, inputs: int, outputs: int) -> float | None:
        """None outside of what was measured."""
        if not (self._inputs[0] <= inputs <= self._inputs[-1] and self._outputs[0] <= outputs <= self._outputs[-1]):
            return None
        total, weights = 0.0, 0.0
        for near_inputs, share_inputs in _around(self._inputs, inputs):
            for near_outputs, share_outputs in _around(self._outputs, outputs):
                curve = self._curves.get((near_inputs, near_outputs))
                if curve is not None:
                    total += share_inputs * share_outputs * curve(rows)
                    weights += share_inputs * share_outputs
        return total / weights * inputs * outputs if weights > 0 else None


def _around(places: Sequence[float], place: float) -> list[tuple[float, float]]:
    """The measured places around, each with its share by logarithms."""
    low, high, _ = bracket(places, place)
    if low == high or place == places[low]:
        return [(places[low], 1.0)]
    share = math.log(place / places[low]) / math.log(places[high] / places[low])
    return [(places[low], 1 - share), (places[high], share)]


def _grouped(
    files: Sequence[Path], keys: Sequence[str], values: Sequence[str]
) -> Mapping[tuple[Any, ...], list[tuple[float, ...]]]:
    """Rows of all files by their ``keys``. Raises ConfigError."""
    found: dict[tuple[Any, ...], list[tuple[float, ...]]] = {}
    for file in files:
        columns = _columns(file, (*keys, *values))
        for row in zip(*columns, strict=True):
            found.setdefault(tuple(row[: len(keys)]), []).append(tuple(row[len(keys) :]))
    return found


def _columns(file: Path, names: Sequence[str]) -> list[list[Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ConfigError("reading Parquet tables needs the package pyarrow: pip install 'headrace[tables]'") from error
    try:
        table = read_table(file, columns=list(dict.fromkeys(names)))
        return [table[name].to_pylist() for name in names]
    except (ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
