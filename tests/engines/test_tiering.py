"""An engine with stores: what streams leave comes back from RAM and from disk, and the text is the same to the bit.

Token by token and alone the shapes of calls are the same with and without stores, so equality is demanded (see
``test_prefix``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.tiering import COPY_S, Tiering
from headrace.errors import EngineError
from headrace.kv.tiers.disk import BlockFolder
from headrace.kv.tiers.kv_tiers import KvTiers, TierSettings
from headrace.kv.tiers.worker import ThreadWorker
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from tests.engines.harness import SMALL_CHUNKS, Model, engine_core, request, run, run_one, said, sound
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

ONE_STREAM = Band(512, 1)


@contextlib.contextmanager
def stored_core(
    model: Model, *bands: Band, folder: Path | None = None, ram_bytes: int = 1 << 28, weights: bytes = b"w"
) -> Iterator[EngineCore]:
    """A core with stores; with a ``folder``, on disk too."""
    tiers = KvTiers(
        TierSettings(ram_bytes, 1 << 28),
        ThreadWorker(1 << 28),
        None if folder is None else BlockFolder(folder),
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
    with stored_core(model, ONE_STREAM, folder=tmp_path) as core:
        core.context(0)
        settle(core)
        again = run_one(core, ask("again", prompt))
        assert begun(core) == {"disk": 1}
        assert cached(again) == 256 and said(again) == expected


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
