"""Kernels from Parquet tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.plan.architectures import architectures
from headrace.simulate.hardware.kernels import ParquetKernels
from headrace.simulate.hardware.profiles import hardware_named
from headrace.simulate.hardware.roofline import Parallel, Roofline

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (headrace[tables])")


def write(path: Path, columns: dict[str, list[Any]]) -> None:
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A microsecond for 1,024 x 1,024 weights and row; sums of a megabyte in 20 us; attention by context alone."""
    gemm = [(m, n, k) for m in (1, 100) for n in (1024, 16384) for k in (1024, 16384)]
    write(
        tmp_path / "x__gemm_perf.parquet",
        {
            "gemm_dtype": ["bfloat16"] * len(gemm),
            "m": [m for m, _, _ in gemm],
            "n": [n for _, n, _ in gemm],
            "k": [k for _, _, k in gemm],
            "latency": [1e-3 * m * n * k / 2**20 for m, n, k in gemm],
        },
    )
    write(
        tmp_path / "x__custom_allreduce_perf.parquet",
        {
            "num_gpus": [2, 2, 2],
            "backend": ["vllm_graph", "vllm_graph", "vllm_eager"],
            "message_size": [0, 1_000_000, 1_000_000],
            "latency": [0.005, 0.02, 9.0],
        },
    )
    write(
        tmp_path / "x__generation_attention_perf.parquet",
        {
            "batch_size": [1, 1, 8, 8],
            "step": [0, 1000, 0, 1000],
            "latency": [0.0, 1.0, 0.0, 8.0],
            "num_heads": [32] * 4,
            "num_key_value_heads": [8] * 4,
            "head_dim": [128] * 4,
            "kv_cache_dtype": ["bfloat16"] * 4,
            "window_size": [0] * 4,
        },
    )
    return tmp_path


def test_kernels_are_looked_up_and_interpolated(folder: Path) -> None:
    kernels = ParquetKernels(folder)
    assert kernels.matrix_s("f16", 50, 4096, 4096) == pytest.approx(50 * 16 * 1e-6)
    assert kernels.matrix_s("f16", 50, 512, 4096) is None
    assert kernels.matrix_s("fp4", 50, 4096, 4096) is None
    assert kernels.all_reduce_s(500_000, 2) == pytest.approx(12.5e-6)
    assert kernels.all_reduce_s(500_000, 4) is None
    assert kernels.decode_attention_s(32, 8, 128, "bf16", 4, 500) == pytest.approx(2e-3)
    assert kernels.decode_attention_s(32, 8, 128, "fp8", 4, 500) is None
    assert kernels.prompt_attention_s(32, 8, 128, "bf16", 500) is None


def test_a_roofline_takes_what_was_measured_and_the_formula_for_the_rest(folder: Path) -> None:
    """Attention of the table on one rank; on two, heads that it does not have are computed."""
    h200, llama = hardware_named("h200"), architectures()["llama-3.1-8b"]
    times = Roofline(h200, llama, kernels=ParquetKernels(folder))
    assert times.call_s(1, 999) - times.call_s(1, 499) == pytest.approx(32 * 0.5e-3, rel=1e-6)
    two = Roofline(h200, llama, parallel=Parallel(2), kernels=ParquetKernels(folder))
    plain = Roofline(h200, llama, parallel=Parallel(2))
    assert two.call_s(1, 999) - two.call_s(1, 499) == pytest.approx(plain.call_s(1, 999) - plain.call_s(1, 499))


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no table"):
        ParquetKernels(tmp_path)
    (tmp_path / "x__gemm_perf.parquet").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        ParquetKernels(tmp_path)
