"""An engine with stores: what streams leave comes back from RAM and from disk, and the text is the same to the bit.

Token by token and alone the shapes of calls are the same with and without stores, so equality is demanded (see
``test_prefix``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.tiering import COPY_S, Tiering
from headrace.errors import EngineError
from headrace.kv.tiers.disk import BlockFolder
from headrace.kv.tiers.kv_tiers import KvTiers, TierSettings
from headrace.kv.tiers.worker import ThreadWorker, Worker
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from tests.engines.harness import SMALL_CHUNKS, Model, Results, engine_core, request, run, run_one, said, sound
from tests.engines.prefixes import (
    BOTH_MODELS,
    OFF,
    TOKEN_BY_TOKEN,
    ask,
    assert_alike,
    begun,
    cached,
    steady,
    without_reuse,
    words,
)
from tests.kv.tiers.blocks import ManualWorker

ONE_STREAM = Band(512, 1)


@contextlib.contextmanager
def stored_core(
    model: Model,
    *bands: Band,
    folder: Path | None = None,
    ram_bytes: int = 1 << 28,
    weights: bytes = b"w",
    reader: Worker | None = None,
) -> Iterator[EngineCore]:
    """A core with stores; with a ``folder``, on disk too."""
    tiers = KvTiers(
        TierSettings(ram_bytes, 1 << 28),
        ThreadWorker(1 << 28),
        None if folder is None else BlockFolder(folder),
        reader=reader,
        measured=False,
    )
    tiering = Tiering(tiers, weights, "build")
    with engine_core(model, *bands, limits=TOKEN_BY_TOKEN, tiering=tiering) as core:
        yield steady(core)


def settle(core: EngineCore) -> None:
    """Let the stores finish."""
    end_s = time.monotonic() + 20
    while core.chores is not None:
        core.do_chores()
        assert time.monotonic() < end_s, "the worker hangs"
    assert core.check_integrity() is None


def stores(core: EngineCore) -> KvTiers:
    """The stores of a core."""
    assert core.residents.tiering is not None
    return core.residents.tiering.tiers


def copying_takes(core: EngineCore, seconds: float) -> None:
    """Believe from now on that copying 270 tokens takes so long."""
    tiering = core.residents.tiering
    assert tiering is not None
    core.context(0)
    tiering._copy_rate.s_per_byte = seconds / (270 * tiering._shapes[0].layout.token_bytes)


@pytest.fixture
def model(model_name: str, request: pytest.FixtureRequest) -> Model:
    """One of the models."""
    found: Model = request.getfixturevalue(model_name)
    return found


def expected_of(model: Model, prompt: Sequence[int]) -> object:
    """What is said without reuse."""
    with engine_core(model, ONE_STREAM, limits=TOKEN_BY_TOKEN, prefix=OFF) as core:
        return said(run_one(steady(core), ask("again", prompt)))


@BOTH_MODELS
def test_what_a_stream_left_comes_back_from_ram_and_from_disk_to_the_bit(model: Model, tmp_path: Path) -> None:
    """The only stream was needed by somebody else, then the engine started again: both times two whole blocks of the
    prompt are loaded, and the rest is computed."""
    prompt, other = words(model, 270), [*reversed(words(model, 280))]
    expected = expected_of(model, prompt)
    with stored_core(model, ONE_STREAM, folder=tmp_path) as core:
        run_one(core, ask("first", prompt))
        settle(core)
        run_one(core, ask("other", other))
        settle(core)
        again = run_one(core, ask("again", prompt))
        settle(core)
        assert begun(core) == {"compute": 2, "ram": 1}
        assert cached(again) == 256 and said(again) == expected
        load = core.load().tiers
        assert load is not None and load.ram_hit_tokens == 256 and load.written == 2
        account = core.kv_account()
        assert account.total("stored_ram").bytes == load.ram_bytes > 0
        assert account.total("stored_disk").tokens == 256
    with stored_core(model, ONE_STREAM, folder=tmp_path) as core:
        core.context(0)
        settle(core)
        again = run_one(core, ask("again", prompt))
        assert begun(core) == {"disk": 1}
        assert cached(again) == 256 and said(again) == expected


@pytest.mark.model
@pytest.mark.parametrize("band", [Band(512, 1, "q8_0"), Band(512, 1, "q4_0"), Band(512, 1, layout="paged")])
def test_every_precision_and_a_pool_come_back_to_the_bit(smollm2: Model, band: Band, tmp_path: Path) -> None:
    """From RAM, and from disk after a restart."""
    prompt, other = words(smollm2, 270), [*reversed(words(smollm2, 280))]
    with engine_core(smollm2, band, limits=TOKEN_BY_TOKEN, prefix=OFF) as core:
        expected = said(run_one(steady(core), ask("again", prompt)))
    with stored_core(smollm2, band, folder=tmp_path) as core:
        for name, tokens in (("first", prompt), ("other", other)):
            run_one(core, ask(name, tokens))
            settle(core)
        again = run_one(core, ask("again", prompt))
        settle(core)
        assert begun(core)["ram"] == 1 and cached(again) == 256 and said(again) == expected
    with stored_core(smollm2, band, folder=tmp_path) as core:
        core.context(0)
        settle(core)
        again = run_one(core, ask("again", prompt))
        assert begun(core) == {"disk": 1} and said(again) == expected


@pytest.mark.model
def test_bands_of_other_precision_do_not_share_blocks(smollm2: Model) -> None:
    """What an 8-bit band stored is not F16, whoever asks."""
    prompt, other = words(smollm2, 270), [*reversed(words(smollm2, 280))]
    with stored_core(smollm2, Band(300, 1, "q8_0"), Band(512, 1)) as core:
        for name, tokens in (("first", prompt), ("other", other)):
            run_one(core, ask(name, tokens))
            settle(core)
        fine = msgspec.structs.replace(ask("fine", prompt), min_kv_dtype="f16")
        assert cached(run_one(core, fine)) == 0


@pytest.mark.model
def test_kv_that_was_coarser_than_its_band_keeps_is_not_stored(smollm2: Model) -> None:
    """It came up from an 8-bit band, and would be taken for F16."""
    prompt = words(smollm2, 270)
    with stored_core(smollm2, Band(300, 1, "q8_0"), Band(512, 1)) as core:
        core.set_knobs(msgspec.structs.replace(core.knobs, band_margin_tokens=0))
        run_one(core, ask("grows", prompt, max_tokens=40))
        settle(core)
        assert core.residents.reuse.tokens(Slot(1, 0)) >= 300
        assert stores(core).store.ram_blocks == 0


def test_other_weights_find_nothing(tiny: Model, tmp_path: Path) -> None:
    """Blocks of another model file are not this one's."""
    prompt = words(tiny, 270)
    for weights, way in ((b"one", "take_over"), (b"two", "compute")):
        with stored_core(tiny, ONE_STREAM, folder=tmp_path, weights=weights) as core:
            core.context(0)
            settle(core)
            run_one(core, ask("first", prompt))
            settle(core)
            if way == "take_over":
                run_one(core, ask("second", prompt))
                settle(core)
            assert begun(core).get("disk", 0) == 0


