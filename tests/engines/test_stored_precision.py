"""Stores of KV blocks under bands of different precision: a block goes where its precision will do, converted where it
is finer than the band, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.engines.llama.convert_state import StreamRows, converted, read_rows
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.tiering import COPY_S
from headrace.kv.precision import KvDtype
from headrace.messages.engine import Submit
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from tests.engines.harness import Model, engine_core, request, run, run_one, said, sound
from tests.engines.prefixes import BOTH_MODELS, OFF, TOKEN_BY_TOKEN, ask, begun, cached, steady, words
from tests.engines.test_tiering import settle, stored_core, stores
from tests.kv.tiers.blocks import ManualWorker

TWINS = (Band(512, 1, "q8_0"), Band(512, 1))
"""Who asks for nothing goes to the first, who asks for F16 to the second."""
COARSE, FINE = 0, 1


@pytest.fixture
def model(model_name: str, request: pytest.FixtureRequest) -> Model:
    """One of the models."""
    found: Model = request.getfixturevalue(model_name)
    return found


def fine(submit: Submit) -> Submit:
    """The same for a band of F16."""
    return msgspec.structs.replace(submit, min_kv_dtype="f16")


def alone(model: Model, band: Band, prompt: Sequence[int]) -> object:
    """What is said at the band's precision without reuse."""
    with engine_core(model, band, limits=TOKEN_BY_TOKEN, prefix=OFF) as core:
        return said(run_one(steady(core), ask("again", prompt)))


def ask_and_displace(
    core: EngineCore, prompt: list[int], where: Callable[[Submit], Submit] = lambda submit: submit
) -> None:
    """Have ``prompt`` computed in one of ``TWINS``, and then its stream needed by somebody else."""
    for name, tokens in (("first", prompt), ("other", [*reversed(prompt)])):
        run_one(core, where(ask(name, tokens)))
        settle(core)


def rows(core: EngineCore, band: int, tokens: int) -> StreamRows:
    """What stream 0 of a band holds."""
    found = read_rows(core.residents.context(band).save_stream(0), stream=0, streams=1, tokens=tokens)
    assert found is not None
    return found


@BOTH_MODELS
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_blocks_of_a_band_come_back_in_a_band_of_their_precision_to_the_bit(
    model: Model, dtype: KvDtype, tmp_path: Path
) -> None:
    """From RAM, and from files after a restart. They take what their precision takes."""
    prompt = words(model, 270)
    band = Band(512, 1, dtype)
    expected = alone(model, band, prompt)
    with stored_core(model, band, folder=tmp_path) as core:
        ask_and_displace(core, prompt)
        again = run_one(core, ask("again", prompt))
        settle(core)
        assert begun(core) == {"compute": 2, "ram": 1}
        assert cached(again) == 256 and said(again) == expected
        (kind,) = {node.kind for node in stores(core).store.tree.nodes()}
        assert kind.raw_bytes == 128 * core._token_bytes[0]
        assert core.residents.conversions == 0
    with stored_core(model, band, folder=tmp_path) as core:
        core.context(0)
        settle(core)
        again = run_one(core, ask("again", prompt))
        assert begun(core) == {"disk": 1}
        assert cached(again) == 256 and said(again) == expected


@BOTH_MODELS
def test_coarser_blocks_never_begin_a_sequence_of_a_finer_band(model: Model, tmp_path: Path) -> None:
    """It is computed, is planned to be, and says what F16 alone says; also after a restart with other bands."""
    prompt = words(model, 270)
    expected = alone(model, Band(512, 1), prompt)
    with stored_core(model, *TWINS, folder=tmp_path) as core:
        ask_and_displace(core, prompt)
        core.context(FINE)
        assert core.residents.cached_tokens(ask("again", prompt)) == 256
        assert core.residents.cached_tokens(fine(ask("again", prompt))) == 0
        again = run_one(core, fine(ask("again", prompt)))
        assert cached(again) == 0 and said(again) == expected
        run_one(core, ask("coarse", prompt))  # the second use: to disk
        settle(core)
        assert stores(core).store.disk_blocks == 2
    with stored_core(model, Band(512, 1), folder=tmp_path) as core:
        core.context(0)
        settle(core)
        again = run_one(core, ask("again", prompt))
        assert cached(again) == 0 and said(again) == expected


