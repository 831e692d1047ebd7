"""Runs the peers in turns under one part's load, and keeps what each did in each round."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.peers import servers
from benchmarks.peers.pool import Pool
from benchmarks.peers.servers import Peer, Setting
from benchmarks.peers.table import cells
from benchmarks.peers.verdict import ALL
from headrace.bench.drive.runner import RunSettings
from headrace.bench.load.workload_file import LoadedWorkload, with_values
from headrace.bench.record_file import RunResult
from headrace.bench.results.summary import summarise
from headrace.bench.session import RequestOptions, ask_scale, at_rate, prepare, run_load

USERS = 32
"""Of the closed loop that measures capacity: more than any server has slots, and none of them pauses."""
DRAIN_S = 30.0


@dataclass(frozen=True)
class Part:
    """One model's part. ``seconds`` of load a run, ``capacity_s`` of the capacity's measurement."""

    title: str
    setting: Setting
    seconds: float
    capacity_s: float


class Session:
    """One part: what has been measured so far, and the peers. ``records`` is the folder for every run's raw records
    (None: they are not kept)."""

    def __init__(
        self, part: Part, peers: Sequence[Peer], workload: LoadedWorkload, *, seed: int, records: Path | None
    ) -> None:
        self._part = part
        self._peers = peers
        self._workload = with_values(workload, scale_to_context_tokens=part.setting.context_tokens)
        self._seed = seed
        self._records = records
        self.pools: dict[tuple[float, str, str], dict[int, Pool]] = {}
        """(load, server, class) -> round -> what happened."""
        self.invalid: list[str] = []

    def capacity_rps(self, peer: Peer, number: int) -> float:
        """Legal requests/s that the peer completes in a closed loop, as measured before round ``number``."""
        loaded = with_values(
            _without_thinking(self._workload), arrivals=f"closed({USERS})", duration_s=self._part.capacity_s
        )
        result = self._run(peer, loaded, seed=self._seed + number, name=f"capacity round {number + 1}")
        summary = summarise(result.info, result.records)
        completed_rps = summary.whole.completed_rps
        say(f"{self._part.title}: round {number + 1}: {peer.name} completes {completed_rps:.2f} requests/s")
        return completed_rps

    def round(self, number: int, loads: Sequence[float], capacity_rps: float) -> None:
        """Every load, every peer, in an order that turns from round to round. All peers get the same schedule, every
        round another one."""
        for load in loads:
            turned = [*self._peers[number % len(self._peers) :], *self._peers[: number % len(self._peers)]]
            for peer in turned:
                loaded = at_rate(self._workload, "poisson(RATE)", capacity_rps * load, self._part.seconds)
                name = f"{load:.0%} round {number + 1} {peer.name}"
                self._take(load, peer, number, self._run(peer, loaded, seed=self._seed + number, name=name))

    def rows(self) -> list[list[str]]:
        """The table, loads first."""
        return [[f"{load:.0%}", name, group, *cells(pool)] for (load, name, group), pool in self._together()]

    def plain(self) -> list[dict[str, object]]:
        """For JSON: all rounds together, and each."""
        return [
            {
                "load": load,
                "server": name,
                "class": group,
                **pool.plain(),
                "rounds": [each.plain() for _, each in sorted(self.pools[load, name, group].items())],
            }
            for (load, name, group), pool in self._together()
        ]

    def _together(self) -> Iterator[tuple[tuple[float, str, str], Pool]]:
        for key, rounds in sorted(self.pools.items()):
            yield key, Pool.together([pool for _, pool in sorted(rounds.items())])

    def _run(self, peer: Peer, loaded: LoadedWorkload, *, seed: int, name: str) -> RunResult:
        """Raises KeyboardInterrupt when Ctrl-C ended the run: what it measured is not a whole run."""
        with servers.running(peer) as server:
            settings = RunSettings(
                target=server.url, model=self._part.setting.model_name, drain_s=DRAIN_S, label=peer.name
            )
            options = RequestOptions(ignore_eos=True, salt=secrets.randbits(31))
            scale = ask_scale(settings, options.endpoint, os.environ)
            load = prepare(loaded, options, scale, model=settings.model, seed=seed)
            result = run_load(load, settings, os.environ, records_path=self._records_path(name))
            code = server.exit_code()
        if result.info.interrupted:
            raise KeyboardInterrupt
        if code is not None:
            self.invalid.append(f"{name}: the server ended with code {code} while it was loaded")
        return result

    def _records_path(self, name: str) -> Path | None:
        if self._records is None:
            return None
        self._records.mkdir(parents=True, exist_ok=True)
        return self._records / f"{self._part.setting.model_name} {name}.jsonl".replace(" ", "-")

    def _take(self, load: float, peer: Peer, number: int, result: RunResult) -> None:
        summary = summarise(result.info, result.records)
        self.invalid += [f"{peer.name} at {load:.0%}, round {number + 1}: {reason}" for reason in summary.invalid]
        legal = [record for record in result.records if record.malformed is None]
        for group, name in [(summary.whole, ALL), *[(each, each.name) for each in summary.classes]]:
            members = [record for record in legal if name in (ALL, record.class_name)]
            pool = Pool.of(group, members, summary.window.length_s)
            self.pools.setdefault((load, peer.name, name), {})[number] = pool
        whole = self.pools[load, peer.name, ALL][number]
        say(
            f"{self._part.title}: {load:.0%} round {number + 1} {peer.name}: {whole.good} of {whole.offered} good, "
            f"{whole.shed} shed, {whole.timeouts} not answered in time, {whole.errors} errors"
        )


def _without_thinking(loaded: LoadedWorkload) -> LoadedWorkload:
    """The same requests from users who answer at once: the server is never short of work."""
    own = loaded.workload
    classes = {
        name: traffic
        if traffic.session is None
        else msgspec.structs.replace(traffic, session=msgspec.structs.replace(traffic.session, think_ms="1"))
        for name, traffic in own.classes.items()
    }
    return replace(loaded, workload=msgspec.structs.replace(own, classes=classes))


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