def test_a_damaged_file_costs_time_and_no_text(tiny: Model, tmp_path: Path) -> None:
    """One bit of the second block has turned: one block is loaded, and the text is right."""
    prompt = words(tiny, 400)
    expected = expected_of(tiny, prompt)
    with stored_core(tiny, ONE_STREAM, folder=tmp_path) as core:
        for name in ("first", "second"):
            run_one(core, ask(name, prompt))
            settle(core)
    with stored_core(tiny, ONE_STREAM, folder=tmp_path) as core:
        core.context(0)
        settle(core)
        nodes = [node for node in stores(core).store.tree.nodes() if node.depth == 1]
        (path,) = tmp_path.rglob(nodes[0].address.hex() + ".kv")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        again = run_one(core, ask("again", prompt))
        settle(core)
        assert cached(again) == 128 and said(again) == expected
        assert stores(core).store.totals.bad == {"payload_checksum": 1, "orphan": 1}


@contextlib.contextmanager
def one_runs_and_one_is_on_disk(model: Model, folder: Path, prompt: list[int], reader: Worker) -> Iterator[EngineCore]:
    """A core in which ``long`` decodes, while 256 tokens of ``prompt`` are on disk, from which reading them takes
    longer than a step can wait."""
    with stored_core(model, ONE_STREAM, folder=folder) as core:
        for name in ("first", "second"):
            run_one(core, ask(name, prompt))
            settle(core)
    with stored_core(model, Band(2048, 2), folder=folder, reader=reader) as core:
        core.context(0)
        settle(core)
        times = stores(core).times
        times.fetch["disk"].s_per_byte = times.beside.s_per_byte = 2 * COPY_S / (2 * stores(core)._raw_bytes)
        core.submit(request("long", [3, 4, 5], max_tokens=2000))
        while not core.step().outputs:
            pass
        yield core