@BOTH_MODELS
def test_finer_blocks_begin_a_sequence_of_a_coarser_band_converted(model: Model) -> None:
    """What is in its stream is, to the bit, what converting the stream that they came from gives."""
    prompt = words(model, 270)
    with stored_core(model, *TWINS) as core:
        run_one(core, fine(ask("first", prompt)))
        held = core.residents.reuse.tokens(Slot(FINE, 0))
        source, target = core.residents.formats.of("f16"), core.residents.formats.of("q8_0")
        assert source is not None and target is not None
        state = converted(
            core.residents.context(FINE).save_stream(0),
            source,
            target,
            stream=0,
            source_streams=1,
            target_streams=1,
            tokens=held,
        )
        assert state is not None
        expected = read_rows(state, stream=0, streams=1, tokens=held)
        assert expected is not None
        settle(core)
        run_one(core, fine(ask("other", [*reversed(prompt)])))
        settle(core)
        assert core.residents.cached_tokens(ask("again", prompt)) == 256
        again = run(core, [ask("again", prompt)], each_step=sound(core))["again"]
        assert begun(core) == {"compute": 2, "ram": 1}
        assert cached(again) == 256 and core.residents.conversions == 1
        got = rows(core, COARSE, core.residents.reuse.tokens(Slot(COARSE, 0)))
        for mine, wanted in zip([*got.k, *got.v], [*expected.k, *expected.v], strict=True):
            assert np.array_equal(mine[:256], wanted[:256])


def test_blocks_of_the_band_s_own_precision_go_first(tiny: Model) -> None:
    """Both are there: nothing is converted."""
    prompt = words(tiny, 270)
    with stored_core(tiny, *TWINS) as core:
        ask_and_displace(core, prompt)
        ask_and_displace(core, prompt, fine)
        assert begun(core) == {"compute": 4}
        expected = alone(tiny, TWINS[COARSE], prompt)
        again = run_one(core, ask("again", prompt))
        assert cached(again) == 256 and core.residents.conversions == 0
        assert said(again) == expected


def test_where_converting_is_slower_than_computing_it_is_computed(tiny: Model) -> None:
    """Finer blocks are there, and are left."""
    prompt = words(tiny, 270)
    with stored_core(tiny, *TWINS) as core:
        ask_and_displace(core, prompt, fine)
        core.residents.reuse.convert_time.s_per_token = 1.0
        assert cached(run_one(core, ask("again", prompt))) == 0
        assert core.residents.conversions == 0


