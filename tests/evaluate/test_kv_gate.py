"""The gate of KV precision: figures, verdicts, the result file, and what serve makes of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.main import main
from headrace.engines.llama import library
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.errors import GateError
from headrace.evaluate.kv_gate.admit import check, gate_key, gated, missing, refusal
from headrace.evaluate.kv_gate.measure import measure
from headrace.evaluate.kv_gate.prompts import Prompt, PromptSet, pieces, read_prompts, shipped_prompts, tokenized
from headrace.evaluate.kv_gate.results import (
    GateKey,
    GateResult,
    libllama_build,
    model_fingerprint,
    read_results,
    result_path,
    write_results,
)
from headrace.evaluate.kv_gate.scores import PrecisionScores, Tally, divergence, log_probabilities
from headrace.models.tiny import make_tiny_gguf

GOOD = PrecisionScores(40_000, 0.99, 0.001, 0.01, 3000, 1500, 2, 1, 14, 14)
KEY = GateKey("model", "libllama", "prompts")
SET = PromptSet(
    1,
    (
        Prompt("ask", "chat", "What is 2+2?"),
        Prompt("list", "text", "stone water river, stone[[ water]][[ river]], stone[[ water]][[ river]]."),
    ),
)


def result(dtype: str = "q8_0", scores: PrecisionScores = GOOD, key: GateKey = KEY) -> GateResult:
    return msgspec.convert(
        {"key": key, "dtype": dtype, "scores": scores, "measured_at": "2026-01-01", "took_s": 1.0},
        GateResult,
        from_attributes=True,
    )


# The prompt set


def test_the_shipped_set_is_whole() -> None:
    """Questions, and texts in which thousands of answers are marked; names are unique."""
    found = shipped_prompts()
    kinds = [prompt.kind for prompt in found.prompts]
    answers = sum(is_answer for prompt in found.prompts for _, is_answer in pieces(prompt))
    assert kinds.count("chat") >= 10 and kinds.count("text") >= 20 and answers >= 2_900
    assert len({prompt.name for prompt in found.prompts}) == len(kinds)
    assert max(len(prompt.text) for prompt in found.prompts) > 4_000  # a thousand tokens and more


def test_the_shipped_set_is_what_its_script_makes() -> None:
    """The generated prompts and their order follow from the script's seeds and the prompts written by hand."""
    script = Path(__file__).parents[2] / "scripts/make_kv_gate_prompts.py"
    assert subprocess.run([sys.executable, str(script), "--check"], timeout=60).returncode == 0


def test_the_set_can_tell_one_point_of_drop() -> None:
    """A precision that changes 3 answers in a hundred, as many for the better as for the worse, passes; one that loses
    a point on balance does not."""
    answers = sum(is_answer for prompt in shipped_prompts().prompts for _, is_answer in pieces(prompt))
    even = msgspec.structs.replace(GOOD, answers=answers, lost=44, won=44)
    assert even.shortcomings() == []
    assert msgspec.structs.replace(even, lost=59, won=29).shortcomings() != []


@pytest.mark.parametrize("text", ["a [[b", "a ]] b", "a [[]] b", "[[a [[b]] c]]"])
def test_marks_that_do_not_pair_up_are_refused(text: str) -> None:
    data = msgspec.json.encode({"version": 1, "prompts": [{"name": "x", "kind": "text", "text": text}]})
    with pytest.raises(GateError, match="pair up"):
        read_prompts(data)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": 1, "prompts": []}', b'{"version": 1, "prompts": [{}]}'])
def test_a_malformed_set_is_refused(data: bytes) -> None:
    with pytest.raises(GateError):
        read_prompts(data)


def test_answers_have_tokens_of_their_own() -> None:
    """A token a letter: the answer is where its letters are; one at the very beginning follows from nothing."""
    text = tokenized(Prompt("x", "text", "[[a]]bc[[de]]f"), lambda part, first: [ord(letter) for letter in part])
    assert text.tokens == [ord(letter) for letter in "abcdef"]
    assert text.answers == ((3, 5),)


# Figures


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_divergence_is_that_of_its_definition(seed: int) -> None:
    """Against the sum written out; 0 for the same distribution, never below."""
    random = np.random.default_rng(seed)
    one, other = random.standard_normal((2, 50)).astype(np.float32) * 5
    p, q = np.exp(log_probabilities(one)), np.exp(log_probabilities(other))
    assert p.sum() == pytest.approx(1, abs=1e-12)
    by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert divergence(np.log(p), np.log(q)) == pytest.approx(by_hand, abs=1e-9)
    assert divergence(np.log(p), np.log(p)) == 0


