"""Models, loaded once a session, and a small core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.library import Library
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.models.store import resolve
from headrace.models.tiny import make_tiny_gguf
from tests.engines.harness import BAND, SMALL_CHUNKS, Model, Reference, Result, engine_core, run_one, submits
from tests.engines.small_core import BANDS, LIMITS


@pytest.fixture(scope="session")
def library() -> Library:
    """libllama, loaded into this process."""
    return llama_library.load()


def _load(library: Library, path: Path) -> Model:
    weights = Weights(library, path)
    return Model(library, weights, Vocabulary(weights))


@pytest.fixture(scope="session")
def tiny(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The synthetic model: noise, but libllama's real machinery at hardly any cost."""
    model = _load(library, make_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    yield model
    model.weights.close()


@pytest.fixture(scope="session")
def smollm2(library: Library) -> Iterator[Model]:
    """The real model."""
    model = _load(library, resolve("smollm2"))
    yield model
    model.weights.close()


@pytest.fixture(scope="module")
def tiny_reference(tiny: Model) -> Iterator[Reference]:
    """The plain loop over the synthetic model."""
    reference = Reference(tiny, 1024)
    yield reference
    reference.close()


@pytest.fixture(scope="module")
def reference(smollm2: Model) -> Iterator[Reference]:
    """The plain loop over the real model."""
    loop = Reference(smollm2, 1024)
    yield loop
    loop.close()


@pytest.fixture
def expected(tiny: Model) -> dict[str, Result]:
    """What each of ``submits(tiny, 8)`` says when it is alone."""
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        return {submit.request_id: run_one(core, submit) for submit in submits(tiny, 8)}


@pytest.fixture
def core(tiny: Model) -> Iterator[EngineCore]:
    """A small core: two bands, five streams."""
    with engine_core(tiny, *BANDS, limits=LIMITS) as core:
        yield core