def test_blocks_that_cannot_be_converted_are_computed_again(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of the band's precision, and it is not tried a second time."""
    prompt = words(tiny, 270)
    expected = alone(tiny, TWINS[COARSE], prompt)
    with stored_core(tiny, *TWINS) as core:
        ask_and_displace(core, prompt, fine)
        monkeypatch.setattr(ParkedState, "converted_for", lambda *_: None)
        again = run_one(core, ask("again", prompt))
        assert cached(again) == 0 and said(again) == expected
        assert not core.residents.reuse.can_convert
        assert core.check_integrity() is None


def test_a_band_of_which_the_rotation_is_not_known_stores_nothing(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes could be read as others by an engine that rotates otherwise."""
    with stored_core(tiny, TWINS[COARSE]) as core:
        monkeypatch.setattr(core.residents.formats, "of", lambda _dtype: None)
        run_one(core, ask("first", words(tiny, 270)))
        settle(core)
        assert stores(core).store.ram_blocks == 0


def test_kv_that_was_coarser_before_is_not_stored_for_a_finer_band(tiny: Model) -> None:
    """A sequence outgrows an 8-bit band, and another one is parked there and goes on in the band of F16. Their streams
    keep F16 numbers of 8-bit quality: none becomes a block, and nothing is left to do about them."""
    prompt = words(tiny, 200)
    expected = alone(tiny, Band(512, 1), prompt)
    with stored_core(tiny, Band(256, 1, "q8_0"), Band(512, 2)) as core:
        core.set_knobs(msgspec.structs.replace(core.knobs, band_margin_tokens=0))
        run_one(core, ask("grows", prompt, max_tokens=100))
        settle(core)
        assert core.residents.conversions == 1
        assert core.residents.reuse.precision(Slot(1, 0)) == "q8_0"
        core.submit(ask("parked", [*reversed(prompt)]))
        while "parked" not in core.residents.running or core.residents.running["parked"].state.computed_tokens < 200:
            core.step()
        core.residents.evict(core.residents.running["parked"], core._rates())
        core.applier._placer.begin(core.residents.waiting["parked"], 1, core.now_s(), core.costs.model, 512)
        while core.has_work:
            core.step()
        assert core.residents.conversions == 2
        run_one(core, fine(ask("needs", [5, *prompt])))  # one of the two streams
        settle(core)
        assert core.chores is None
        stored = [node for node in stores(core).store.tree.nodes() if node.kind.fingerprint == _kinds(core)[1]]
        assert [node.tokens[:4] for node in stored if node.depth == 0] == [np.int32(5).tobytes()]
        again = run_one(core, fine(ask("again", prompt)))
        assert cached(again) == 0 and said(again) == expected


def _kinds(core: EngineCore) -> dict[int, bytes]:
    """Fingerprints of the bands' blocks."""
    tiering = core.residents.tiering
    assert tiering is not None
    return {band: shape.kind.fingerprint for band, shape in tiering._shapes.items()}


def test_blocks_that_were_rotated_otherwise_are_not_found(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libllama rotates numbers before it quantises them, unless it is told not to: the bytes look alike, and would be
    read as others."""
    prompt = words(smollm2, 270)
    band = Band(512, 1, "q8_0")
    with stored_core(smollm2, band, folder=tmp_path) as core:
        for name in ("first", "second"):
            run_one(core, ask(name, prompt))
            settle(core)
        assert stores(core).store.disk_blocks == 2
        form = core.residents.formats.of("q8_0")
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    expected = alone(smollm2, band, prompt)
    with stored_core(smollm2, band, folder=tmp_path) as core:
        core.context(0)
        settle(core)
        again = run_one(core, ask("again", prompt))
        assert core.residents.formats.of("q8_0") != form
        assert cached(again) == 0 and said(again) == expected


def test_only_who_can_use_them_waits_for_blocks_on_disk(tiny: Model, tmp_path: Path) -> None:
    """Beside others that decode: who begins in the 8-bit band waits for its blocks to be read, who begins at F16 does
    not."""
    prompt = words(tiny, 270)
    with stored_core(tiny, Band(512, 1, "q8_0"), folder=tmp_path) as core:
        for name in ("first", "second"):
            run_one(core, ask(name, prompt))
            settle(core)
    bands = (Band(1024, 2, "q8_0"), Band(1024, 2))
    with stored_core(tiny, *bands, folder=tmp_path, reader=ManualWorker()) as core:
        for band in (COARSE, FINE):
            core.context(band)
        settle(core)
        times = stores(core).times
        times.fetch["disk"].s_per_byte = times.beside.s_per_byte = 2 * COPY_S / (2 * stores(core)._raw_bytes)
        core.submit(request("long", [3, 4, 5], max_tokens=900))
        while not core.step().outputs:
            pass
        core.submit(ask("coarse", prompt))
        core.submit(fine(ask("fine", prompt)))
        assert [*core.residents.fetching] == ["coarse"] and [*core.residents.waiting] == ["fine"]
        core.abort_all()
        core.step()
        assert core.check_integrity() is None
