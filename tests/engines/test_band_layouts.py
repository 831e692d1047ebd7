"""Layouts of a band's memory, each against the engine: the same answers, and what sets each apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.engines.llama.build import build
from headrace.engines.llama.library import Library
from headrace.engines.llama.parking import Parking
from headrace.engines.llama.spill import SpillStore
from headrace.engines.llama.weights import Weights
from headrace.errors import ConfigError
from headrace.kv.band_layout import CHUNKED_MICRO_BATCH_TOKENS, BandLayout, layout_problem
from headrace.messages.engine import Start
from headrace.models.tiny_kinds import kinds, make_tiny_kind
from headrace.scheduling.bands import Band
from tests.engines.harness import (
    BAND,
    SMALL_CHUNKS,
    WITH_LOGPROBS,
    Amended,
    Model,
    Results,
    Wishes,
    assert_all_same_or_near_tie,
    engine_core,
    request,
    run,
    run_one,
    sound,
    submits,
)

LAYOUTS: tuple[BandLayout, ...] = ("contiguous", "paged", "chunked", "streaming")
POOL = Band(256, 4, layout="paged")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_what_separate_streams_write(smollm2: Model, layout: BandLayout) -> None:
    """A crowd that comes in turns, some of it parked and moved on the way."""
    asked = submits(smollm2, 6)
    arrivals = {0: asked[:3], 4: asked[3:5], 9: asked[5:]}
    with engine_core(smollm2, BAND, limits=SMALL_CHUNKS) as core:
        expected = run(core, arrivals)
    wishes = Wishes([("move", 0), ("park", 1), ("rest", 2), ("park", 0)])
    with engine_core(smollm2, Band(256, 8, layout=layout), limits=SMALL_CHUNKS, policy=Amended(wishes)) as core:
        results = run(core, arrivals, each_step=sound(core))
    assert wishes.wanted == []
    assert_all_same_or_near_tie(results, expected)


def test_a_pool_decodes_in_one_pass_whoever_is_missing(tiny: Model) -> None:
    """Four run, the second and the third end first; the two that are left share a pass without a row for the streams
    between them, which count for no holes, and nothing is moved. Separate streams have holes there."""
    asked = [request(f"r{n}", tiny.tokens("stone water"), max_tokens=4 + 20 * (n in (0, 3))) for n in range(4)]

    def sizes_and_holes(band: Band) -> tuple[set[int], float]:
        """Rows of the passes while two run, and the most fragmentation then."""
        with engine_core(tiny, band) as core:
            core.one_by_one_limit = 1
            context, rows, holes = core.residents.context(0), set[int](), [0.0]
            decode = context.decode

            def counted(cut: Callable[[], bool] | None = None) -> bool:
                if len(core.residents.running) == 2:
                    rows.add(context.batch.size)
                    holes.append(core.load().fragmentation)
                return decode(cut)

            context.decode = counted  # type: ignore[method-assign]
            results = run(core, asked)
            assert core.load().moves == 0
        assert all(result.finish == "length" for result in results.values())
        return rows, max(holes)

    assert sizes_and_holes(POOL) == ({2}, 0.0)
    rows, holes = sizes_and_holes(Band(256, 4))
    assert rows != {2} and holes == 0.5


def test_a_prefix_in_a_pool_is_shared_and_not_copied(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one runs, another begins with its cells: libllama hands out no state for it, and both go on as they would
    alone."""
    tokens = smollm2.tokens("The mill stood at the bend of the river. " * 20)[:150]
    first = request("first", tokens, max_tokens=30, sampling=WITH_LOGPROBS)
    second = request("second", [*tokens, *smollm2.tokens("And")], max_tokens=20, sampling=WITH_LOGPROBS)
    with engine_core(smollm2, POOL) as core:
        expected = {submit.request_id: run_one(core, submit) for submit in (first, second)}
    with engine_core(smollm2, POOL) as core:
        context = core.residents.context(0)
        monkeypatch.setattr(context, "save_stream", lambda *_, **__: pytest.fail("a state was copied"))
        results = run(core, {0: [first], 3: [second]}, each_step=sound(core))
    assert results["second"].outputs[0].cached_tokens >= 128
    assert_all_same_or_near_tie(results, expected)


