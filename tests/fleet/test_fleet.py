"""A fleet against real server processes: where requests go, and what becomes of them when engines fail."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.programmable_engine import EngineProcess
from headrace.config.groups import ReplicaConfig, RetryConfig
from headrace.control.breaker import BreakerConfig
from headrace.engines.fleet.group import NoPlace
from headrace.errors import RemoteFailure
from headrace.lanes.lane import Fallback
from tests.fleet.conftest import chat, config_of, group_of, idle, outputs, running, text, words

Servers = Callable[..., list[EngineProcess]]


async def test_requests_are_spread_and_whole(servers: Servers) -> None:
    two = servers(2, itl_s=0.001)
    async with running(config_of({"g": group_of(two)})) as fleet:
        answers = await asyncio.gather(*(outputs(fleet, chat(8)) for _ in range(40)))
        assert {text(answer) for answer in answers} == {words(8)}
        assert all(process.stats()["requests"] >= 8 for process in two)


async def test_a_server_that_refuses_is_tried_no_more_and_the_client_sees_nothing(servers: Servers) -> None:
    """Before the first byte another replica gets the request."""
    sick, well = servers(2)
    sick.control(fault="status", fault_status=500)
    async with running(config_of({"g": group_of([sick, well])})) as fleet:
        for _ in range(20):
            assert text(await outputs(fleet, chat(4))) == words(4)
        assert sick.stats()["requests"] < 10
        assert fleet.counts.again["g", "retry"] == sick.stats()["requests"]


async def test_an_answer_cut_off_goes_on_elsewhere_as_if_nothing_had_happened(servers: Servers) -> None:
    """The same text as from one engine, and every token once."""
    bad, good = servers(2, tokens=12)
    bad.control(fault="cut", fault_after=5)
    async with running(config_of({"g": group_of([bad, good])})) as fleet:
        for _ in range(6):
            found = await outputs(fleet, chat(12))
            assert text(found) == words(12)
            assert sum(output.tokens for output in found) == 12
            assert [output.finish for output in found].count(None) == len(found) - 1
        assert fleet.counts.again["g", "continue"] >= 1


async def test_what_cannot_be_continued_ends_with_an_error(servers: Servers) -> None:
    """With tools, say. Never silently."""
    (bad,) = servers(1)
    bad.control(fault="cut", fault_after=2)
    async with running(config_of({"g": group_of([bad])})) as fleet:
        with pytest.raises(RemoteFailure) as caught:
            await outputs(fleet, chat(8, continuable=False))
        assert caught.value.kind == "cut"


async def test_a_frozen_server_loses_its_requests_to_others(servers: Servers) -> None:
    """SIGSTOP: its streams go on elsewhere, new requests avoid it, and it comes back by itself."""
    frozen, other = servers(2, itl_s=0.02, tokens=100)
    async with running(config_of({"g": group_of([frozen, other])})) as fleet:
        streams = [asyncio.create_task(outputs(fleet, chat(60))) for _ in range(8)]
        while frozen.stats()["live"] < 2:
            await asyncio.sleep(0.01)
        frozen.signal(signal.SIGSTOP)
        try:
            assert {text(found) for found in await asyncio.gather(*streams)} == {words(60)}
            assert text(await outputs(fleet, chat(3))) == words(3)
        finally:
            frozen.signal(signal.SIGCONT)
        replica = next(r for name, r in fleet.groups["g"].replicas.items() if name.endswith(str(frozen.port)))
        while not replica.view(admits=True).healthy:
            await asyncio.sleep(0.02)


async def test_a_killed_server_is_replaced_and_taken_back(servers: Servers) -> None:
    killed, other = servers(2, itl_s=0.01, tokens=100)
    async with running(config_of({"g": group_of([killed, other])})) as fleet:
        streams = [asyncio.create_task(outputs(fleet, chat(50))) for _ in range(8)]
        while killed.stats()["live"] < 2:
            await asyncio.sleep(0.01)
        killed.kill()
        assert {text(found) for found in await asyncio.gather(*streams)} == {words(50)}
        killed.revive()
        while not killed.stats()["requests"]:
            await outputs(fleet, chat(1))


async def test_a_late_first_token_is_hedged(servers: Servers) -> None:
    """An urgent lane's request goes to a second replica; the first to answer serves it, the other is aborted."""
    slow, quick = servers(2)
    slow.control(ttft_s=0.8)
    config = config_of({"g": group_of([slow, quick])}, hedge_after_s=0.05)
    async with running(config) as fleet:
        loop = asyncio.get_running_loop()
        for _ in range(6):
            begun_s = loop.time()
            assert text(await outputs(fleet, chat(2))) == words(2)
            assert loop.time() - begun_s < 0.7
        hedged = fleet.counts.again["g", "hedge"]
        assert hedged >= 1
        while slow.stats()["live"]:
            await asyncio.sleep(0.01)
        assert slow.stats()["aborted"] == hedged


