"""The engine's arithmetic against a plain loop over libllama: alone, in batches, through promotions.

What can be compared how: with the same shapes of calls libllama gives the same bits, so there the demand is
equality. Its kernels differ with the shape of a call, though (on CPU: chunks of 64 tokens and more, contexts
beyond 256 tokens, and with F32 weights any chunk), which ``test_libllama_itself_depends_on_the_shape_of_a_call``
shows without the engine. Where shapes differ, the tolerance is measured on the very tokens compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engines.llama.context import Batch, Context
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.prefix import PrefixRules
from headrace.messages.engine import SamplingParams
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import Slot
from tests.engines.harness import (
    GREEDY,
    THREADS,
    LogProbs,
    Model,
    Reference,
    Result,
    assert_same_text_or_near_tie,
    engine_core,
    log_softmax,
    request,
    run,
    run_one,
)

WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=2)
TOKEN_BY_TOKEN = SchedulingKnobs(step_tokens=1, max_prefill_tokens=1)
NATURAL_TEXT = " ".join((Path(__file__).parents[2] / "LICENSE").read_text().split())
ROUNDING = 1e-6
"""The engine normalises single-precision logits with single-precision exponentials and a double sum; the
reference does all of it in double. 50,000 rounded terms of relative error 2**-24 stay far below this."""

BOTH_MODELS = pytest.mark.parametrize(
    "names",
    [
        pytest.param(("tiny", "tiny_reference"), id="tiny"),
        pytest.param(("smollm2", "reference"), id="smollm2", marks=pytest.mark.model),
    ],
)


@pytest.fixture
def pair(names: tuple[str, str], request: pytest.FixtureRequest) -> tuple[Model, Reference]:
    """A model and the plain loop over it."""
    return request.getfixturevalue(names[0]), request.getfixturevalue(names[1])


def prompts(model: Model) -> dict[str, list[int]]:
    """Prompts of different lengths, the longest beyond what one attention kernel covers."""
    return {
        "sum": model.chat("What is 2+2?"),
        "river": model.chat("Write a short poem about rivers."),
        "count": model.chat("Count from one to ten."),
        "one": model.tokens("The"),
        "licence": model.tokens(NATURAL_TEXT)[:280],
    }


@dataclass(frozen=True)
class Yardstick:
    """Reference distributions along given tokens, and how far libllama itself strays from them when the
    same tokens come in calls of other shapes."""

    rows: LogProbs
    tolerance: float


def yardstick(reference: Reference, prompt: Sequence[int], generated: Sequence[int]) -> Yardstick:
    """Score ``generated`` after ``prompt`` token by token, then in larger calls and beside other sequences.

    The tolerance is twice the largest deviation at any of the five likeliest tokens of a position: a choice
    flips when two tokens' deviations add up, and a batch mixes shapes that were measured one at a time.
    It is 0 where libllama's arithmetic did not depend on the shape.
    """
    tokens = [*prompt, *generated[:-1]]
    first = len(prompt) - 1
    rows = reference.log_probs(tokens)[first:]
    top = np.argsort(-rows, axis=1)[:, :5]
    deviation = max(
        float(np.abs(np.take_along_axis(other[first:] - rows, top, axis=1)).max())
        for other in (
            reference.log_probs(tokens, [48] * (len(prompt) // 48)),
            reference.log_probs_in_company(tokens, len(prompt)),
        )
    )
    return Yardstick(rows, 2 * deviation)


def assert_follows(result: Result, stick: Yardstick) -> None:
    """Every token is the reference's choice or a near tie, every log-probability the reference's."""
    allowed = stick.tolerance + ROUNDING
    for index, token in enumerate(result.tokens):
        row = stick.rows[index]
        assert row.max() - row[token] <= allowed, f"token {index}: {token} instead of {row.argmax()}"
    for index, entry in enumerate(result.logprobs):
        row = stick.rows[index]
        assert entry.token_id == result.tokens[index]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=allowed)
        for token, _, logprob in entry.top:
            assert logprob == pytest.approx(row[token], abs=allowed)


@BOTH_MODELS
def test_libllama_itself_depends_on_the_shape_of_a_call(
    pair: tuple[Model, Reference],
) -> None:
    """The same tokens through bare llama_decode: twice token by token the same bits, but in calls of another
    size, or beside other sequences, other log-probabilities of the likeliest token. No engine is involved:
    this is why a tolerance exists at all."""
    model, reference = pair
    tokens = prompts(model)["licence"][:120]
    alone = reference.log_probs(tokens)
    np.testing.assert_array_equal(reference.log_probs(tokens[:40]), alone[:40])
    likeliest = alone.argmax(axis=1)[:, None]
    shapes = {
        "2 tokens a call": reference.log_probs(tokens, [2] * 60),
        "48 tokens a call": reference.log_probs(tokens, [48] * 3),
        "120 tokens a call": reference.log_probs(tokens, [120]),
        "4 sequences a call": reference.log_probs_in_company(tokens, 2),
    }
    deviations = {}
    for shape, other in shapes.items():
        deviations[shape] = float(np.abs(np.take_along_axis(other - alone, likeliest, axis=1)).max())
        print(f"{shape}: {deviations[shape]:.2g}")
    assert deviations["120 tokens a call"] > 0


@BOTH_MODELS
def test_alone_with_the_same_calls_greedy_output_is_the_reference_to_the_bit(
    pair: tuple[Model, Reference],
) -> None:
    """Token by token the engine makes exactly the calls of the plain loop: same tokens, same logits."""
    model, reference = pair
    prompt = prompts(model)["sum"]
    tokens, rows = reference.greedy(prompt, 24, model.vocabulary.end_tokens())
    with engine_core(model, Band(1024, 4), limits=TOKEN_BY_TOKEN) as core:
        result = run_one(core, request("r", prompt, max_tokens=24, sampling=WITH_LOGPROBS))
    assert result.tokens == tokens
    assert_follows(result, Yardstick(rows, 0.0))


@BOTH_MODELS
@pytest.mark.parametrize("name", ["river", "licence"])
def test_alone_in_chunks_greedy_output_is_the_references(pair: tuple[Model, Reference], name: str) -> None:
    """With the prompt in chunks as the engine normally computes it."""
    model, reference = pair
    prompt = prompts(model)[name]
    with engine_core(model, Band(1024, 4)) as core:
        result = run_one(core, request("r", prompt, max_tokens=16, sampling=WITH_LOGPROBS))
    assert len(result.tokens) == 16 and result.finish == "length"
    assert_follows(result, yardstick(reference, prompt, result.tokens))


@BOTH_MODELS
def test_a_batch_of_prompts_arriving_at_different_steps_gives_what_each_gives_alone(
    pair: tuple[Model, Reference],
) -> None:
    """Five prompts of 1 to 280 tokens, joining while others decode: every token is what the plain loop
    chooses for that prompt alone, and so is what the engine gives for it alone."""
    model, reference = pair
    submits = {
        name: request(name, prompt, max_tokens=16, sampling=WITH_LOGPROBS) for name, prompt in prompts(model).items()
    }
    arrivals = {0: ["count"], 1: ["licence", "sum"], 3: ["one"], 7: ["river"]}
    limits = SchedulingKnobs(step_tokens=112, max_prefill_tokens=96)
    sizes: list[int] = []
    with engine_core(model, Band(1024, 8), limits=limits) as core:
        together = run(
            core,
            {step: [submits[name] for name in names] for step, names in arrivals.items()},
            each_step=lambda _, output: sizes.append(len(output.outputs)),
        )
        alone = {name: run_one(core, submit) for name, submit in submits.items()}
    assert max(sizes) == len(submits), "all five decoded in one step at least once"
    for name, submit in submits.items():
        stick = yardstick(reference, submit.prompt_tokens, together[name].tokens)
        print(f"{name}: tolerance {stick.tolerance:.2g}")
        assert_follows(together[name], stick)
        gaps = np.sort(stick.rows, axis=1)[:, -1] - np.sort(stick.rows, axis=1)[:, -2]
        if gaps.min() > stick.tolerance:
            assert alone[name].tokens == together[name].tokens
            assert alone[name].text == together[name].text


@pytest.mark.model
def test_two_and_two_are_four(smollm2: Model) -> None:
    """The model's answer, not only its arithmetic: the chat template, the tokens and the end are right."""
    with engine_core(smollm2, Band(1024, 2)) as core:
        result = run_one(core, request("r", smollm2.chat("What is 2+2?"), max_tokens=40))
    assert result.finish == "stop" and result.stop_reason is None
    assert result.text.rstrip().endswith("4.") or result.text.rstrip().endswith("4")
    assert "<|im_end|>" not in result.text


