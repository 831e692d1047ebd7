"""headrace and its peers under the same mixed workload at 70 %, 100 % and 150 % of the measured capacity.

Two parts, clearly apart: a synthetic tiny model (random weights; the queueing is what is measured, with enough
requests for a p99) and SmolLM2-135M (real arithmetic, few requests). In each part the capacity is measured first:
the requests/s that llama-server with its defaults completes when there is always somebody waiting. Then every
server is started in turn, round after round, and given exactly the same schedule.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.harness import report
from benchmarks.peers import llama_server as building
from benchmarks.peers import servers
from benchmarks.peers.servers import Peer, Setting
from benchmarks.peers.table import COLUMNS, Pool
from headrace.bench.drive.runner import RunSettings
from headrace.bench.load.workload_file import LoadedWorkload, load_workload, with_values
from headrace.bench.planned import SloTarget
from headrace.bench.record_file import RunResult
from headrace.bench.results.summary import summarise
from headrace.bench.session import RequestOptions, ask_scale, at_rate, prepare, run_load
from headrace.engines.llama.threads import usable_cores
from headrace.models.store import resolve
from headrace.models.tiny import make_tiny_gguf

LOADS = (0.7, 1.0, 1.5)
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
    """One invocation: what has been measured so far, and the peers."""

    def __init__(self, part: Part, peers: Sequence[Peer], workload: LoadedWorkload, seed: int) -> None:
        self._part = part
        self._peers = peers
        self._workload = with_values(workload, scale_to_context_tokens=part.setting.context_tokens)
        self._seed = seed
        self._slos: dict[str, SloTarget] = {
            name: traffic.slo for name, traffic in self._workload.workload.classes.items()
        }
        self.pools: dict[tuple[float, str, str], Pool] = {}
        self.invalid: list[str] = []

    def capacity_rps(self, peer: Peer) -> float:
        """Legal requests/s that the peer completes in a closed loop."""
        loaded = with_values(
            _without_thinking(self._workload), arrivals=f"closed({USERS})", duration_s=self._part.capacity_s
        )
        result = self._run(peer, loaded, seed=self._seed)
        done = [r for r in result.records if r.malformed is None and r.outcome == "ok" and r.end_ns is not None]
        within = [r for r in done if r.end_ns is not None and r.end_ns <= self._part.capacity_s * 1e9]
        say(f"{self._part.title}: {peer.name} completes {len(within) / self._part.capacity_s:.2f} requests/s")
        return len(within) / self._part.capacity_s

    def round(self, number: int, capacity_rps: float) -> None:
        """Every load, every peer, in an order that turns from round to round."""
        for load in LOADS:
            turned = [*self._peers[number % len(self._peers) :], *self._peers[: number % len(self._peers)]]
            for peer in turned:
                loaded = at_rate(self._workload, "poisson(RATE)", capacity_rps * load, self._part.seconds)
                result = self._run(peer, loaded, seed=self._seed + number)
                self._take(load, peer, result)

    def _run(self, peer: Peer, loaded: LoadedWorkload, *, seed: int) -> RunResult:
        with servers.running(peer) as url:
            settings = RunSettings(target=url, model=self._part.setting.model_name, drain_s=DRAIN_S, label=peer.name)
            options = RequestOptions(ignore_eos=True, salt=secrets.randbits(31))
            scale = ask_scale(settings, options.endpoint, os.environ)
            load = prepare(loaded, options, scale, model=settings.model, seed=seed)
            return run_load(load, settings, os.environ)

    def _take(self, load: float, peer: Peer, result: RunResult) -> None:
        legal = [record for record in result.records if record.malformed is None]
        summary = summarise(result.info, result.records)
        self.invalid += [f"{peer.name} at {load:.0%}: {reason}" for reason in summary.invalid]
        last_s = max((record.end_ns or 0 for record in legal), default=0) / 1e9
        for lane in ["all", *sorted({record.class_name for record in legal})]:
            pool = self.pools.setdefault((load, peer.name, lane), Pool())
            chosen = [record for record in legal if lane in ("all", record.class_name)]
            for name in sorted({record.class_name for record in chosen}):
                pool.add([record for record in chosen if record.class_name == name], self._slos[name])
            pool.seconds += max(last_s, self._part.seconds)
        whole = self.pools[load, peer.name, "all"]
        say(f"{self._part.title}: {load:.0%} {peer.name}: {whole.good}/{whole.offered} good so far")

    def rows(self) -> list[list[str]]:
        """The table, loads first."""
        return [[f"{load:.0%}", name, lane, *pool.cells()] for (load, name, lane), pool in sorted(self.pools.items())]

    def plain(self) -> list[dict[str, object]]:
        """For JSON."""
        return [
            {"load": load, "server": name, "lane": lane, **pool.plain()}
            for (load, name, lane), pool in sorted(self.pools.items())
        ]


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


def peers_of(setting: Setting, program: Path) -> list[Peer]:
    """headrace, llama-server twice, and vLLM where it is installed."""
    found = [
        servers.headrace(setting),
        servers.llama_server(setting, program),
        servers.llama_server(setting, program, batch=256),
    ]
    python = os.environ.get("HEADRACE_PEER_VLLM")
    if python:
        found.append(servers.vllm(setting, Path(python)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=["tiny", "real"], default=["tiny", "real"])
    parser.add_argument("--seconds", type=float, help="of load a run (default: 75 for tiny, 50 for real)")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--workload", default="mixed-enterprise")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    program = building.llama_server(say)
    workload = load_workload(options.workload)
    rows: list[list[str]] = []
    data: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as folder:
        for part in _parts(options, Path(folder)):
            session = Session(part, peers_of(part.setting, program), workload, options.seed)
            capacity_rps = session.capacity_rps(servers.llama_server(part.setting, program))
            for number in range(options.rounds):
                session.round(number, capacity_rps)
            rows += [[part.title, *[""] * len(COLUMNS)], *[["", *row] for row in session.rows()]]
            data[part.title] = {
                "capacity_rps": capacity_rps,
                "rounds": options.rounds,
                "seconds": part.seconds,
                "rows": session.plain(),
                "invalid": session.invalid,
            }
            for reason in session.invalid:
                say(f"invalid: {reason}")
    command = f"make bench-peers ARGS='--rounds {options.rounds} --parts {' '.join(options.parts)}'"
    report("peers", command, ["model", *COLUMNS], rows, data)


def _parts(options: argparse.Namespace, folder: Path) -> list[Part]:
    parts = []
    if "tiny" in options.parts:
        setting = Setting(make_tiny_gguf(folder / "tiny.gguf"), "tiny", options.threads, 4096)
        parts.append(Part("synthetic tiny model", setting, options.seconds or 75.0, 15.0))
    if "real" in options.parts:
        setting = Setting(resolve("smollm2"), "smollm2", options.threads, 2048)
        parts.append(Part("SmolLM2-135M", setting, options.seconds or 50.0, 40.0))
    return parts


if __name__ == "__main__":
    main()
