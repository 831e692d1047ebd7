"""The plan is what libllama really allocates, for every kind of attention that the installed one knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.context import Context
from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.errors import ConfigError
from headrace.kv.entry_types import ENTRY_TYPES
from headrace.kv.layout import CacheType, KvLayout
from headrace.kv.libllama_memory import ContextShape, allocations, bytes_per_token, stream_bytes
from headrace.models.tiny import make_tiny_gguf
from headrace.models.tiny_kinds import kinds, make_tiny_kind
from headrace.plan.gguf_layout import describe_gguf
from headrace.scheduling.bands import Band
from tests.plan.contexts import created, read_log

TYPES = [name for name, kind in ENTRY_TYPES.items() if kind.ggml_type is not None]
OpenKind = Callable[[str], Weights]


@pytest.fixture(scope="module")
def library() -> Library:
    return llama_library.load()


@pytest.fixture(scope="module")
def open_kind(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenKind]:
    """The model of a kind, loaded once."""
    folder, loaded = tmp_path_factory.mktemp("kinds"), dict[str, Weights]()

    def open_one(kind: str) -> Weights:
        if kind not in loaded:
            loaded[kind] = Weights(library, make_tiny_kind(kind, folder / f"{kind}.gguf"))
        return loaded[kind]

    yield open_one
    for weights in loaded.values():
        weights.close()


def check(library: Library, weights: Weights, context_tokens: int, streams: int, shape: ContextShape) -> None:
    """Cells, layers and streams of every cache are equal, and bytes up to the log's rounding: a row of cells too many
    or too few (256 of 64 bytes at least, in each of 4 streams) would be 13 times that and more."""
    planned = allocations(weights.kv_layout(), context_tokens, streams, shape)
    with created(library, weights, context_tokens, streams, shape) as (handle, logged):
        assert handle, library.recent_log()
        assert sorted(logged.caches) == sorted((part.cells, part.layers, streams) for part in planned if part.cells)
        assert sum(part.bytes for part in planned) == pytest.approx(logged.total_bytes, abs=logged.tolerance_bytes)


@pytest.mark.parametrize("full_windows", [True, False])
@pytest.mark.parametrize("kind", kinds())
def test_every_kind(kind: str, full_windows: bool, library: Library, open_kind: OpenKind) -> None:
    """Also where the context is no multiple of 256, and with windows of their own size."""
    shape = ContextShape(micro_batch_tokens=256, full_windows=full_windows)
    check(library, open_kind(kind), 3000, 4, shape)
    check(library, open_kind(kind), 200, 4, shape)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", ["gqa", "window", "latent-indexed", "compressed", "linear"])
def test_every_type(kind: str, name: str, library: Library, open_kind: OpenKind) -> None:
    check(library, open_kind(kind), 2048, 4, ContextShape(CacheType.named(name)))


def test_bytes_that_the_log_shows_whole(library: Library, open_kind: OpenKind) -> None:
    """Where sizes are multiples of a quarter of a MiB, the log hides nothing: then they are equal to the byte."""
    for name, mib in (("f16", 32.0), ("q8_0", 17.0), ("q4_0", 9.0)):
        shape = ContextShape(CacheType.named(name))
        with created(library, open_kind("gqa"), 16_384, 4, shape) as (handle, logged):
            assert handle
            assert 4 * stream_bytes(open_kind("gqa").kv_layout(), 16_384, shape) == mib * (1 << 20)
            assert logged.total_bytes == mib * (1 << 20)


def test_the_engines_own_context(library: Library, open_kind: OpenKind) -> None:
    """What ``Context`` creates is what the plan of its band says, so that the budget holds."""
    for kind in kinds():
        weights, pieces = open_kind(kind), list[str]()
        with library.listening(pieces.append):
            context = Context(library, weights, Band(1000, 3), step_tokens=512, threads=1)
        logged = read_log("".join(pieces))
        context.close()
        planned = 3 * stream_bytes(weights.kv_layout(), 1000)
        assert planned == pytest.approx(logged.total_bytes, abs=logged.tolerance_bytes), kind
        assert not weights.layout_doubt


def compute(context: Context, tokens: int) -> int:
    """Add so many tokens to stream 0; the index of the last one's logits."""
    context.batch.clear()
    start = max(0, context.stream_tokens(0))
    last = context.batch.add_chunk([5] * tokens, start, 0, last_output=True, all_outputs=False)
    context.decode()
    return last


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_computes(kind: str, open_kind: OpenKind, library: Library) -> None:
    """The synthetic files are whole: libllama does not only allocate for them, it runs them."""
    context = Context(library, open_kind(kind), Band(1024, 1), step_tokens=512, threads=1)
    try:
        for tokens in (300, 1):
            assert np.isfinite(context.logits(compute(context, tokens))).all()
    finally:
        context.close()


