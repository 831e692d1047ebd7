"""Text completions: prompt forms, echo, best_of, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.messages.engine import Submit
from tests.api.harness import HELLO, events, serving


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
async def test_every_form_of_prompt(tmp_path: Path, prompt: Any, texts: list[str]) -> None:
    async with serving(tmp_path) as served:
        body = (await served.complete(prompt, echo=True, max_tokens=1)).json()
    assert [choice["text"] for choice in body["choices"]] == [text + "H" for text in texts]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


async def test_sixteen_tokens_by_default(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body = (await served.complete()).json()
    assert body["choices"][0]["text"] == HELLO[:16]
    assert body["choices"][0]["finish_reason"] == "length"


async def test_echo_streams_the_prompt_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        response = await served.complete(["ab", "cd"], echo=True, stream=True, max_tokens=3)
    texts = {0: "", 1: ""}
    for chunk in events(response.text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abHel", 1: "cdHel"}


async def test_prompt_logprobs_alone_score_a_text(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body = (await served.complete("abc", echo=True, logprobs=1, max_tokens=0)).json()
    choice = body["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [0.0, -0.5, -0.5]


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_characters_over_split_ones(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, script=lambda _: list("é!".encode())) as served:
        response = await served.complete("a", logprobs=0, max_tokens=3, stream=stream)
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in events(response.text)[:-1]]
    else:
        parts = [response.json()["choices"][0]["logprobs"]]
    assert [offset for part in parts if part for offset in part["text_offset"]] == [0, 0, 1]
    assert [token for part in parts if part for token in part["tokens"]] == ["bytes:\\xc3", "bytes:\\xa9", "!"]


async def test_best_of_returns_n_and_counts_every_token(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body = (await served.complete(best_of=4, n=2, max_tokens=3)).json()
    assert len(body["choices"]) == 2
    assert body["usage"]["completion_tokens"] == 12
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 3, "n": 1, "stream": True}])
async def test_best_of_that_cannot_be(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with serving(tmp_path) as served:
        response = await served.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


async def test_logit_bias_takes_ids_and_texts(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.complete(logit_bias={"97": -100, "bc": 5})
        sampling = served.engine.submitted[0].sampling
    assert sampling.logit_bias == {97: -100.0, 98: 5.0, 99: 5.0}


async def test_sampling_reaches_the_engine(tmp_path: Path) -> None:
    seen: list[Submit] = []

    def script(request: Submit) -> Sequence[int]:
        seen.append(request)
        return [97]

    async with serving(tmp_path, script=script) as served:
        await served.complete(
            temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-5, presence_penalty=1, frequency_penalty=-1,
            repetition_penalty=1.1, stop="x", ignore_eos=True, max_tokens=2,
        )  # fmt: skip
    sampling = seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (-5, 1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.stop, sampling.ignore_eos) == (1.1, ("x",), True)
