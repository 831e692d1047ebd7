"""The files of a finished run, all in one folder, all made from its records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from headrace.bench.record_file import read_info, read_records
from headrace.bench.records import RunInfo
from headrace.bench.report.csv_report import groups_csv, latencies_csv
from headrace.bench.report.vllm_json import vllm_result
from headrace.bench.results.columns import Columns, build_columns
from headrace.bench.results.figures import Summary
from headrace.bench.results.summary_json import to_json
from headrace.errors import ConfigError

RECORDS = "records.jsonl"
SUMMARY = "summary.json"
VLLM = "vllm.json"
GROUPS = "groups.csv"
LATENCIES = "latencies.csv"
REPORT = "report.html"

PACKAGES = ("aiohttp", "matplotlib")
"""What the extra ``bench`` brings."""


def new_folder(path: Path) -> Path:
    """Create a folder for a run's files. Raises ConfigError when it cannot be, or holds a run already."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {error.strerror or error}", where="--output") from error
    if (path / RECORDS).exists():
        raise ConfigError(f"{path} holds a run already; name another folder", where="--output")
    return path


def read_columns(path: Path, warn: Callable[[str], None]) -> Columns:
    """The records of a run, from its folder or its records file. Raises ConfigError."""
    file = path / RECORDS if path.is_dir() else path
    return build_columns(read_info(file), read_records(file, warn))


def nothing_measured(info: RunInfo) -> str | None:
    """Why a run that was ended early has no figures: its load stopped before the warm-up was over. Else None."""
    if info.warmup_s < info.duration_s:
        return None
    when = "interrupted" if info.interrupted else "over"
    return (
        f"invalid: the run was {when} after {info.duration_s:.4g} s, before its warm-up of {info.warmup_s:g} s had "
        "ended; nothing was measured, so there are no figures"
    )


def check_packages() -> None:
    """Raises ConfigError when a package is missing that only the load generator needs."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"headrace bench needs {' and '.join(missing)}; pip install 'headrace[bench]' brings it")


def write_outputs(folder: Path, columns: Columns, summary: Summary) -> None:
    """Write everything but the records, which are there. Raises ConfigError."""
    from headrace.bench.report.html_report import html_report  # matplotlib takes most of a second to import

    texts = {
        SUMMARY: to_json(summary),
        VLLM: msgspec.json.format(msgspec.json.encode(vllm_result(columns, detailed=True)), indent=1),
        GROUPS: groups_csv(summary).encode(),
        LATENCIES: latencies_csv(summary).encode(),
        REPORT: html_report(summary, columns).encode(),
    }
    for name, data in texts.items():
        write_file(folder / name, data)


def write_file(path: Path, data: bytes) -> None:
    """Write the whole file or leave what was there. Raises ConfigError when it cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", where="--output") from error
