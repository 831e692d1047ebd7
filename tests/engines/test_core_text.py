"""From tokens to text: whole characters, stop strings, end tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.sampling import Sampler
from headrace.messages.engine import SamplingParams
from headrace.scheduling.bands import Band
from tests.engines.harness import Model, engine_core, request, run_one


def speak(monkeypatch: pytest.MonkeyPatch, tokens: Sequence[int]) -> None:
    """Let the model "choose" the given tokens: text and stops then do not hang on what noise weights say."""
    script = iter(tokens)
    monkeypatch.setattr(Sampler, "choose", lambda *_: next(script))


@pytest.mark.parametrize("text", ["naïve 中文 🙂👩‍🚀 end", "中", "\U0001f600" * 5])
def test_characters_of_several_tokens_come_out_whole(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The byte tokens of a character stay back until it is complete; no output ever holds half of one."""
    tokens = tiny.tokens(text)
    assert len(tokens) > len(text), "several tokens a character"
    speak(monkeypatch, tokens)
    result = run_one(core, request("r", [3], max_tokens=len(tokens)))
    assert result.text == text
    assert all("\ufffd" not in output.text for output in result.outputs)
    assert result.tokens == tokens


def test_a_character_cut_off_by_the_limit_is_a_replacement_in_the_last_output(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``length`` may fall inside a character; what was held is released then."""
    tokens = tiny.tokens("ab🙂")
    speak(monkeypatch, tokens)
    result = run_one(core, request("r", [3], max_tokens=len(tokens) - 1))
    assert result.text == "ab\ufffd" and result.outputs[-1].text == "\ufffd"


@pytest.mark.model
def test_the_real_models_emoji_and_chinese_stream_whole(smollm2: Model) -> None:
    """Asked for Chinese it answers with characters and emoji of several tokens each."""
    with engine_core(smollm2, Band(512, 1)) as core:
        result = run_one(core, request("r", smollm2.chat("Say hello in Chinese."), max_tokens=40))
    assert len(result.text.encode()) > 2 * len(result.text), "mostly characters of several bytes"
    assert all("\ufffd" not in output.text for output in result.outputs[:-1])
    assert any(output.text == "" for output in result.outputs), "some bytes had to wait"
    assert result.text == smollm2.vocabulary.decode(result.tokens, skip_special=True)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_before_it(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch, include: bool
) -> None:
    """It spans three tokens; nothing of it is sent, and the tokens up to it count."""
    tokens = [token for piece in ("say ", "S", "TO", "P and on") for token in tiny.tokens(piece)]
    speak(monkeypatch, tokens)
    sampling = SamplingParams(temperature=0.0, stop=("never", "STOP"), include_stop_text=include)
    result = run_one(core, request("r", [3], max_tokens=50, sampling=sampling))
    assert (result.finish, result.stop_reason) == ("stop", "STOP")
    assert result.text == ("say STOP" if include else "say ")
    assert result.tokens == tokens[: len(result.tokens)]
    assert "STOP" in tiny.text(result.tokens) and "STOP" not in tiny.text(result.tokens[:-1])


@pytest.mark.model
def test_a_stop_string_in_the_real_models_answer(smollm2: Model) -> None:
    """The answer with a stop string is the beginning of the answer without, up to it."""
    prompt = smollm2.chat("Count from one to ten.")
    with engine_core(smollm2, Band(512, 2)) as core:
        whole = run_one(core, request("whole", prompt, max_tokens=30))
        stop = "\n3. "
        assert stop in whole.text and stop not in {smollm2.text([t]) for t in whole.tokens}
        sampling = SamplingParams(temperature=0.0, stop=(stop,))
        cut = run_one(core, request("cut", prompt, max_tokens=30, sampling=sampling))
    assert cut.text == whole.text.split(stop)[0]
    assert cut.finish == "stop" and cut.stop_reason == stop
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) < len(whole.tokens)


def test_the_end_token_ends_unless_it_is_ignored(
    tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``ignore_eos`` its text is not sent and it ends the sequence; with it, it is one token of many,
    shown only when special tokens are not skipped."""
    (end,) = tiny.vocabulary.encode("<|im_end|>", add_special=False, parse_special=True)
    assert end in tiny.vocabulary.end_tokens()
    (a,), (b,) = tiny.tokens("a"), tiny.tokens("b")
    cases: list[tuple[SamplingParams, str, list[int], str]] = [
        (SamplingParams(temperature=0.0), "a", [a, end], "stop"),
        (SamplingParams(temperature=0.0, ignore_eos=True), "abb", [a, end, b, b], "length"),
        (
            SamplingParams(temperature=0.0, ignore_eos=True, skip_special_tokens=False),
            "a<|im_end|>bb",
            [a, end, b, b],
            "length",
        ),
    ]
    for number, (sampling, text, tokens, finish) in enumerate(cases):
        speak(monkeypatch, [a, end, b, b])
        result = run_one(core, request(f"r{number}", [3], max_tokens=4, sampling=sampling))
        assert (result.text, result.tokens, result.finish) == (text, tokens, finish)
        assert result.stop_reason is None


def test_a_stop_token_ends_and_is_named(tiny: Model, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id is the stop reason, its text is not sent, and it works with ``ignore_eos`` too."""
    (a,), (b,) = tiny.tokens("a"), tiny.tokens("b")
    speak(monkeypatch, [a, a, b, a])
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(b,), ignore_eos=True)
    result = run_one(core, request("r", [3], max_tokens=9, sampling=sampling))
    assert (result.text, result.finish, result.stop_reason) == ("aa", "stop", b)
    assert result.tokens == [a, a, b]
