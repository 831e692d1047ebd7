"""Requests that a remote engine answers with one document instead of a stream: embeddings.

Each takes a place like any other request, so that limits of replicas hold. Health and breakers hear nothing of it: they
judge by streams of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engines.fleet.group import Asked, Group
from headrace.engines.remote.engine import RemoteEngine
from headrace.errors import RemoteFailure

_NO_ROOM: Final = frozenset({429, 503})


async def ask_group(group: Group, asked: Asked, path: str, body: bytes) -> tuple[int, bytes]:
    """The answer of one of the group's replicas; another is asked where one fails, up to the group's ``retry.tries``.
    ``body`` is a JSON object without its ``model``, which is the group's. Raises RemoteFailure."""
    tries = group.config.retry.tries
    while True:
        tries -= 1
        place = await group.place(asked)
        try:
            return await _ask(place.replica.engine, path, body)
        except RemoteFailure:
            if tries <= 0:
                raise
            asked = replace(asked, avoid=asked.avoid | {place.replica.name})
        finally:
            place.give_back()
            group.dispatch()


async def _ask(engine: object, path: str, body: bytes) -> tuple[int, bytes]:
    if not isinstance(engine, RemoteEngine):
        raise RemoteFailure("the engine is not a remote one", kind="status")
    status, answer = await engine.ask(path, body)
    if status in _NO_ROOM:
        raise RemoteFailure("the engine has no room", kind="busy", retry_after_s=1.0)
    if status >= 500 and status != 501:
        raise RemoteFailure(f"the engine answered with status {status}", kind="status")
    return status, answer
