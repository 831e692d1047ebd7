"""/admin: live knobs and what the scheduler does, for operators (``api.admin_access`` says who gets in)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headrace.api.admin_access import admit_admin
from headrace.api.body import read_body
from headrace.api.decode import decode_object
from headrace.api.deps import Deps
from headrace.api.exchange import exchange_of
from headrace.api.live import BY_TUNER, LiveConfig
from headrace.api.reply import send_json
from headrace.config.knobs import KnobChange
from headrace.config.problems import ConfigProblems
from headrace.errors import RequestError
from headrace.kv.account import PLACES, KvAccount


class Admin:
    """ASGI endpoints, one method each."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def knobs(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/knobs: every knob with its value, and what it means."""
        self._admit(scope)
        await send_json(send, exchange_of(scope), {"knobs": self._described()})

    async def set_knobs(self, scope: Scope, receive: Receive, send: Send) -> None:
        """PATCH /admin/knobs: ``{NAME: VALUE, ...}``, all or none; null takes a cap away."""
        by = self._admit(scope)
        body = await read_body(scope, receive, self._deps.live.config.server)
        given = decode_object(body)
        try:
            changed = self._deps.live.set_knobs(given, by=by)
        except ConfigProblems as error:
            raise _refused(error) from error
        await self._answer(scope, send, changed)

    async def reset_knobs(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /admin/knobs: back to the configuration; with ``?name=NAME`` (any number of them) only those."""
        by = self._admit(scope)
        try:
            changed = self._deps.live.reset_knobs(Request(scope).query_params.getlist("name"), by=by)
        except ConfigProblems as error:
            raise _refused(error) from error
        await self._answer(scope, send, changed)

    async def scheduling(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/scheduling: what the scheduler does at the moment, and why. Figures of the engine are null
        before its first step and while it is down; ``batch_cap`` 0 is not known yet."""
        self._admit(scope)
        config, load, gateway = self._deps.live.config, self._deps.engine.load, self._deps.gateway
        lanes = {
            name: {
                "priority": lane.priority,
                "weight": lane.weight,
                "max_running": lane.max_running,
                "held": gateway.ledger.lane(name).held,
                "waiting": gateway.ledger.lane(name).waiting,
                "running": gateway.ledger.lane(name).running,
            }
            for name, lane in config.lanes.items()
        }
        answer: dict[str, Any] = {
            "strategy": config.engine.scheduling.strategy,
            "strategy_in_force": None if load is None else load.strategy or None,
            "reason": None if load is None else load.reason or None,
            "engine_ready": self._deps.engine.ready is not None,
            "engine": None
            if load is None
            else {
                "running": load.running,
                "waiting": load.waiting,
                "parked": load.parked,
                "batch_cap": load.batch_cap,
                "fragmentation": load.fragmentation,
                "step_s": load.step_s,
                "step_prediction_error": load.step_error,
                "decode_step_s": load.decode_step_s,
                "prefill_tokens_per_s": load.prefill_tokens_per_s,
                "moves": load.moves,
                "victims": load.victims,
                "cut_steps": load.cut_steps,
            },
            "lanes": lanes,
        }
        await send_json(send, exchange_of(scope), answer)

    async def kv(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/kv: the level of KV memory, its marks, and where all KV is, who uses it, what it costs to bring
        back. Raises EngineNotReady while the engine is down."""
        self._admit(scope)
        knobs = self._deps.live.config.engine.scheduling
        snapshot = await self._deps.engine.snapshot()
        load, account = snapshot.load, KvAccount(snapshot.kv)
        answer: dict[str, Any] = {
            "level": load.kv_level,
            "budget_tokens": load.kv_budget_tokens,
            "held_tokens": load.kv_held_tokens,
            "promised_tokens": load.kv_promised_tokens,
            "drain_s": load.kv_drain_s,
            "waste": load.kv_waste,
            "marks": {
                "warn": knobs.kv_warn,
                "refuse": knobs.kv_refuse,
                "move": knobs.kv_move,
                "gap": knobs.kv_gap,
                "long_tokens": knobs.kv_long_tokens,
            },
            "counts": {"parked": load.kv_parked, "spills": load.kv_spills, "dropped": load.kv_dropped},
            "places": {place: asdict(account.total(place)) for place in PLACES},
            "holdings": [msgspec.to_builtins(holding) for holding in account.holdings],
            "integrity": snapshot.integrity,
        }
        await send_json(send, exchange_of(scope), answer)

    def _admit(self, scope: Scope) -> str:
        live = self._deps.live
        who = admit_admin(scope, live.admin_keys, live.tenants)
        return f"{who}, request {exchange_of(scope).request_id}"

    async def _answer(self, scope: Scope, send: Send, changed: Sequence[KnobChange]) -> None:
        answer = {
            "changed": {change.name: {"old": change.old, "new": change.new} for change in changed},
            "knobs": self._described(),
        }
        await send_json(send, exchange_of(scope), answer)

    def _described(self) -> dict[str, dict[str, Any]]:
        live = self._deps.live
        return {
            name: {
                "value": knob.of(live.config),
                "layer": _layer(live, name),
                "configured": knob.of(live.loaded),
                "default": knob.default,
                "unit": knob.unit,
                "range": knob.range_text,
                "meaning": knob.note.text,
            }
            for name, knob in live.knobs.items()
        }


def _layer(live: LiveConfig, name: str) -> str:
    """Where a knob's value comes from."""
    if name not in live.changes:
        return "config"
    return "tuner" if live.touched_by.get(name) == BY_TUNER else "live"


def _refused(error: ConfigProblems) -> RequestError:
    """A change that is wrong, with every problem in the message; ``param`` is the first knob that has one."""
    return RequestError("; ".join(map(str, error.problems)), param=error.where or None, code="invalid_knob")