def test_a_tally_counts_what_it_is_shown() -> None:
    tally = Tally()
    up, down = log_probabilities(np.array([2, 0], np.float32)), log_probabilities(np.array([0, 2], np.float32))
    tally.position(up, up)
    tally.position(up, down)
    for reference_right, right in ((True, True), (True, False), (False, True), (False, False)):
        tally.answer(reference_right=reference_right, right=right)
    scores = tally.scores()
    assert (scores.positions, scores.agreement) == (2, 0.5)
    assert (scores.answers, scores.reference_right, scores.lost, scores.won) == (4, 2, 1, 1)
    assert scores.drop_points == 0 and scores.mean_kl > 0


def test_the_bound_of_the_drop_shrinks_with_the_answers() -> None:
    """By hand for 598 answers, none of which changed: se = sqrt(0.5 + 0.5) / 600, times 1.6449, in points."""
    none = msgspec.structs.replace(GOOD, answers=598, lost=0, won=0)
    assert none.drop_bound_points == pytest.approx(100 * 1.6449 / 600)
    assert msgspec.structs.replace(none, answers=5980).drop_bound_points < none.drop_bound_points / 9
    assert msgspec.structs.replace(none, answers=0).drop_bound_points == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agreement": 0.949}, "greedy agreement 94.90% is below 95%"),
        ({"mean_kl": 0.021}, "mean divergence 0.0210"),
        ({"p99_kl": 0.31}, "99th percentile"),
        ({"mean_kl": math.nan}, "mean divergence nan"),
        ({"lost": 30, "won": 0}, "exact-match drop 1.00 points is known to be under 1.3"),
        ({"lost": 60, "won": 40}, "exact-match drop 0.67 points is known to be under 1.2"),
        ({"answers": 60, "lost": 0, "won": 0}, "exact-match drop 0.00 points is known to be under 2.65"),
        ({"positions": 0}, "nothing was measured"),
    ],
)
def test_what_fails_is_said_with_the_numbers(change: dict[str, float], words: str) -> None:
    assert GOOD.shortcomings() == []
    (problem,) = msgspec.structs.replace(GOOD, **change).shortcomings()
    assert words in problem


# The result file


def test_results_are_kept_beside_the_model_and_read_back(tmp_path: Path) -> None:
    """A second precision is added, a new result of one replaces the old, and another key clears the rest."""
    path = result_path(tmp_path / "model.gguf")
    assert path.name == "model.gguf.kv-gate.json" and read_results(path) == ()
    write_results(path, (result("q8_0"),))
    write_results(path, (result("q4_0"),))
    assert [found.dtype for found in read_results(path)] == ["q8_0", "q4_0"]
    better = msgspec.structs.replace(GOOD, agreement=1.0)
    write_results(path, (result("q4_0", better),))
    assert [found.scores.agreement for found in read_results(path)] == [0.99, 1.0]
    other = msgspec.structs.replace(KEY, libllama="newer")
    write_results(path, (result("q8_0", key=other),))
    assert [found.key for found in read_results(path)] == [other]
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=40)
@given(cut=st.integers(0, 10_000))
def test_a_file_that_was_cut_is_never_believed(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.gguf.kv-gate.json"
    write_results(path, (result("q8_0"), result("q4_0")))
    data = path.read_bytes()
    path.write_bytes(data[: cut % (len(data) - 1)])
    with pytest.raises(GateError, match="run the gate again"):
        read_results(path)


def test_a_file_of_another_format_or_of_nonsense_is_refused_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf.kv-gate.json"
    for data in (b'{"format": 2, "results": []}', b'{"format": 1, "results": [], "more": 1}', b"\xff"):
        path.write_bytes(data)
        with pytest.raises(GateError, match=r"kv-gate\.json"):
            read_results(path)
        write_results(path, (result(),))
        assert len(read_results(path)) == 1


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="cannot be written"):
        write_results(tmp_path / "absent" / "model.gguf.kv-gate.json", (result(),))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [10, 1 << 20, 5 << 20])
def test_another_byte_anywhere_sampled_is_another_model(tmp_path: Path, size: int) -> None:
    """The size and both ends count to the byte; between them, samples."""
    model = tmp_path / "model.gguf"
    data = bytearray(np.random.default_rng(1).bytes(size))
    seen = set()
    for change in (None, 0, size - 1, "longer"):
        changed = bytearray(data)
        if isinstance(change, int):
            changed[change] ^= 1
        elif change == "longer":
            changed += b"x"
        model.write_bytes(changed)
        seen.add(model_fingerprint(model))
    assert len(seen) == 4
    with pytest.raises(GateError, match="cannot be read"):
        model_fingerprint(tmp_path / "absent.gguf")


# Who may be used