@dataclass
class Call:
    """One llama_decode call: its entries, who owned their streams, and the logits that it gave."""

    context: Context
    owners: list[str | None]
    tokens: list[int]
    positions: list[int]
    streams: list[int]
    outputs: list[int]
    padding: list[int]
    """Entries that are padding rows."""


@dataclass
class Recorder:
    """Writes down every call that a core makes."""

    calls: list[Call] = field(default_factory=list)

    def watch(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        original, add_padding = Context.decode, Batch.add_padding
        padding: list[int] = []

        def note_padding(batch: Batch, position: int, stream: int) -> None:
            padding.append(batch.size)
            add_padding(batch, position, stream)

        def decode(context: Context, cut: Callable[[], bool] | None = None) -> bool:
            assert original(context, cut)
            batch = context.batch.finish()
            band = core.residents.contexts.index(context)
            entries = range(batch.n_tokens)
            streams = [batch.seq_id[i][0] for i in entries]
            self.calls.append(
                Call(
                    context,
                    [core.residents.slots.owner(Slot(band, stream)) for stream in streams],
                    [batch.token[i] for i in entries],
                    [batch.pos[i] for i in entries],
                    streams,
                    [batch.logits[i] for i in entries],
                    padding.copy(),
                )
            )
            padding.clear()
            return True

        monkeypatch.setattr(Context, "decode", decode)
        monkeypatch.setattr(Batch, "add_padding", note_padding)


def replay(model: Model, band: Band, limits: SchedulingKnobs, calls: Sequence[Call]) -> list[npt.NDArray[np.float32]]:
    """The same calls on a bare context: logits of each call, one row an entry (zeros where none were
    wanted)."""
    api = model.library.api
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max = band.max_context_tokens * band.max_sequences, band.max_sequences
    params.n_batch = params.n_ubatch = limits.step_tokens
    params.n_threads = params.n_threads_batch = THREADS
    params.kv_unified = False
    context = api.llama_init_from_model(model.weights.handle, params)
    memory = api.llama_get_memory(context)
    batch = api.llama_batch_init(limits.step_tokens, 0, 1)
    results = []
    for call in calls:
        batch.n_tokens = len(call.tokens)
        for i, token in enumerate(call.tokens):
            if call.positions[i] == 0:
                api.llama_memory_seq_rm(memory, call.streams[i], -1, -1)  # a new owner
            batch.token[i], batch.pos[i], batch.logits[i] = token, call.positions[i], call.outputs[i]
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, call.streams[i]
        assert api.llama_decode(context, batch) == 0
        rows = np.zeros((len(call.tokens), model.weights.vocab_size), np.float32)
        for i, wanted in enumerate(call.outputs):
            if wanted:
                rows[i] = np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (model.weights.vocab_size,))
        for i in call.padding:
            api.llama_memory_seq_rm(memory, call.streams[i], call.positions[i], -1)
        results.append(rows)
    api.llama_batch_free(batch)
    api.llama_free(context)
    return results