def test_beside_others_a_prompt_waits_for_what_is_on_disk(tiny: Model, tmp_path: Path) -> None:
    """They go on decoding while it is read; it begins with it, and says the same."""
    prompt = words(tiny, 270)
    expected = expected_of(tiny, prompt)
    reader = ManualWorker()
    with one_runs_and_one_is_on_disk(tiny, tmp_path, prompt, reader) as core:
        core.submit(ask("again", prompt))
        assert core.load().waiting == 1
        decoded = 0
        for _ in range(3):
            decoded += len(core.step().outputs)
            assert core.check_integrity() is None
        assert decoded == 3 and "again" in core.live_ids() and not core.residents.waiting
        reader.work()
        results = Results()
        while "again" in core.live_ids():
            results.take(core.step())
            assert core.check_integrity() is None
        assert begun(core)["ram"] == 1
        assert cached(results["again"]) == 256 and said(results["again"]) == expected
        assert stores(core).fetches.bytes == 0 and stores(core).store.totals.fetched == 2


def test_what_does_not_come_from_disk_in_time_is_computed(tiny: Model, tmp_path: Path) -> None:
    """The disk hangs: the prompt waits as long as computing would take, not longer."""
    prompt = words(tiny, 270)
    reader = ManualWorker()
    with one_runs_and_one_is_on_disk(tiny, tmp_path, prompt, reader) as core:
        worth_s = core._source_times().compute_s(0, 256)
        core.submit(ask("again", prompt, max_tokens=1))
        began_s, results = core.now_s(), Results()
        while "again" in core.residents.fetching:
            results.take(core.step())
        assert core.now_s() - began_s < 1.1 * worth_s  # the clock goes on by what a step asks it
        while "again" in core.live_ids():
            results.take(core.step())
        assert cached(results["again"]) == 0
        assert stores(core).fetches.bytes == 0
        reader.work()  # too late, and for nobody
        core.step()
        assert core.check_integrity() is None


def test_who_waits_for_the_disk_begins_when_nobody_else_is_there(tiny: Model, tmp_path: Path) -> None:
    """There is nobody to be kept waiting by reading it at once."""
    prompt = words(tiny, 270)
    with one_runs_and_one_is_on_disk(tiny, tmp_path, prompt, ManualWorker()) as core:
        core.submit(ask("again", prompt))
        core.abort("long")
        results = run(core, [])
        assert begun(core)["disk"] == 1 and cached(results["again"]) == 256


def test_a_sequence_that_waits_for_the_disk_can_be_given_up(tiny: Model, tmp_path: Path) -> None:
    """It leaves nothing, and its id is taken as long as it waits."""
    prompt = words(tiny, 270)
    reader = ManualWorker()
    with one_runs_and_one_is_on_disk(tiny, tmp_path, prompt, reader) as core:
        core.submit(ask("again", prompt))
        core.submit(ask("again", prompt))
        (refused,) = [output for output in core.step().outputs if output.request_id == "again"]
        assert refused.error is not None and "already live" in refused.error
        core.abort("again")
        (ended,) = [output for output in core.step().outputs if output.request_id == "again"]
        assert ended.finish == "abort" and core.live_ids() == ["long"]
        assert stores(core).fetches.bytes == 0 and core.check_integrity() is None


def test_tenants_do_not_share_stores(tiny: Model) -> None:
    """What one tenant's prompt left is computed again for another."""
    prompt, other = words(tiny, 270), [*reversed(words(tiny, 280))]
    with stored_core(tiny, ONE_STREAM) as core:
        run_one(core, ask("first", prompt, tenant="a"))
        settle(core)
        run_one(core, ask("other", other, tenant="a"))
        settle(core)
        assert cached(run_one(core, ask("b", prompt, tenant="b"))) == 0
        settle(core)
        assert cached(run_one(core, ask("a", prompt, tenant="a"))) == 256


def test_a_waiting_prompt_is_planned_with_what_the_stores_have(tiny: Model) -> None:
    """Its cached tokens are known before it begins, as those of a stream are."""
    prompt, other = words(tiny, 270), [*reversed(words(tiny, 280))]
    with stored_core(tiny, ONE_STREAM) as core:
        for name, tokens in (("first", prompt), ("other", other)):
            run_one(core, ask(name, tokens))
            settle(core)
        assert core.residents.cached_tokens(ask("again", prompt)) == 256
        core.submit(ask("again", prompt))
        assert core.residents.waiting["again"].state.cached_tokens == 256


def test_a_load_slower_than_computing_is_not_chosen(tiny: Model) -> None:
    """Blocks are there, and all is computed."""
    prompt, other = words(tiny, 270), [*reversed(words(tiny, 280))]
    with stored_core(tiny, ONE_STREAM) as core:
        for name, tokens in (("first", prompt), ("other", other)):
            run_one(core, ask(name, tokens))
            settle(core)
        stores(core).times.join.s_per_byte = 1.0
        assert cached(run_one(core, ask("again", prompt))) == 0


