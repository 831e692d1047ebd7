"""What every test folder may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import Served, headrace_server


@pytest.fixture(scope="session")
def headrace_server_config() -> str:
    """Configuration of the session's server: lanes as they come, plus names that SDK tests use."""
    return (
        "model:\n  aliases: [gpt-6-astra, gpt-3.5-turbo-instruct, 'ft:gpt-4o-mini:acemeco:suffix:abc123']\n"
        "server:\n  allow_model_delete: true\n"
    )


@pytest.fixture(scope="session")
def headrace_server_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the session's server keeps stored completions (``completions`` inside it)."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session", name="headrace_server")
def running_headrace_server(
    headrace_server_config: str, headrace_server_state: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One ``headrace serve`` with the real model for the whole session; tests leave it as they found it."""
    config = tmp_path_factory.mktemp("config") / "headrace.yaml"
    config.write_text(
        headrace_server_config + f"  store_dir: {headrace_server_state / 'completions'}\n", encoding="utf-8"
    )
    with headrace_server(["--config", str(config)]) as served:
        yield served
