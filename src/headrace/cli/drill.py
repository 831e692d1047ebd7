"""``headrace drill``: rehearse on a running server that a lane's engines get slow."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import click

from headrace.cli.admin_client import AdminClient
from headrace.cli.knobs import server_options
from headrace.errors import AdminRequestFailed

_PATH: Final = "/admin/drill"
_POLL_S: Final = 0.5


@click.command("drill")
@click.option("--lane", required=True, metavar="LANE", help="The lane whose engines are to seem slow.")
@server_options
def drill(lane: str, url: str, key: str | None, as_json: bool) -> None:
    """Rehearse degraded mode: a lane's engines seem slow until its breakers open, then they must close by themselves.

    The lane is really degraded meanwhile: its fallback serves it, or its replicas with a small batch.

    Exit codes: 0 opened, and closed again within 30 s; 1 it did not, or the server is not there or refuses.
    """
    client = AdminClient(url, key)
    report = client.ask("POST", _PATH, {"lane": lane})
    shown = ""
    while report["stage"] not in ("recovered", "failed"):
        if not as_json and report["stage"] != shown:
            shown = report["stage"]
            click.echo(_line(report))
        time.sleep(_POLL_S)
        report = client.ask("GET", _PATH)
    click.echo(json.dumps(report, indent=2) if as_json else _line(report))
    if report["stage"] == "failed":
        raise AdminRequestFailed(f"lane {lane}: the drill failed")


def _line(report: dict[str, Any]) -> str:
    lane, fallback = report["lane"], report["fallback"] or "its own replicas, with a small batch"
    match report["stage"]:
        case "slow":
            return f"lane {lane}: engines of group {report['group']} seem slow from now on"
        case "open":
            return f"breaker open after {report['opened_after_s']:.1f} s; served by {fallback}"
        case "recovering":
            return "engines are as fast as ever again"
        case "recovered":
            return (
                f"breaker closed {report['recovered_after_s']:.1f} s later;"
                f" {report['served']} of {report['requests']} requests served,"
                f" {report['served_degraded']} in degraded mode"
            )
        case _:
            return "the breaker never opened" if report["opened_after_s"] is None else "the breaker did not close again"