async def test_the_budget_bounds_further_tries(servers: Servers) -> None:
    """When everything fails, tries must not add to it: each is paid for."""
    (bad,) = servers(1)
    bad.control(fault="status", fault_status=500)
    retry = RetryConfig(tries=3, backoff_s=0.0, budget=0.0, reserve=2)
    config = config_of({"g": group_of([bad], retry=retry)}, breaker=BreakerConfig(enabled=False))
    async with running(config) as fleet:
        for _ in range(2):
            with pytest.raises(RemoteFailure):
                await outputs(fleet, chat())
        assert fleet.counts.again["g", "retry"] <= 2


async def test_urgent_ones_go_first_when_a_place_is_free(servers: Servers) -> None:
    """The line is in the gateway: who came later and is more urgent overtakes."""
    (one,) = servers(1, itl_s=0.01)
    async with running(config_of({"g": group_of([one], max_in_flight=1)})) as fleet:
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await outputs(fleet, chat(8, priority=priority))
            order.append(name)

        tasks = [asyncio.create_task(ask("first", 50))]
        await asyncio.sleep(0.02)
        tasks.append(asyncio.create_task(ask("patient", 100)))
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(ask("urgent", 0)))
        await asyncio.gather(*tasks)
        assert order == ["first", "urgent", "patient"]
        assert one.stats()["most_live"] == 1


async def test_a_full_group_fails_a_request_after_its_wait_and_not_before(servers: Servers) -> None:
    (one,) = servers(1, itl_s=0.01, tokens=10_000)
    async with running(config_of({"g": group_of([one], max_in_flight=1, queue_wait_s=0.3)})) as fleet:
        holder = fleet.submit(chat(None))
        await anext(holder)
        with pytest.raises(NoPlace, match="no engine had room"):
            await outputs(fleet, chat())
        await holder.aclose()
        await idle(fleet)


async def test_a_slow_group_opens_its_breaker_and_the_fallback_takes_over(servers: Servers) -> None:
    """By its own rule, within its windows; it is closed again soon after the engine is well, with nobody's help."""
    primary, fallback = servers(2)
    breaker = BreakerConfig(p99_ttft_s=0.1, window_s=0.05, windows=3, cool_down_s=0.2, max_cool_down_s=0.4)
    config = config_of(
        {"g": group_of([primary]), "spare": group_of([fallback])},
        group="g",
        fallback=Fallback(group="spare"),
        breaker=breaker,
    )
    async with running(config) as fleet:
        primary.control(ttft_s=0.2)
        while fleet.not_served("chat") is None:
            await asyncio.gather(*(outputs(fleet, chat(1)) for _ in range(4)))
        (replica,) = fleet.groups["g"].replicas.values()
        assert replica.places() <= 4
        request = chat(2)
        assert text(await outputs(fleet, request)) == words(2)
        assert fleet.degradation(request.request_id) == "group=spare" or replica.breakers["chat"].state == "half_open"
        assert fallback.stats()["requests"] >= 1
        primary.control(ttft_s=0.0)
        while fleet.not_served("chat") is not None:
            await outputs(fleet, chat(1))
            await asyncio.sleep(0.01)
        states = [transition.after for _, _, _, transition in fleet.transitions]
        assert states[:2] == ["open", "half_open"] and states[-1] == "closed"