@pytest.mark.parametrize("one_by_one_limit", [1, 4])
def test_every_sequence_is_fed_its_own_tokens_and_answered_from_its_own_logits(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, one_by_one_limit: int
) -> None:
    """Without any tolerance: (1) what went into libllama under a sequence's stream is exactly its prompt and
    its generated tokens, in order and once; (2) the same calls on a bare context give, at exactly those
    places, the tokens and log-probabilities that came out."""
    band, limits = Band(512, 6), SchedulingKnobs(step_tokens=48, max_prefill_tokens=20)
    words = tiny.tokens(NATURAL_TEXT)
    arrivals = {
        step: [
            request(
                f"r{step}.{k}",
                words[step * 7 : step * 7 + 1 + (step * 31 + k * 53) % 90],
                max_tokens=3 + (step * 5 + k) % 17,
                sampling=WITH_LOGPROBS,
                arrived_s=float(step),
            )
            for k in range(3)
        ]
        for step in range(0, 24, 4)
    }
    recorder = Recorder()
    with engine_core(tiny, band, limits=limits, prefix=PrefixRules(enabled=False)) as core:
        core.context(0)
        core.one_by_one_limit = one_by_one_limit
        recorder.watch(core, monkeypatch)
        results = run(core, arrivals)
        monkeypatch.undo()
    rows = replay(tiny, band, limits, recorder.calls)
    assert max(len(set(call.owners)) for call in recorder.calls) == band.max_sequences
    assert any(call.padding for call in recorder.calls), "and fills holes"

    fed: dict[str, list[tuple[int, int]]] = {}
    answered: dict[str, list[LogProbs]] = {}
    for call, call_rows in zip(recorder.calls, rows, strict=True):
        assert call.streams == sorted(call.streams), "libllama batches only consecutive streams"
        for i, owner in enumerate(call.owners):
            if i in call.padding:
                assert not call.outputs[i]
                continue
            assert owner is not None
            fed.setdefault(owner, []).append((call.positions[i], call.tokens[i]))
            if call.outputs[i]:
                answered.setdefault(owner, []).append(log_softmax(call_rows[i]))
    for submits in arrivals.values():
        for submit in submits:
            result = results[submit.request_id]
            assert len(result.tokens) == submit.max_tokens
            expected = [*submit.prompt_tokens, *result.tokens[:-1]]
            assert fed[submit.request_id] == list(enumerate(expected))
            distributions = answered[submit.request_id]
            assert [int(row.argmax()) for row in distributions] == result.tokens
            for entry, row in zip(result.logprobs, distributions, strict=True):
                assert entry.logprob == pytest.approx(row[entry.token_id], abs=ROUNDING)


