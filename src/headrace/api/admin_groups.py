"""/admin/groups and /admin/drill: which engines there are, how they are, and rehearsing that one gets slow."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.api.admin_access import admit_admin
from headrace.api.body import read_body
from headrace.api.decode import decode
from headrace.api.deps import Deps
from headrace.api.exchange import exchange_of
from headrace.api.reply import send_json
from headrace.config.group_checks import url_problem
from headrace.config.groups import ReplicaConfig
from headrace.engines.fleet.describe import describe_group
from headrace.engines.fleet.drill import Drill
from headrace.engines.fleet.fleet import Fleet
from headrace.errors import NotFound, RequestError

Body = TypeVar("Body", bound=msgspec.Struct)


class _NewReplica(msgspec.Struct, frozen=True):
    url: str
    zone: str | None = None
    weight: float = 1.0
    draining: bool = False


class _Change(msgspec.Struct, frozen=True):
    draining: bool | None = None
    weight: float | None = None


class _StartDrill(msgspec.Struct, frozen=True):
    lane: str


class AdminGroups:
    """ASGI endpoints, one method each."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._drill: Drill | None = None

    async def groups(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/groups: every group with its replicas, their health, limits, load and breakers."""
        fleet = self._admit(scope)
        lanes = {
            name: {
                "group": self._deps.live.config.group_of(lane),
                "fallback": lane.fallback.group,
                "degraded": fleet.not_served(name),
            }
            for name, lane in self._deps.live.config.lanes.items()
        }
        groups = {name: describe_group(group, self._deps.clock()) for name, group in fleet.groups.items()}
        await send_json(send, exchange_of(scope), {"groups": groups, "lanes": lanes, "integrity": fleet.integrity()})

    async def add(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /admin/groups/GROUP/replicas ``{"url": URL, "zone": ZONE, "weight": 1, "draining": false}``."""
        fleet = self._admit(scope)
        asked = await self._read(scope, receive, _NewReplica)
        problem = url_problem(asked.url)
        if problem is not None:
            raise RequestError(f"url {problem}", param="url")
        _check_weight(asked.weight)
        replica = ReplicaConfig(asked.url, asked.zone, asked.weight, asked.draining)
        spec = fleet.add_replica(scope["path_params"]["group"], replica)
        await send_json(send, exchange_of(scope), {"replica": spec.name}, status=201)

    async def change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """PATCH /admin/groups/GROUP/replicas/REPLICA ``{"draining": true, "weight": 0.5}``."""
        fleet = self._admit(scope)
        asked = await self._read(scope, receive, _Change)
        if asked.weight is not None:
            _check_weight(asked.weight)
        group, name = scope["path_params"]["group"], scope["path_params"]["replica"]
        spec = fleet.change_replica(group, name, draining=asked.draining, weight=asked.weight)
        answer = {"replica": spec.name, "draining": spec.draining, "weight": spec.weight}
        await send_json(send, exchange_of(scope), answer)

    async def remove(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /admin/groups/GROUP/replicas/REPLICA: no new requests, running ones may finish."""
        fleet = self._admit(scope)
        fleet.remove_replica(scope["path_params"]["group"], scope["path_params"]["replica"])
        await send_json(send, exchange_of(scope), {"removed": True})

    async def start_drill(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /admin/drill ``{"lane": LANE}``: rehearse that the lane's engines get slow. One at a time."""
        fleet = self._admit(scope)
        asked = await self._read(scope, receive, _StartDrill)
        if asked.lane not in self._deps.live.config.lanes:
            raise NotFound(f"there is no lane {asked.lane[:64]!r}", param="lane")
        if self._drill is not None and not self._drill.over:
            raise RequestError("a drill is under way", code="drill_running")
        self._drill = Drill(fleet, self._deps.live.config, asked.lane, clock=self._deps.clock)
        self._drill.begin()
        await send_json(send, exchange_of(scope), self._drill.report(), status=202)

    async def drill(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/drill: how far the latest drill is."""
        self._admit(scope)
        if self._drill is None:
            raise NotFound("there has been no drill")
        await send_json(send, exchange_of(scope), self._drill.report())

    def _admit(self, scope: Scope) -> Fleet:
        live = self._deps.live
        admit_admin(scope, live.admin_keys, live.tenants)
        if self._deps.fleet is None:
            raise NotFound("there are no groups here: one embedded engine serves every lane")
        return self._deps.fleet

    async def _read(self, scope: Scope, receive: Receive, kind: type[Body]) -> Body:
        body = await read_body(scope, receive, self._deps.live.config.server)
        asked, _ = decode(body, kind, "reject")
        return asked


def _check_weight(weight: float) -> None:
    if not 0.01 <= weight <= 100:
        raise RequestError("weight must be between 0.01 and 100", param="weight")
