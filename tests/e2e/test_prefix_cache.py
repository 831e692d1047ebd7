"""A dialogue with a served model: what was said is not computed again, and the client and the operator see it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from benchmarks.harness import Served, metric

pytestmark = pytest.mark.model
SYSTEM = "You answer in one short sentence. " + " ".join(f"Rule {n}: be exact about topic {n}." for n in range(40))


async def test_the_second_turn_of_a_dialogue_is_cached(own_server: Served) -> None:
    """Its prompt is the first turn's, the answer and a question: all but the question and the turn's frame is cached,
    and /metrics counts the same tokens."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Name a river."},
    ]

    async with httpx.AsyncClient(base_url=own_server.base_url, timeout=120) as client:

        async def turn() -> dict[str, Any]:
            body = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
            reply = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            messages.append(reply["choices"][0]["message"])
            usage: dict[str, Any] = reply["usage"]
            return usage

        first = await turn()
        messages.append({"role": "user", "content": "And a longer one?"})
        second = await turn()
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = second["prompt_tokens_details"]["cached_tokens"]
    # The first prompt whole; the answer may be tokenised otherwise when it comes back as text.
    assert first["prompt_tokens"] <= cached < second["prompt_tokens"]
    assert metric(own_server, "headrace_prefix_hit_tokens_total") == cached
    assert metric(own_server, "headrace_prefix_query_tokens_total") == first["prompt_tokens"] + second["prompt_tokens"]
