"""A conversation through the real SDK: sync and async, streamed and not."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.openai_suite.conftest import RunningServer

QUESTIONS = ["Say hello.", "And again?", "Once more, please."]


def test_three_turns_in_which_the_model_sees_what_was_said(running_server: RunningServer) -> None:
    with OpenAI(base_url=running_server.base_url, api_key="none", max_retries=0) as client:
        said: list[ChatCompletionMessageParam] = []
        prompt_tokens = 0
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model="gpt-6-astra", messages=said, max_tokens=24)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens > prompt_tokens
            prompt_tokens = answer.usage.prompt_tokens
            text = answer.choices[0].message.content
            assert text
            said.append({"role": "assistant", "content": text})


def test_a_stream_says_the_same_as_the_plain_answer(running_server: RunningServer) -> None:
    with OpenAI(base_url=running_server.base_url, api_key="none", max_retries=0) as client:
        said: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 2+2?"}]
        plain = client.chat.completions.create(model="gpt-6-astra", messages=said, max_tokens=24, temperature=0)
        stream = client.chat.completions.create(
            model="gpt-6-astra",
            messages=said,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None and plain.usage is not None
    # Of the second one's prompt more is cached.
    details = {"prompt_tokens_details": None}
    assert chunks[-1].usage.model_copy(update=details) == plain.usage.model_copy(update=details)


async def test_the_async_client_holds_several_conversations_at_once(running_server: RunningServer) -> None:
    async with AsyncOpenAI(base_url=running_server.base_url, api_key="none", max_retries=0) as client:

        async def converse(name: str) -> str:
            stream = await client.chat.completions.create(
                model="gpt-6-astra",
                messages=[{"role": "user", "content": f"I am {name}."}],
                max_tokens=16,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(converse(f"number {number}") for number in range(8)))
    assert all(answers)


def test_errors_arrive_as_the_sdks_own(running_server: RunningServer) -> None:
    with OpenAI(base_url=running_server.base_url, api_key="none", max_retries=0) as client:
        with pytest.raises(NotFoundError, match="does not exist") as caught:
            client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id