def test_every_sequence_of_a_pool_can_be_as_long_as_its_band_at_once(tiny: Model) -> None:
    """The pool is as large as all streams: nobody fails for want of cells, not in a scattered one either."""
    short = [request(f"s{n}", tiny.tokens("stone water " * (n + 1)), max_tokens=10) for n in range(4)]
    long = [request(f"l{n}", tiny.tokens("stone water river " * 80)[: 200 + n], max_tokens=None) for n in range(4)]
    with engine_core(tiny, POOL) as core:
        results = run(core, {0: short, 6: long}, each_step=sound(core))
    assert all(result.error is None for result in results.values())
    for number in range(4):
        assert 200 + number + len(results[f"l{number}"].tokens) >= 256 or results[f"l{number}"].finish == "stop"


@pytest.mark.parametrize(
    "bands", [(Band(256, 2, layout="paged"), Band(512, 3)), (Band(256, 2), Band(512, 3, "q8_0", "paged"))]
)
def test_kv_moves_between_a_pool_and_streams(smollm2: Model, bands: tuple[Band, ...]) -> None:
    """A sequence that outgrows its band takes its KV along, out of a pool and into one, converted where need be."""
    tokens = smollm2.tokens("The mill stood at the bend of the river. " * 60)[:240]
    asked = request("a", tokens, max_tokens=40)
    with engine_core(smollm2, Band(512, 1)) as core:
        expected = run_one(core, asked)
    with engine_core(smollm2, *bands, limits=SMALL_CHUNKS) as core:
        core.set_knobs(msgspec.structs.replace(core.knobs, max_prefill_tokens=64, band_margin_tokens=0))
        computed: list[int] = []

        def look(_number: int, _output: object) -> None:
            assert core.check_integrity() is None
            computed.extend([s.state.computed_tokens for s in core.residents.running.values()])

        result = run(core, [asked], each_step=look)["a"]
    assert computed == sorted(computed)  # never computed again
    assert result.text == expected.text


@pytest.mark.parametrize(
    ("layout", "file_bytes", "place"),
    [("contiguous", 2**30, "ram"), ("streaming", 2**30, "disk"), ("streaming", 1, "ram")],
)
def test_a_streaming_band_parks_in_files_at_once(
    tiny: Model, tmp_path: Path, layout: BandLayout, file_bytes: int, place: str
) -> None:
    """Although memory is free; without room in the files in memory. Another band's KV goes to memory. It comes back
    either way, and nothing is left."""
    asked = request("a", tiny.tokens("stone water " * 20), max_tokens=8)
    with engine_core(tiny, Band(256, 2)) as core:
        expected = run_one(core, asked)
    parking = Parking(2**30, SpillStore(tmp_path, file_bytes))
    with engine_core(tiny, Band(256, 2, layout=layout), parking=parking) as core:
        results = Results()
        core.submit(asked)
        results.take(core.step())
        core.residents.evict(core.residents.running["a"], core._rates())
        assert [where for _, where, _, _ in parking.places()] == [place]
        assert core.check_integrity() is None
        while core.has_work:
            results.take(core.step())
        assert len(parking) == 0
    assert results["a"].text == expected.text


def test_a_chunked_band_computes_fewer_tokens_together(tiny: Model) -> None:
    """A prompt of several micro-batches in one step, in as many cells as ever."""
    with engine_core(tiny, Band(1024, 1, layout="chunked")) as core:
        context = core.residents.context(0)
        assert context.micro_batch_tokens == CHUNKED_MICRO_BATCH_TOKENS
        assert core.band_plans()[0].layout == "chunked"
        result = run_one(core, request("a", tiny.tokens("stone water " * 150), max_tokens=4))
    assert result.finish == "length"


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_has_a_layout_or_is_refused_with_the_reason(
    library: Library, tmp_path: Path, kind: str, layout: BandLayout
) -> None:
    """Every kind of attention: a server starts and answers, or says at start which band and why."""
    path = make_tiny_kind(kind, tmp_path / "model.gguf")
    start = Start(str(path), kind, [(256, 2)], self_measure=False, threads=1, layouts=[layout])
    weights = Weights(library, path)
    problem = layout_problem(layout, weights.kv_layout())
    weights.close()
    assert (problem is None) == (layout != "paged" or kind in ("mha", "gqa", "mqa", "latent", "latent-indexed"))
    if problem is not None:
        with pytest.raises(ConfigError, match="cannot be paged") as caught:
            build(start)
        assert caught.value.where == "engine.bands[0].layout"
        return
    engine = build(start)
    try:
        assert engine.ready.bands[0].layout == layout
        results = run(engine.core, [request(name, range(5, 25), max_tokens=4) for name in ("a", "b")])
        assert all(result.error is None for result in results.values())
        assert engine.core.check_integrity() is None
    finally:
        engine.core.close()
