"""Completions asked for with ``store: true``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.api.store import CompletionStore, StoredCompletion
from headrace.config.schema import Tenant
from headrace.errors import NotFound
from tests.api.harness import HELLO, MODEL, chat_body, config, events, serving


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_completion_can_be_read_changed_and_deleted(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as served:
        created = await served.chat("question", store=True, metadata={"k": "v"}, stream=stream)
        completion_id = events(created.text)[0]["id"] if stream else created.json()["id"]
        path = f"/v1/chat/completions/{completion_id}"
        read = (await served.client.get(path)).json()
        messages = (await served.client.get(f"{path}/messages")).json()
        updated = (await served.client.post(path, json={"metadata": {"k": "w"}})).json()
        deleted = (await served.client.delete(path)).json()
        gone = await served.client.get(path)
    assert read["choices"][0]["message"]["content"] == HELLO
    assert read["metadata"] == {"k": "v"}
    assert messages["data"] == [
        {"role": "user", "content": "question", "id": f"{completion_id}-0", "content_parts": None}
    ]
    assert updated["metadata"] == {"k": "w"}
    assert deleted == {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    assert gone.status_code == 404


async def test_what_was_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.chat()
        await served.chat(store=False)
        listed = (await served.client.get("/v1/chat/completions")).json()
    assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_the_list_filters_orders_and_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ids = [(await served.chat(store=True, metadata={"odd": str(i % 2)})).json()["id"] for i in range(5)]

        async def listed(query: str) -> Any:
            return (await served.client.get(f"/v1/chat/completions?{query}")).json()

        page = await listed("limit=2")
        rest = await listed(f"after={page['last_id']}")
        backwards = await listed("order=desc&limit=1")
        odd = await listed("metadata[odd]=1")
        nothing = await listed("model=other")
        unknown = await listed("after=unknown")
        empty = await listed("limit=0")
        wrong = [await served.client.get(f"/v1/chat/completions?{q}") for q in ("limit=x", "limit=101", "order=up")]
    assert [item["id"] for item in page["data"]] == ids[:2]
    assert page["has_more"] is True
    assert [item["id"] for item in rest["data"]] == ids[2:]
    assert rest["has_more"] is False
    assert backwards["data"][0]["id"] == ids[-1]
    assert [item["id"] for item in odd["data"]] == [ids[1], ids[3]]
    assert nothing["data"] == unknown["data"] == empty["data"] == []
    assert [response.status_code for response in wrong] == [400] * 3


async def test_tenants_see_their_own_only(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(config(), tenants={"a": Tenant(), "b": Tenant()})
    async with serving(tmp_path, settings) as served:
        mine, other = {"x-tenant-id": "a"}, {"x-tenant-id": "b"}
        path = f"/v1/chat/completions/{(await served.chat(store=True, headers=mine)).json()['id']}"
        statuses = [
            (await served.client.request(method, path, headers=other, json={"metadata": {}})).status_code
            for method in ("GET", "POST", "DELETE")
        ]
        listed = (await served.client.get("/v1/chat/completions", headers=other)).json()["data"]
        kept = await served.client.get(path, headers=mine)
    assert statuses == [404] * 3
    assert listed == []
    assert kept.status_code == 200


@pytest.mark.parametrize("name", ["..%2f..%2fsecret", "%2e%2e", "a%00b", "x" * 200, ".new-1", "a.b"])
async def test_an_id_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_bytes(b'{"completion":{"id":"secret"}}')
    async with serving(tmp_path / "inner" / "store") as served:
        for method in ("GET", "DELETE"):
            assert (await served.client.request(method, f"/v1/chat/completions/{name}")).status_code == 404
    assert (tmp_path / "secret.json").exists()


def stored(number: int) -> StoredCompletion:
    return StoredCompletion(completion={"id": f"c{number}", "created": number})


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    store = CompletionStore(tmp_path, 3)
    for number in range(5):
        store.put(stored(number))
        os.utime(tmp_path / f"c{number}.json", (number, number))
    assert [item.id for item in store.all(None)] == ["c2", "c3", "c4"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    store = CompletionStore(tmp_path, 3)
    with pytest.raises(TypeError):
        store.put(StoredCompletion(completion={"id": "c1", "x": object()}))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(b"{")
    store = CompletionStore(tmp_path, 3)
    assert store.all(None) == []
    with pytest.raises(NotFound):
        store.get("broken", None)


async def test_a_disk_that_fails_does_not_cost_the_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with serving(tmp_path / "file" / "store") as served:
        response = await served.client.post("/v1/chat/completions", json=chat_body(store=True))
    assert response.status_code == 200
    assert response.json()["model"] == MODEL
