"""A process that pulls the tiny package and may die on the way.

Standard input holds the spec as JSON. ``--die-at STAGE`` kills this process, uncatchably, when that stage
reports progress; ``--die-at installing`` just before the last rename. ``--max-file-bytes N`` limits files.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import click
import msgspec

from headrace.errors import HeadraceError
from headrace.models import store
from headrace.models.catalog import ModelSpec
from headrace.models.progress import PullProgress
from tests.models.tiny_package import register


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@click.command()
@click.option("--die-at")
@click.option("--max-file-bytes", type=int)
def main(die_at: str | None, max_file_bytes: int | None) -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSpec)
    register(spec)
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if die_at == "installing":
        Path.rename = lambda self, target: die()  # type: ignore[method-assign,assignment,return-value]

    def progress(update: PullProgress) -> None:
        if update.stage == die_at:
            die()

    try:
        print(store.pull(spec, progress))
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