def test_while_others_run_no_copy_is_longer_than_a_step_can_spare(tiny: Model) -> None:
    """A stream that would take longer is saved when nothing runs; needed before that, it is lost and counted."""
    prompt = words(tiny, 270)
    with stored_core(tiny, Band(1024, 2)) as core:
        copying_takes(core, 2 * COPY_S)
        core.submit(request("long", [3, 4, 5], max_tokens=700))
        core.submit(ask("first", prompt, max_tokens=1))
        core.submit(ask("third", [*reversed(prompt)], max_tokens=1))
        while "third" in core.live_ids():
            core.step()
            assert core.check_integrity() is None
        assert stores(core).store.totals.unsaved["no_time"] == 2
        core.abort("long")
        core.step()
        settle(core)
        assert stores(core).store.ram_blocks >= 2


def test_a_resident_is_saved_before_somebody_takes_its_stream(tiny: Model) -> None:
    """Also when it was saved before, and the store let it go since."""
    prompt, other = words(tiny, 270), [*reversed(words(tiny, 280))]
    with stored_core(tiny, ONE_STREAM) as core:
        run_one(core, ask("first", prompt))
        settle(core)
        for node in [*stores(core).store.tree.nodes()][::-1]:
            stores(core).store.drop_bad(node, "unreadable")
        assert stores(core).store.ram_blocks == 0
        run_one(core, ask("other", other))
        settle(core)
        assert cached(run_one(core, ask("again", prompt))) == 256


def test_a_state_that_libllama_does_not_hand_out_is_not_stored(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not asked for again."""
    with stored_core(tiny, ONE_STREAM) as core:
        run_one(core, ask("first", words(tiny, 270)))

        def refuse(_self: Context, stream: int, **_options: object) -> memoryview:
            raise EngineError("no")

        monkeypatch.setattr(Context, "save_stream", refuse)
        settle(core)
        assert stores(core).store.totals.unsaved == {"unreadable_state": 2}


def test_a_state_that_libllama_does_not_take_is_computed(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence begins with nothing, and says the same."""
    prompt, other = words(tiny, 270), [*reversed(words(tiny, 280))]
    expected = expected_of(tiny, prompt)
    with stored_core(tiny, ONE_STREAM) as core:
        for name, tokens in (("first", prompt), ("other", other)):
            run_one(core, ask(name, tokens))
            settle(core)
        monkeypatch.setattr(Context, "load_stream", lambda *_: False)
        again = run_one(core, ask("again", prompt))
        assert cached(again) == 0 and said(again) == expected
        assert core.check_integrity() is None


def test_many_dialogues_over_few_streams_say_what_each_says_alone(tiny: Model) -> None:
    """Twelve sequences with four beginnings over two streams, arriving all the time: every account agrees after every
    step, and something came from the stores."""
    beginnings = [[number, *words(tiny, 150)] for number in range(10, 50, 10)]
    asked = [ask(f"r{n}", [*beginnings[n % 4], *range(60 + n)], 6) for n in range(12)]
    expected = without_reuse(tiny, *asked)
    tiers = KvTiers(TierSettings(1 << 24), ThreadWorker(1 << 28), measured=False)
    tiering = Tiering(tiers, b"w", "build")
    with engine_core(tiny, Band(256, 2), limits=SMALL_CHUNKS, tiering=tiering) as core:
        steady(core)
        arrivals = {15 * n: [submit] for n, submit in enumerate(asked)}

        def each_step(number: int, output: object) -> None:
            assert core.check_integrity() is None
            if core.residents.tiering is not None and number % 5 == 0:
                end_s = time.monotonic() + 10
                while tiers.working and time.monotonic() < end_s:
                    tiers.advance()

        results = run(core, arrivals, each_step=each_step)
        for name, result in results.items():
            assert_alike(result, expected[name])
        assert begun(core).get("ram", 0) > 0


def test_moves_and_promotions_leave_the_accounts_right(tiny: Model) -> None:
    """A sequence that outgrows its band pushes out what a stream of the longer one kept: that is saved first."""
    bands = (Band(300, 1), Band(512, 1))
    prompt = words(tiny, 400)
    with stored_core(tiny, *bands) as core:
        run_one(core, ask("long", prompt))
        assert core.residents.reuse.tokens(Slot(1, 0)) > 0
        run(core, [ask("grows", [9, *prompt[:280]], max_tokens=60)], each_step=sound(core))
        settle(core)
        assert cached(run_one(core, ask("again", prompt))) >= 256
