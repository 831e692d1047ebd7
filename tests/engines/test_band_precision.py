"""Bands of different precision in one engine: who goes where, what travels between them, what is counted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.engines.llama.build import build
from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.spill import read_state, write_state
from headrace.errors import ConfigError
from headrace.kv.precision import KV_DTYPES, KvDtype
from headrace.messages.engine import Start
from headrace.models.tiny import make_tiny_gguf
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import CostModel, CostPrior
from tests.engines.harness import Model, engine_core, request, run, run_one, sound

SHORT_FINE = (Band(256, 2), Band(512, 2, "q8_0"))
TWINS = (Band(256, 2, "q8_0"), Band(256, 2))
QUICK = CostModel(CostPrior(prefill_tokens_per_s=1e9))
"""A machine that computes sooner than it converts."""


def prompt(model: Model, tokens: int) -> list[int]:
    return model.tokens("The mill stood at the bend of the river. " * 60)[:tokens]


def test_a_sequence_that_outgrows_its_band_takes_its_kv_along_converted(smollm2: Model) -> None:
    """230 tokens at F16, then up into 8 bits: nothing is computed again, and the text is what F16 alone writes (a
    stable continuation: the prompt repeats itself)."""
    asked = request("a", prompt(smollm2, 230), max_tokens=40)
    with engine_core(smollm2, Band(512, 2)) as core:
        expected = run_one(core, asked)
    with engine_core(smollm2, *SHORT_FINE) as core:
        # The margin would let it begin above: it shall move.
        core.set_knobs(msgspec.structs.replace(core.knobs, band_margin_tokens=0))
        result = run(core, [asked], each_step=sound(core))["a"]
        assert core.residents.conversions == 1
        assert core.load().kv_conversions == 1
    assert result.finish == "length" and len(result.tokens) == 40
    assert result.text == expected.text


def test_where_computing_is_predicted_to_be_quicker_nothing_is_converted(smollm2: Model) -> None:
    """The sequence is computed again in its new band, and ends as it should."""
    with engine_core(smollm2, *SHORT_FINE) as core:
        core.set_knobs(msgspec.structs.replace(core.knobs, band_margin_tokens=0))
        core.costs.model = QUICK
        core.residents.reuse.convert_time.s_per_token = 1.0
        result = run(core, [request("a", prompt(smollm2, 250), max_tokens=12)], each_step=sound(core))["a"]
        assert core.residents.conversions == 0
    assert result.finish == "length" and len(result.tokens) == 12


def test_a_lane_s_least_precision_keeps_it_out_of_coarser_bands(smollm2: Model) -> None:
    """Of two bands of one length, others go to the coarser one first; who asks for F16 gets the finer. Beyond the bands
    that will do there is no context for it."""
    fine = msgspec.structs.replace(request("fine", prompt(smollm2, 20), max_tokens=4), min_kv_dtype="f16")
    plain = request("plain", prompt(smollm2, 20), max_tokens=4)
    seen: dict[str, KvDtype] = {}
    with engine_core(smollm2, *TWINS) as core:

        def look(_number: int, _output: object) -> None:
            for name, sequence in core.residents.running.items():
                assert sequence.state.slot is not None
                seen[name] = TWINS[sequence.state.slot.band].kv_dtype

        results = run(core, [fine, plain], each_step=look)
        assert seen == {"fine": "f16", "plain": "q8_0"}
        assert all(result.finish == "length" for result in results.values())
    with engine_core(smollm2, *SHORT_FINE) as core:
        long = msgspec.structs.replace(request("long", prompt(smollm2, 300), max_tokens=4), min_kv_dtype="f16")
        error = run_one(core, long).error
        assert error is not None and "no room in the context of 256" in error
    with engine_core(smollm2, Band(256, 1, "q8_0")) as core:
        error = run_one(core, fine).error
        assert error is not None and "no band keeps KV at f16 or finer" in error


def test_coarser_kv_never_begins_a_sequence_of_a_finer_band(smollm2: Model) -> None:
    """What an 8-bit band holds of a prompt is of no use to a band of F16, whose answers must be F16's; the other way
    round it is carried over."""
    tokens = prompt(smollm2, 200)
    coarse = request("coarse", tokens, max_tokens=2)
    fine = msgspec.structs.replace(request("fine", tokens, max_tokens=2), min_kv_dtype="f16")
    with engine_core(smollm2, *TWINS) as core:
        run_one(core, coarse)
        assert run_one(core, fine).outputs[0].cached_tokens == 0
        assert core.residents.conversions == 0
    with engine_core(smollm2, *TWINS) as core:
        run_one(core, fine)
        assert run_one(core, coarse).outputs[0].cached_tokens == 199
        assert core.residents.conversions == 1
        assert core.check_integrity() is None


def test_kv_is_counted_in_bytes_of_its_precision(smollm2: Model) -> None:
    """The real model's token takes 23,040 bytes at F16 and 17/32 of that at 8 bits."""
    with engine_core(smollm2, Band(256, 2), Band(512, 1, "q8_0")) as core:
        plans = core.band_plans()
        assert [plan.kv_bytes for plan in plans] == [2 * 256 * 23_040, 512 * 12_240]
        assert [plan.kv_dtype for plan in plans] == ["f16", "q8_0"]
        assert core.load().kv_total_bytes == 2 * 256 * 23_040 + 512 * 12_240
        used: list[tuple[int, int]] = []
        run(
            core,
            [request("a", prompt(smollm2, 300), max_tokens=4)],
            each_step=lambda *_: used.append((core.load().kv_used_tokens, core.load().kv_used_bytes)),
        )
        assert max(used) == (302, 302 * 12_240)  # the last of 4 tokens is not computed, and nobody runs then


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_parked_kv_of_another_precision_is_restored(smollm2: Model, dtype: KvDtype) -> None:
    """A sequence that was parked goes on in a band of another precision with everything that it had."""
    tokens = prompt(smollm2, 100)
    with engine_core(smollm2, Band(256, 1), Band(512, 1, dtype)) as core:
        core.submit(request("a", tokens, max_tokens=8))
        core.step()
        sequence = core.residents.running["a"]
        computed = sequence.state.computed_tokens
        assert computed == 100
        core.residents.evict(sequence, core._rates())
        core.applier._placer.begin(sequence, 1, core.now_s(), core.costs.model, 512)
        assert sequence.state.computed_tokens == computed
        assert core.residents.conversions == 1
        assert core.check_integrity() is None
        while core.has_work:
            core.step()


def test_a_precision_that_libllama_cannot_keep_is_refused_at_start(tmp_path: Path) -> None:
    """Heads of 16 numbers are no whole blocks of 32: said before anybody waits for the band."""
    path = make_tiny_gguf(tmp_path / "tiny.gguf", embedding=64, heads=4)
    start = Start(str(path), "tiny", [(256, 1), (512, 1)], self_measure=False, threads=1, kv_dtypes=["f16", "q8_0"])
    with pytest.raises(ConfigError, match="cannot be kept at q8_0") as caught:
        build(start)
    assert caught.value.where == "engine.bands"


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_spilled_state_comes_back_with_its_precision(tmp_path: Path, dtype: KvDtype) -> None:
    """Both of them: how its bytes are to be read, and the coarsest that its numbers went through."""
    state = ParkedState(bytearray(b"keys and values"), 1, 4, 7, dtype, "q4_0")
    write_state(tmp_path / "1.kv", "a", state)
    assert read_state(tmp_path / "1.kv", "a") == state