@pytest.mark.parametrize(("kind", "caches"), [("mha", 1), ("gqa", 1), ("mqa", 1), ("latent", 1), ("latent-indexed", 2)])
def test_the_saved_state_grows_by_the_planned_bytes(
    kind: str, caches: int, library: Library, open_kind: OpenKind
) -> None:
    """libllama writes whole rows of a stream: 200 tokens more are 200 times the planned bytes per token, to the byte,
    beside 12 bytes a cell of each cache that are no KV (position, number of sequences, sequence)."""
    weights = open_kind(kind)
    context = Context(library, weights, Band(1024, 1), step_tokens=512, threads=1)
    try:
        sizes = []
        for _ in range(2):
            compute(context, 200)
            sizes.append(len(context.save_stream(0)))
        assert sizes[1] - sizes[0] == 200 * (bytes_per_token(weights.kv_layout()) + 12 * caches)
    finally:
        context.close()


def test_a_type_that_does_not_divide_the_heads_is_refused_by_both(library: Library, tmp_path: Path) -> None:
    """Heads of 16 entries hold no block of 32: the plan says so, and libllama creates no context."""
    weights = Weights(library, make_tiny_gguf(tmp_path / "narrow.gguf", embedding=64, heads=4, kv_heads=4))
    try:
        shape = ContextShape(CacheType.named("q8_0"))
        with created(library, weights, 512, 1, shape) as (handle, _):
            assert not handle
        with pytest.raises(ConfigError, match="blocks of 32 entries, and a head has 16"):
            stream_bytes(weights.kv_layout(), 512, shape)
    finally:
        weights.close()


def test_kinds_cover_what_a_layout_can_hold(tmp_path: Path) -> None:
    """Among the kinds: one row and two, windows, groups, indexer rows, states with and without attention."""
    layouts: dict[str, KvLayout] = {
        kind: describe_gguf(make_tiny_kind(kind, tmp_path / f"{kind}.gguf")).layout for kind in kinds()
    }
    caches = [cache for layout in layouts.values() for cache in layout.caches]
    assert {len(cache.rows) for cache in caches} == {1, 2}
    assert {cache.every for cache in caches} == {1, 4, 128}
    assert {cache.window_tokens for cache in caches} == {None, 128, 512}
    assert any(row.form == "index" for cache in caches for row in cache.rows)
    assert layouts["recurrent"].caches == () and layouts["recurrent"].states
    assert layouts["linear"].caches and layouts["linear"].states
    assert [layouts[kind].caches[0].rows[0].entries for kind in ("mha", "gqa", "mqa")] == [128, 64, 32]


def test_an_architecture_without_a_known_layout_is_planned_from_above(library: Library, open_kind: OpenKind) -> None:
    """The engine says why, and takes the most it can be: every layer, every token."""
    weights = Weights(library, open_kind("window").path)
    try:
        weights.path = Path("/nowhere.gguf")
        layout = weights.kv_layout()
        assert "there is no model file" in weights.layout_doubt
        assert stream_bytes(layout, 1024) == stream_bytes(open_kind("window").kv_layout(), 1024)
    finally:
        weights.close()
