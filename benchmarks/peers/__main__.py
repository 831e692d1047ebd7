"""headrace and its peers under the same mixed workload at 70 %, 100 % and 150 % of the measured capacity.

Two parts, clearly apart: a synthetic tiny model (random weights; the queueing is what is measured, with enough
requests for a p99) and SmolLM2-135M (real arithmetic, few requests). In each round the capacity is measured first:
the requests/s that llama-server with its defaults completes when there is always somebody waiting. Then every
server is started in turn and given exactly the same schedule.

headrace gets the SLO of each class of the workload for the lane that the class names, as its operator would set it;
with --overload shed it refuses (429) what it predicts to come later than --patience times its target. Refused
requests are misses, as timeouts are. --strategies makes each named strategy of our own a peer. The second table says
for each promise whether it is kept; three rounds (--rounds 3) are what it takes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from benchmarks.harness import report
from benchmarks.peers import llama_server as building
from benchmarks.peers import servers, table, verdict
from benchmarks.peers.servers import HEADRACE, LLAMA_SERVER, Peer, Setting
from benchmarks.peers.session import Part, Session, say
from benchmarks.peers.verdict import ROUNDS, Verdict, verdicts
from headrace.bench.load.workload_file import LoadedWorkload, load_workload
from headrace.engines.llama.threads import usable_cores
from headrace.errors import HeadraceError
from headrace.models.store import resolve
from headrace.models.tiny import make_tiny_gguf
from headrace.scheduling.knobs import Strategy

LOADS = (0.7, 1.0, 1.5)
BATCH = 256
"""Of llama-server's second variant."""
TINY_SECONDS, REAL_SECONDS = 75.0, 50.0
"""A round stays below half an hour. At 15 requests/s of capacity it offers 560 short and 340 dialogue requests at
100 %; a p99 takes 368 answers, for dialogue two rounds. SmolLM2 completes less than one a second; its part has no p99,
whatever its length."""


def main() -> None:
    options = parse()
    program = building.llama_server(say)
    workload = load_workload(options.workload)
    rows: list[list[str]] = []
    judged: list[tuple[str, Verdict]] = []
    data: dict[str, object] = {}
    whole = True
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as folder:
        for part in _parts(options, Path(folder)):
            peers = _peers(part.setting, program, workload, options)
            session = Session(part, peers, workload, seed=options.seed, records=options.records)
            ended = _measure(session, servers.llama_server(part.setting, program), options)
            found = _verdicts(session, peers)
            rows += [[part.title, *[""] * (len(table.COLUMNS))], *[["", *row] for row in session.rows()]]
            judged += [(part.title, one) for one in found]
            data[part.title] = {
                **ended,
                "seconds": part.seconds,
                "rows": session.plain(),
                "verdicts": [one.plain() for one in found],
                "invalid": session.invalid,
            }
            for reason in session.invalid:
                say(f"invalid: {reason}")
            whole = ended["ended_early"] is None
            if not whole:
                break
    report("peers", _command(), ["model", *table.COLUMNS], rows, data)
    _print_verdicts(judged, options.rounds)
    if not whole:
        sys.exit(1)


def _measure(session: Session, capacity_peer: Peer, options: argparse.Namespace) -> dict[str, object]:
    """All rounds. What was measured before a server failed, or somebody pressed Ctrl-C, is kept and reported."""
    capacities_rps: list[float] = []
    done = 0
    ended_early: str | None = None
    try:
        for number in range(options.rounds):
            # Anew in each round: the machine may be a third slower than it was, and a load is a share of what it does.
            capacities_rps.append(session.capacity_rps(capacity_peer, number))
            session.round(number, options.loads, capacities_rps[-1])
            done += 1
    except (RuntimeError, HeadraceError, KeyboardInterrupt) as error:
        ended_early = str(error) or type(error).__name__
        say(f"ended early: {ended_early}")
    return {"capacity_rps": capacities_rps, "rounds": done, "ended_early": ended_early}


def _peers(setting: Setting, program: Path, workload: LoadedWorkload, options: argparse.Namespace) -> list[Peer]:
    """headrace (as it comes, or once for each strategy), llama-server twice, and vLLM where it is installed."""
    lanes = servers.lane_sections(workload.workload, {"overload": options.overload, "patience": options.patience})
    found = [servers.headrace(setting, lanes, strategy=strategy) for strategy in options.strategies or [None]]
    if options.llama_server:
        found += [servers.llama_server(setting, program), servers.llama_server(setting, program, batch=BATCH)]
    python = os.environ.get("HEADRACE_PEER_VLLM")
    if python:
        found.append(servers.vllm(setting, Path(python)))
    return found


def _verdicts(session: Session, peers: list[Peer]) -> list[Verdict]:
    """The subject is headrace as it comes (hybrid); where only other strategies ran, the first of them."""
    own = [peer.name for peer in peers if peer.name.split()[0] == HEADRACE]
    subject = next((name for name in own if name in (HEADRACE, f"{HEADRACE} hybrid")), own[0])
    rivals = [peer.name for peer in peers if peer.name.split()[0] == LLAMA_SERVER]
    simpler = [name for name in own if name != subject]
    return verdicts(session.pools, subject=subject, rivals=rivals, simpler=simpler)


def _print_verdicts(judged: list[tuple[str, Verdict]], rounds: int) -> None:
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=240)  # a file has no edge
    printed = Table("model", *verdict.COLUMNS, title="promises")
    last = ""
    for title, one in judged:
        printed.add_row("" if title == last else title, *one.cells())
        last = title
    console.print(printed)
    if rounds < ROUNDS:
        console.print(f"{rounds} round(s): a look. The proof takes {ROUNDS} or more (--rounds {ROUNDS}).")


def _command() -> str:
    arguments = shlex.join(sys.argv[1:])
    return f"make bench-peers ARGS={shlex.quote(arguments)}" if arguments else "make bench-peers"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from the command line unless ``arguments`` are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=_at_least_one, default=1, help=f"the proof takes {ROUNDS}")
    parser.add_argument("--parts", nargs="+", choices=["tiny", "real"], default=["tiny", "real"])
    parser.add_argument(
        "--seconds", type=float, help=f"of load a run (default: {TINY_SECONDS:g} for tiny, {REAL_SECONDS:g} for real)"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the measured capacity")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=get_args(Strategy),
        help="a headrace for each of these (default: one, with the default strategy)",
    )
    parser.add_argument(
        "--no-llama-server",
        dest="llama_server",
        action="store_false",
        help="leave llama-server out of the rounds; the capacity is still what it completes",
    )
    parser.add_argument("--overload", choices=["shed", "queue"], default="shed", help="of headrace's lanes")
    parser.add_argument("--patience", type=float, default=1.0, help="of headrace's lanes (times the target)")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--workload", default="mixed-enterprise")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each further one takes the next")
    parser.add_argument("--records", type=Path, help="a folder in which every run's raw records are kept")
    return parser.parse_args(arguments)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


def _parts(options: argparse.Namespace, folder: Path) -> list[Part]:
    parts = []
    if "tiny" in options.parts:
        setting = Setting(make_tiny_gguf(folder / "tiny.gguf"), "tiny", options.threads, 4096)
        parts.append(Part("synthetic tiny model", setting, options.seconds or TINY_SECONDS, 15.0))
    if "real" in options.parts:
        setting = Setting(resolve("smollm2"), "smollm2", options.threads, 2048)
        parts.append(Part("SmolLM2-135M", setting, options.seconds or REAL_SECONDS, 40.0))
    return parts


if __name__ == "__main__":
    main()