async def test_without_a_fallback_a_slow_group_goes_on_with_a_small_batch(servers: Servers) -> None:
    """Slow answers are better than none."""
    (only,) = servers(1, itl_s=0.005)
    async with running(config_of({"g": group_of([only])})) as fleet:
        assert fleet.groups["g"].replicas
        await outputs(fleet, chat(1))
        assert fleet.force_open("g", "chat", "test") == 1
        answers = await asyncio.gather(*(outputs(fleet, chat(10)) for _ in range(12)))
        assert {text(answer) for answer in answers} == {words(10)}
        assert only.stats()["most_live"] <= 4
        assert fleet.counts.degraded["chat"] == 12


async def test_a_clients_fault_counts_against_nobody(servers: Servers) -> None:
    """A hundred bad requests open no breaker and take no replica out."""
    (only,) = servers(1)
    only.control(fault="status", fault_status=400)
    async with running(config_of({"g": group_of([only])})) as fleet:
        for _ in range(100):
            (end,) = await outputs(fleet, chat())
            assert end.refused_status == 400
        only.control(fault="")
        assert text(await outputs(fleet, chat(2))) == words(2)
        assert not fleet.transitions and not fleet.counts.again


async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has(servers: Servers) -> None:
    leaving, staying = servers(2, itl_s=0.01, tokens=60)
    async with running(config_of({"g": group_of([leaving, staying])})) as fleet:
        streams = [asyncio.create_task(outputs(fleet, chat(40))) for _ in range(8)]
        while leaving.stats()["live"] < 1:
            await asyncio.sleep(0.01)
        fleet.change_replica("g", f"127.0.0.1:{leaving.port}", draining=True, weight=None)
        before = leaving.stats()["requests"]
        for _ in range(6):
            await outputs(fleet, chat(1))
        assert leaving.stats()["requests"] == before
        assert {text(found) for found in await asyncio.gather(*streams)} == {words(40)}
        assert leaving.stats()["aborted"] == 0


async def test_a_removed_replica_finishes_what_it_has(servers: Servers) -> None:
    leaving, staying = servers(2, itl_s=0.01, tokens=60)
    async with running(config_of({"g": group_of([leaving, staying])})) as fleet:
        streams = [asyncio.create_task(outputs(fleet, chat(40))) for _ in range(8)]
        while leaving.stats()["live"] < 1:
            await asyncio.sleep(0.01)
        fleet.remove_replica("g", f"127.0.0.1:{leaving.port}")
        assert {text(found) for found in await asyncio.gather(*streams)} == {words(40)}
        assert leaving.stats()["aborted"] == 0 and fleet.counts.again["g", "continue"] == 0


async def test_a_watched_file_adds_and_takes_out_replicas_and_a_bad_one_changes_nothing(
    servers: Servers, tmp_path: Path
) -> None:
    one, two = servers(2)
    listed = tmp_path / "replicas.yaml"
    listed.write_text(f"replicas:\n  - url: {one.url}\n")
    async with running(config_of({"g": group_of([], file=str(listed))})) as fleet:
        names = {process: f"127.0.0.1:{process.port}" for process in (one, two)}
        while set(fleet.groups["g"].replicas) != {names[one]}:
            await asyncio.sleep(0.05)
        listed.write_text("replicas: [{url: not a url}]\n")
        await asyncio.sleep(1.3)
        assert set(fleet.groups["g"].replicas) == {names[one]}
        listed.write_text(f"replicas:\n  - {{url: {two.url}, zone: b}}\n")
        while set(fleet.groups["g"].replicas) != {names[two]}:
            await asyncio.sleep(0.05)


