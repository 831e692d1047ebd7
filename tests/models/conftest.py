from __future__ import annotations

from pathlib import Path

import pytest

from headrace.models.catalog import CATALOG, ModelSpec
from tests.models.tiny_package import write_wheel


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    folder = tmp_path_factory.mktemp("wheelhouse")
    return folder, write_wheel(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model folder for this test."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def tiny_spec(wheelhouse: tuple[Path, ModelSpec], cache: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A small model in the catalog, which the real pip finds on disk instead of in an index."""
    folder, spec = wheelhouse
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(CATALOG, spec.name, spec)
    return spec