def test_f16_needs_no_gate_and_others_need_a_result_that_counts() -> None:
    assert gated(["f16", "q4_0", "q8_0", "q4_0"]) == ["q8_0", "q4_0"]
    assert refusal(["f16"], (), KEY, "gate it") is None
    assert refusal(["q8_0"], (result(),), KEY, "gate it") is None
    assert missing(["q8_0", "q4_0"], (result(),), KEY) == ["q4_0"]
    nothing = refusal(["f16", "q8_0"], (), KEY, "gate it")
    assert nothing is not None and "there is no result; run: gate it" in nothing
    stale = refusal(["q8_0"], (result(),), msgspec.structs.replace(KEY, model="other"), "gate it")
    assert stale is not None and "only a result for another model file" in stale
    failed = refusal(["q8_0"], (result(scores=msgspec.structs.replace(GOOD, agreement=0.5)),), KEY, "gate it")
    assert failed is not None and "failed the gate for this model (greedy agreement 50.00%" in failed


# On a model


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A synthetic model with heads of 64 numbers, so that blocks of 32 fit."""
    yield make_tiny_gguf(tmp_path_factory.mktemp("noise") / "noise.gguf", embedding=256, heads=4, kv_heads=2)


def test_a_model_is_measured_on_every_position_and_answer(noise: Path) -> None:
    """Coarser is further from F16, and F16 itself is not measured."""
    weights = Weights(library.load(), noise)
    try:
        vocabulary = Vocabulary(weights)
        scores = measure(weights.library, weights, vocabulary, SET, ["q8_0", "q4_0"], threads=1)
    finally:
        weights.close()
    assert list(scores) == ["q8_0", "q4_0"]
    for found in scores.values():
        assert found.answers == 4 and found.greedy_total == 1
    assert 0 < scores["q8_0"].mean_kl < scores["q4_0"].mean_kl
    assert scores["q8_0"].positions == scores["q4_0"].positions > 24


def gate(*words: str) -> Result:
    return CliRunner().invoke(main, ["kv", "gate", *words])


def test_show_tells_what_is_missing_and_a_stored_result_in_figures(noise: Path) -> None:
    """Nothing is measured. The exit code is 1 while something asked for is missing or fails."""
    absent = gate("--model", str(noise), "--dtype", "q8_0", "--show")
    assert absent.exit_code == 1 and "no result for q8_0: headrace kv gate" in absent.stderr
    write_results(result_path(noise), (result("q8_0", key=gate_key(noise)),))
    try:
        shown = gate("--model", str(noise), "--dtype", "q8_0", "--show")
        assert shown.exit_code == 0 and "passes" in shown.stdout and "99.00%" in shown.stdout
        described = json.loads(gate("--model", str(noise), "--dtype", "q8_0", "--show", "--json").stdout)
        assert described[0]["passed"] is True and described[0]["scores"]["lost"] == 2
    finally:
        result_path(noise).unlink()


def test_a_part_of_the_set_is_a_quick_look_that_counts_for_nothing(noise: Path) -> None:
    """It tells what is left of the time, shows figures, and keeps none; it cannot be asked for with --show."""
    looked = gate("--model", str(noise), "--dtype", "q8_0", "--prompts", "3", "--threads", "1")
    assert "prompt 3 of 3" in looked.stderr and "about 0 s left" in looked.stderr
    assert "not kept" in looked.stdout and not result_path(noise).exists()
    assert gate("--model", str(noise), "--show", "--prompts", "3").exit_code == 2


def test_a_missing_model_is_one_line() -> None:
    found = gate("--model", "/absent/model.gguf")
    assert found.exit_code == 1 and found.stderr.count("\n") == 1 and "no model file" in found.stderr


def serve(model: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "serve", "--model", str(model), "--config", str(config), "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_serve_refuses_a_precision_that_has_not_passed(noise: Path, tmp_path: Path) -> None:
    """Without a result it names the command; with a failing one the numbers; a damaged file is not believed."""
    config = tmp_path / "headrace.yaml"
    config.write_text("engine:\n  bands: [{max_context_tokens: 512, max_sequences: 2, kv_dtype: q8_0}]\n")
    absent = serve(noise, config)
    assert absent.returncode == 1
    assert f"run: headrace kv gate --model {noise} --dtype q8_0" in absent.stderr
    bad = msgspec.structs.replace(GOOD, mean_kl=0.5)
    write_results(result_path(noise), (result("q8_0", bad, gate_key(noise)),))
    try:
        failed = serve(noise, config)
        assert failed.returncode == 1 and "mean divergence 0.5000 nats is above 0.02" in failed.stderr
        result_path(noise).write_bytes(b"{")
        damaged = serve(noise, config)
        assert damaged.returncode == 1 and "is not a result of the KV gate" in damaged.stderr
        write_results(result_path(noise), (result("q8_0", key=gate_key(noise)),))
        check(noise, ["f16", "q8_0"], "gate it")
    finally:
        result_path(noise).unlink()


def test_the_build_of_libllama_is_named() -> None:
    version, _, digest = libllama_build().partition("+")
    assert version.count(".") == 2 and len(digest) == 12