async def test_a_name_stands_for_its_addresses(servers: Servers) -> None:
    from headrace.config.groups import DnsConfig

    (one,) = servers(1)
    group = group_of([], dns=(DnsConfig(f"http://localhost:{one.port}"),))
    async with running(config_of({"g": group})) as fleet:
        while f"127.0.0.1:{one.port}" not in fleet.groups["g"].replicas:
            await asyncio.sleep(0.02)
        assert text(await outputs(fleet, chat(2))) == words(2)


async def test_a_session_and_a_prefix_stay_with_their_replica(servers: Servers) -> None:
    """The same long beginning goes where it was sent before: computing it takes long enough to matter."""
    both = servers(2, ttft_s=0.03)
    messages = b'[{"role":"user","content":"' + b"long " * 4000 + b'"}]'
    async with running(config_of({"g": group_of(both)})) as fleet:
        for _ in range(10):
            await outputs(fleet, chat(1, messages=messages, estimated_prompt_tokens=5000))
        counts = sorted(process.stats()["requests"] for process in both)
        assert counts == [0, 10]


async def test_the_other_zone_takes_over_when_the_own_is_lost(servers: Servers) -> None:
    import msgspec

    from headrace.config.groups import FleetConfig

    here, there = servers(2)
    replicas = (ReplicaConfig(here.url, zone="a"), ReplicaConfig(there.url, zone="b"))
    config = config_of({"g": group_of([], replicas=replicas)})
    config = msgspec.structs.replace(config, fleet=FleetConfig(zone="a"))
    async with running(config) as fleet:
        for _ in range(5):
            await outputs(fleet, chat(1))
        assert there.stats()["requests"] == 0
        here.kill()
        for _ in range(5):
            assert text(await outputs(fleet, chat(1))) == words(1)
        here.revive()


async def test_a_new_configuration_loses_nothing(servers: Servers) -> None:
    """Replicas that stay keep their streams; a group's new settings hold from then on."""
    one, two = servers(2, itl_s=0.01, tokens=60)
    config = config_of({"g": group_of([one])})
    async with running(config) as fleet:
        streams = [asyncio.create_task(outputs(fleet, chat(40))) for _ in range(6)]
        while one.stats()["live"] < 6:
            await asyncio.sleep(0.01)
        fleet.reconfigure(config_of({"g": group_of([one, two])}))
        assert len(fleet.groups["g"].replicas) == 2
        assert {text(found) for found in await asyncio.gather(*streams)} == {words(40)}
        assert one.stats()["aborted"] == 0


async def test_the_embedded_engine_is_a_replica_like_any_other(servers: Servers) -> None:
    """Its group's lane is served by it, by token ids; when it is gone the fallback group takes over from the JSON."""
    import time

    import msgspec

    from headrace.config.groups import GroupConfig
    from headrace.engines.fleet.fleet import Fleet
    from headrace.engines.scripted import ScriptedEngine, text_script

    embedded = ScriptedEngine(text_script("from within"), clock=time.monotonic)
    await embedded.start()
    groups = {
        "own": GroupConfig(kind="embedded", unavailable_wait_s=0.2),
        "spare": group_of(servers(1)),
    }
    fleet = Fleet(config_of(groups, fallback=Fallback(group="spare")), embedded=embedded)
    await fleet.start()
    try:
        request = msgspec.structs.replace(chat(64), prompt_tokens=[1, 2, 3])
        assert text(await outputs(fleet, request)) == "from within"
        assert embedded.submitted[0].wire is None and embedded.submitted[0].prompt_tokens == [1, 2, 3]
        embedded.kill()
        request = msgspec.structs.replace(chat(4), prompt_tokens=[1, 2, 3])
        assert text(await outputs(fleet, request)) == words(4)
        assert fleet.degradation(request.request_id) == "group=spare"
        embedded.revive()
        while fleet.not_served("chat") is not None:
            await asyncio.sleep(0.02)
        request = msgspec.structs.replace(chat(64), prompt_tokens=[1])
        assert text(await outputs(fleet, request)) == "from within"
    finally:
        await fleet.close()
        await embedded.close()
