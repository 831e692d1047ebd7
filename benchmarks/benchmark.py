"""``headrace bench run`` under the names that operators know from other benchmarks:

    python benchmark.py --model deepseek-v4 --request-distribution "poisson(200)" --sequence-length "uniform(512,16384)"

It puts the options of the command in the place of its own and runs that command, in this process. Every other option
goes to the command as it is. Exit status: 0 done; 1 failed; 2 wrong usage; 3 the run is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from headrace.cli.main import main

DEFAULT_DURATION_S = "60"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000

_MAPPING = """\
its own option                what `headrace bench run` gets
  --request-distribution FORM   --arrivals FORM
  --sequence-length FORM        --input-length FORM
  --base-url URL                --target URL
  --host NAME, --port N         --target http://NAME:N   [127.0.0.1, 8000: the target, if none is given]
  --duration S                  --duration S             [60, unless a --workload or a trace says how long]

Everything else goes to `headrace bench run` as it is: --model NAME (required), --output-length FORM, --seed N...
Its own help:
"""


def command_arguments(given: Sequence[str]) -> list[str]:
    """The arguments of ``headrace`` for those of this script. Exits with 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="benchmark.py", allow_abbrev=False, add_help=False)
    parser.add_argument("--request-distribution", "--arrivals", dest="arrivals")
    parser.add_argument("--sequence-length", "--input-length", dest="input_length")
    parser.add_argument("--base-url", "--target", dest="target")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--duration")
    parser.add_argument("--workload")
    own, others = parser.parse_known_args(given)
    if own.target is not None and (own.host is not None or own.port is not None):
        parser.error("--base-url says where the server is; leave --host and --port away")
    if own.host is not None and "/" in own.host:
        parser.error(f"--host {own.host}: a name or an address; a URL goes to --base-url")
    says_how_long = own.workload is not None or (own.arrivals or "").strip().startswith("trace")
    options = {
        "--target": own.target or _url(own.host or DEFAULT_HOST, DEFAULT_PORT if own.port is None else own.port),
        "--workload": own.workload,
        "--arrivals": own.arrivals,
        "--input-length": own.input_length,
        "--duration": own.duration or (None if says_how_long else DEFAULT_DURATION_S),
    }
    mapped = [f"{name}={value}" for name, value in options.items() if value is not None]
    return ["bench", "run", *mapped, *others]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(given: Sequence[str]) -> NoReturn:
    """The command, whose exit status is this script's."""
    if {"-h", "--help"} & set(given):
        print(f"{__doc__}\n{_MAPPING}", flush=True)
        main(["bench", "run", "--help"], prog_name="headrace")
    main(command_arguments(given), prog_name="headrace")
    raise AssertionError("the command line always exits")


if __name__ == "__main__":
    run(sys.argv[1:])