PROMOTING = (Band(64, 3), Band(256, 2))


@BOTH_MODELS
@pytest.mark.parametrize("kv_travels", [True, False], ids=["kv travels", "computed again"])
def test_a_promoted_sequence_goes_on_as_if_it_had_started_in_the_long_band(
    pair: tuple[Model, Reference], kv_travels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and log-probabilities equal to the bit; with its KV moved, and with its tokens computed again
    (token by token, so that the shapes of the calls are the same)."""
    model, _ = pair
    submit = request("r", prompts(model)["river"], max_tokens=50, sampling=WITH_LOGPROBS)
    beside = request("beside", prompts(model)["one"], max_tokens=50, sampling=GREEDY)
    margin_0 = SchedulingKnobs(step_tokens=8, max_prefill_tokens=1, band_margin_tokens=0)
    with engine_core(model, PROMOTING[1], limits=margin_0) as core:
        expected = run_one(core, submit)
    if not kv_travels:
        monkeypatch.setattr(Context, "load_stream", lambda *_: False)
    bands_seen: list[int] = []

    with engine_core(model, *PROMOTING, limits=margin_0) as core:

        def look(_: int, __: object) -> None:
            assert core.check_integrity() is None
            if "r" in core.residents.running:
                slot = core.residents.running["r"].state.slot
                assert slot is not None
                bands_seen.append(slot.band)

        # ``beside`` takes stream 0, so that the promoted sequence changes its stream as well as its band.
        alone_again = run(core, [submit], each_step=look)["r"]
        companion = run(core, {0: [beside], 1: [submit]}, each_step=look)["r"]
    assert set(bands_seen) == {0, 1} and bands_seen[0] == 0 and bands_seen[-1] == 1
    assert len(expected.tokens) == 50
    assert alone_again.tokens == expected.tokens and alone_again.text == expected.text
    assert [e.logprob for e in alone_again.logprobs] == [e.logprob for e in expected.logprobs]
    assert_same_text_or_near_tie(companion, expected)


@BOTH_MODELS
def test_prompt_log_probabilities_are_the_references(pair: tuple[Model, Reference]) -> None:
    """One for each prompt token, the first without a value; they come once, with the first output, and the
    likeliest tokens beside them in order."""
    model, reference = pair
    prompt = prompts(model)["river"]
    rows = reference.log_probs(prompt)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=3)
    for limits, max_tokens in ((TOKEN_BY_TOKEN, 2), (TOKEN_BY_TOKEN, 0)):
        with engine_core(model, Band(1024, 2), limits=limits) as core:
            result = run_one(core, request("r", prompt, max_tokens=max_tokens, sampling=sampling))
        assert result.finish == "length" and len(result.tokens) == max_tokens
        entries = result.prompt_logprobs
        assert entries is not None and [entry.token_id for entry in entries] == prompt
        assert entries[0].logprob is None and entries[0].top == []
        for position, entry in enumerate(entries[1:]):
            row = rows[position]
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=ROUNDING)
            best = np.argsort(-row, kind="stable")[:3]
            assert [logprob for _, _, logprob in entry.top] == pytest.approx(row[best], abs=ROUNDING)


def test_prompt_log_probabilities_do_not_depend_on_chunks_or_company(tiny: Model, tiny_reference: Reference) -> None:
    """Chunk borders fall between the tokens of a prompt, and others prefill in the same calls."""
    words = tiny.tokens(NATURAL_TEXT)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    submits = [request(f"r{n}", words[n * 50 : n * 50 + 100 + n], max_tokens=2, sampling=sampling) for n in range(3)]
    with engine_core(tiny, Band(512, 4), limits=SchedulingKnobs(step_tokens=50, max_prefill_tokens=30)) as core:
        results = run(core, submits)
    for submit in submits:
        rows = tiny_reference.log_probs(submit.prompt_tokens)
        other = tiny_reference.log_probs(submit.prompt_tokens, [30] * 4)
        entries = results[submit.request_id].prompt_logprobs
        assert entries is not None and len(entries) == len(submit.prompt_tokens)
        tolerance = 2 * float(np.abs(rows - other).max()) + ROUNDING
        for position, entry in enumerate(entries[1:]):
            assert entry.logprob == pytest.approx(rows[position][entry.token_id], abs=tolerance)
