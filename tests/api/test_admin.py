"""The admin API: live knobs, what the scheduler does, and who gets in."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.admin_access import AdminKeys, admit_admin
from headrace.config.knobs import knobs_of
from headrace.config.scheduling import scheduling_knobs
from headrace.config.schema import Config, SchedulingConfig, Tenant
from headrace.errors import AuthenticationFailed, ConfigError, PermissionDenied
from headrace.lanes.tenants import TenantDirectory
from headrace.messages.engine import Knobs
from tests.api.harness import Gate, Served, config, serving

KNOBS = "/admin/knobs"
ADMIN = "sk-admin"
TENANT = "sk-tenant"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def with_scheduling(settings: Config, **values: Any) -> Config:
    engine = msgspec.structs.replace(settings.engine, scheduling=SchedulingConfig(**values))
    return msgspec.structs.replace(settings, engine=engine)


async def patch(served: Served, **changes: Any) -> Any:
    response = await served.client.patch(KNOBS, json=changes)
    assert response.status_code == 200, response.text
    return response.json()


async def value(served: Served, name: str) -> tuple[Any, str]:
    knob = (await served.client.get(KNOBS)).json()["knobs"][name]
    return knob["value"], knob["layer"]


async def test_every_knob_is_told_with_its_value_meaning_range_and_layer(tmp_path: Path) -> None:
    async with serving(tmp_path, with_scheduling(config(), max_prefill_tokens=128)) as served:
        knobs = (await served.client.get(KNOBS)).json()["knobs"]
    assert list(knobs) == list(knobs_of(config(), step_tokens_limit=512))
    meaning = knobs["max_prefill_tokens"].pop("meaning")
    assert meaning
    assert knobs["max_prefill_tokens"] == {
        "value": 128,
        "layer": "config",
        "configured": 128,
        "default": 512,
        "unit": "tokens",
        "range": "1 to 65536",
    }
    assert (knobs["max_num_seqs"]["value"], knobs["max_num_seqs"]["range"]) == (None, "1 to 1000000, or null")
    assert knobs["strategy"]["range"] == "auto, continuous, dynamic, hybrid, static"


async def test_a_change_reaches_the_engine_whole_and_is_answered_with_what_changed(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answer = await patch(
            served, **{"max_prefill_tokens": 256, "lane_weights.batch": 0.5, "band_caps.0": 16, "lane_caps.long": 2}
        )
        assert await value(served, "lane_caps.long") == (2, "live")
        assert await value(served, "linger_s") == (2.0, "config")
        (sent,) = served.engine.knobs_set
        expected = scheduling_knobs(served.deps.live.config)
    assert answer["changed"] == {
        "max_prefill_tokens": {"old": 512, "new": 256},
        "band_caps.0": {"old": None, "new": 16},
        "lane_caps.long": {"old": None, "new": 2},
        "lane_weights.batch": {"old": 1.0, "new": 0.5},
    }
    assert answer["knobs"]["max_prefill_tokens"]["value"] == 256
    assert sent == Knobs(scheduling=expected)
    assert (expected.max_prefill_tokens, expected.lane_caps, expected.lane_weights["batch"]) == (256, {"long": 2}, 0.5)


async def test_later_changes_add_to_earlier_ones_and_null_takes_a_cap_away(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await patch(served, **{"lane_caps.long": 2})
        await patch(served, max_num_seqs=4)
        assert (await value(served, "lane_caps.long"), await value(served, "max_num_seqs")) == (
            (2, "live"),
            (4, "live"),
        )
        await patch(served, **{"lane_caps.long": None})
        assert await value(served, "lane_caps.long") == (None, "live")


async def test_a_value_that_it_has_already_is_no_change_but_stays_over_a_reload(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert (await patch(served, linger_s=2))["changed"] == {}
        assert served.engine.knobs_set == []
        served.deps.live.swap(with_scheduling(config(), linger_s=5))
        assert await value(served, "linger_s") == (2.0, "live")


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"max_prefil_tokens": 5}, "max_prefil_tokens", "did you mean max_prefill_tokens?"),
        ({"linger_s": 1, "strategy": "x"}, "strategy", "expected one of auto, continuous"),
        ({"max_prefill_tokens": 1}, "min_prefill_tokens", "64 is above max_prefill_tokens 1"),
        ({"step_tokens": 1024}, "step_tokens", "1024 is out of range (1 to 512)"),
        ({"x": 1, "linger_s": -1}, "x", "; linger_s: -1 is out of range (0 to 3600)"),
        ([1], None, "expected object, got array"),
        ("linger_s=1", None, "expected object, got str"),
    ],
)
async def test_a_wrong_change_is_400_names_the_knob_and_changes_nothing(
    tmp_path: Path, body: object, param: str | None, said: str
) -> None:
    async with serving(tmp_path) as served:
        before = (await served.client.get(KNOBS)).json()
        refused = await served.client.patch(KNOBS, json=body)
        assert (await served.client.get(KNOBS)).json() == before
        assert served.engine.knobs_set == []
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"", 400), (b"{" + b" " * 2000 + b"}", 413)])
async def test_a_body_is_bounded_and_must_be_json(tmp_path: Path, body: bytes, status: int) -> None:
    async with serving(tmp_path, config(max_body_bytes=1024)) as served:
        assert (await served.client.patch(KNOBS, content=body)).status_code == status


async def test_delete_goes_back_to_the_configuration_whole_or_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await patch(served, **{"linger_s": 7, "max_num_seqs": 4, "lane_caps.long": 2})
        one = (await served.client.delete(f"{KNOBS}?name=max_num_seqs")).json()
        assert await value(served, "linger_s") == (7.0, "live")
        rest = (await served.client.delete(KNOBS)).json()
        unknown = await served.client.delete(f"{KNOBS}?name=lingers")
        last = served.engine.knobs_set[-1]
    assert one["changed"] == {"max_num_seqs": {"old": 4, "new": None}}
    assert set(rest["changed"]) == {"linger_s", "lane_caps.long"}
    assert {knob["layer"] for knob in rest["knobs"].values()} == {"config"}
    assert last == Knobs(scheduling=scheduling_knobs(config()))
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "lingers")


async def test_a_reload_reaches_the_engine_and_leaves_what_was_set_live(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await patch(served, linger_s=7)
        served.deps.live.swap(with_scheduling(config(), linger_s=1, max_num_seqs=9))
        knobs = served.engine.knobs_set[-1].scheduling
        assert knobs is not None and (knobs.linger_s, knobs.max_num_seqs) == (7.0, 9)
        served.deps.live.swap(served.deps.live.loaded)
        assert len(served.engine.knobs_set) == 2  # nothing new, nothing sent
        await served.client.delete(KNOBS)
        assert await value(served, "linger_s") == (1.0, "config")


async def test_a_reload_that_contradicts_what_was_set_live_is_refused_and_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await patch(served, max_prefill_tokens=128)
        with pytest.raises(ConfigError, match=r"min_prefill_tokens: 256 is above .* 128; set live: max_prefill_tokens"):
            served.deps.live.swap(with_scheduling(config(), min_prefill_tokens=256))
        assert served.deps.live.loaded == config()


async def test_a_lane_that_a_reload_removes_takes_its_knobs_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fewer = {name: lane for name, lane in config().lanes.items() if name != "long"}
    async with serving(tmp_path) as served:
        await patch(served, **{"lane_caps.long": 2})
        served.deps.live.swap(msgspec.structs.replace(config(), lanes=fewer))
        assert "lane_caps.long" not in (await served.client.get(KNOBS)).json()["knobs"]
        assert served.deps.live.changes == {}
    assert "knob lane_caps.long, which was set live, is gone with its lane" in caplog.text


async def test_an_alias_deleted_while_a_knob_is_set_does_not_make_the_knob_the_configurations(tmp_path: Path) -> None:
    async with serving(tmp_path, config(allow_model_delete=True)) as served:
        await patch(served, linger_s=7)
        assert (await served.client.delete("/v1/models/alias")).status_code == 200
        await served.client.delete(KNOBS)
        assert await value(served, "linger_s") == (2.0, "config")


async def test_a_wider_lane_lets_those_at_its_door_in_at_once(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        await patch(served, **{"lane_caps.interactive": 1})
        answers = [asyncio.create_task(served.chat()) for _ in range(3)]
        await served.until(lambda: served.deps.gateway.ledger.lane("interactive").held == 2)
        await patch(served, **{"lane_caps.interactive": 2})
        assert served.deps.gateway.ledger.lane("interactive").held == 1
        await served.client.delete(KNOBS)
        assert served.deps.gateway.ledger.lane("interactive").held == 0
        gate.open(500)
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200, 200, 200]


async def test_a_change_is_logged_with_who_what_old_and_new_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.api.live")
    async with serving(tmp_path, config(admin_keys=("sk-other", ADMIN))) as served:
        await served.client.patch(KNOBS, json={"max_num_seqs": 8}, headers=bearer(ADMIN) | {"x-request-id": "r1"})
        served.deps.live.swap(with_scheduling(served.deps.live.loaded, linger_s=1.0))
        metrics = (await served.client.get("/metrics")).text
    assert caplog.messages == [
        "knob max_num_seqs: None -> 8, by admin key 1 from 127.0.0.1, request r1",
        "knob linger_s: 2.0 -> 1.0, by the configuration",
    ]
    assert 'headrace_knob_changes_total{knob="max_num_seqs"} 1.0' in metrics
    assert ADMIN not in caplog.text


async def test_scheduling_says_the_strategy_and_the_lanes_counts(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, with_scheduling(config(), strategy="auto"), pace=gate) as served:
        idle = (await served.client.get("/admin/scheduling")).json()
        answer = asyncio.create_task(served.chat())
        await served.until(lambda: served.deps.gateway.ledger.waiting == 1)
        gate.open(1)
        await served.until(lambda: served.deps.gateway.ledger.running == 1)
        busy = (await served.client.get("/admin/scheduling")).json()
        gate.open(500)
        await answer
    assert (idle["strategy"], idle["strategy_in_force"], idle["engine"]) == ("auto", None, None)
    assert set(busy["engine"]) >= {"batch_cap", "fragmentation", "step_prediction_error", "running"}
    assert busy["engine"]["running"] == 1
    assert list(busy["lanes"]) == list(config().lanes)
    lane = busy["lanes"]["interactive"]
    assert (lane["held"], lane["waiting"], lane["running"], lane["max_running"]) == (0, 0, 1, None)
    assert lane["weight"] == config().lanes["interactive"].weight


async def test_an_engine_that_is_down_keeps_nobody_from_the_knobs(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        served.engine.kill()
        await patch(served, max_num_seqs=8)
        told = (await served.client.get("/admin/scheduling")).json()
        served.engine.revive()
    assert told["engine_ready"] is False


async def test_other_methods_and_paths_are_refused_as_everywhere(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        post = await served.client.post(KNOBS, json={})
        nothing = await served.client.get("/admin")
        prefixed = await served.client.get("/realtime/admin/knobs")
        head = await served.client.head(KNOBS)
    assert (post.status_code, post.headers["allow"]) == (405, "DELETE, GET, HEAD, PATCH")
    assert (nothing.status_code, prefixed.status_code, head.status_code) == (404, 404, 200)


def keyed() -> Config:
    return msgspec.structs.replace(config(admin_keys=(ADMIN,)), tenants={"acme": Tenant(api_keys=(TENANT,))})


@pytest.mark.parametrize("path", [KNOBS, "/admin/scheduling"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(ADMIN), 200),
        ({}, 401),
        (bearer("sk-admi"), 401),
        ({"authorization": ADMIN}, 401),
        (bearer(TENANT), 403),
    ],
)
async def test_with_admin_keys_only_one_of_them_gets_in(
    tmp_path: Path, path: str, headers: dict[str, str], status: int
) -> None:
    async with serving(tmp_path, keyed()) as served:
        assert (await served.client.get(path, headers=headers)).status_code == status
        if path == KNOBS and status != 200:
            assert (await served.client.patch(KNOBS, json={"linger_s": 1}, headers=headers)).status_code == status
            assert (await served.client.delete(KNOBS, headers=headers)).status_code == status
            assert served.engine.knobs_set == []


async def test_an_admin_key_is_no_tenants_key(tmp_path: Path) -> None:
    async with serving(tmp_path, keyed()) as served:
        assert (await served.chat(headers=bearer(ADMIN))).status_code == 401


OPEN = TenantDirectory.build(Config())
NO_KEYS = AdminKeys.build(())


def scope(client: object = ("127.0.0.1", 5), host: str | None = "localhost", **headers: str) -> dict[str, Any]:
    sent = [] if host is None else [(b"host", host.encode())]
    sent += [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    return {"client": client, "headers": sent}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1"])
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "127.1.2.3"])
def test_without_admin_keys_a_client_on_this_machine_gets_in(address: str, host: str) -> None:
    assert admit_admin(scope((address, 5), host), NO_KEYS, OPEN) == f"a local client ({address})"


@pytest.mark.parametrize(
    "asked",
    [
        scope(("10.0.0.5", 5)),
        scope(("::ffff:10.0.0.5", 5)),
        scope(("128.0.0.1", 5)),
        scope(("", 5)),
        scope(("localhost", 5)),
        scope(None),
        scope(x_forwarded_for="127.0.0.1"),
        scope(x_real_ip="127.0.0.1"),
        scope(x_forwarded_host="localhost"),
        scope(x_forwarded_proto="http"),
        scope(forwarded="for=127.0.0.1"),
        scope(via="1.1 proxy"),
    ],
)
def test_without_admin_keys_nobody_from_elsewhere_or_forwarded_gets_in(asked: dict[str, Any]) -> None:
    with pytest.raises(PermissionDenied, match=r"configure server\.admin_keys"):
        admit_admin(asked, NO_KEYS, OPEN)


@pytest.mark.parametrize("host", [None, "", "evil.example", "evil.example:8000", "10.0.0.5", "localhost.evil.example"])
def test_without_admin_keys_a_web_page_that_resolves_to_this_machine_does_not_get_in(host: str | None) -> None:
    with pytest.raises(PermissionDenied, match=r"127\.0\.0\.1, \[::1\] or localhost"):
        admit_admin(scope(host=host), NO_KEYS, OPEN)


def test_without_admin_keys_no_key_opens_anything() -> None:
    tenants = TenantDirectory.build(keyed())
    with pytest.raises(PermissionDenied, match="a tenant's key"):
        admit_admin(scope(authorization=f"Bearer {TENANT}"), NO_KEYS, tenants)
    with pytest.raises(PermissionDenied, match=r"no key is valid here while server\.admin_keys is empty"):
        admit_admin(scope(authorization="Bearer sk-x"), NO_KEYS, OPEN)


def test_an_admin_key_gets_in_from_anywhere() -> None:
    keys = AdminKeys.build((ADMIN,))
    asked = scope(("10.0.0.5", 5), "headrace.internal", authorization=f"Bearer {ADMIN}", x_forwarded_for="10.0.0.9")
    assert admit_admin(asked, keys, OPEN) == "admin key 0 from 10.0.0.5"
    with pytest.raises(AuthenticationFailed):
        admit_admin(scope(), keys, OPEN)
    assert ADMIN not in repr(keys)


async def test_a_forwarded_request_does_not_get_in_through_uvicorns_own_reading_of_headers(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for headers in ({"x-forwarded-for": "127.0.0.1"}, {"x-forwarded-for": "10.0.0.5"}):
            assert (await served.client.get(KNOBS, headers=headers)).status_code == 403


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_NAMES = st.sampled_from(sorted(knobs_of(Config(), step_tokens_limit=512))) | st.text(max_size=12)


@pytest.mark.timeout(120)
async def test_whatever_comes_the_answer_is_200_or_400_and_what_holds_is_right(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        loop = asyncio.get_running_loop()
        statuses: set[int] = set()

        async def send(body: bytes) -> None:
            response = await served.client.patch(KNOBS, content=body)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400), response.text
            assert response.status_code == 200 or response.json()["error"]["message"]
            scheduling_knobs(served.deps.live.config)

        @given(st.binary(max_size=32) | st.dictionaries(_NAMES, _JSON, max_size=3).map(msgspec.json.encode))
        @settings(max_examples=150, deadline=None)
        def drive(body: bytes) -> None:
            asyncio.run_coroutine_threadsafe(send(body), loop).result()

        await asyncio.to_thread(drive)
    assert statuses == {200, 400}
