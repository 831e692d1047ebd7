"""The options that ``bench run`` and ``bench sweep`` share: the target, the load's shape, how requests are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from headrace.bench.load.request_fields import body_problem, header_problem
from headrace.bench.planned import SloTarget
from headrace.bench.results.figures import Limits
from headrace.cli.bench_values import MILLISECONDS, POSITIVE_S, SECONDS, SEED, TEXT
from headrace.cli.shared_options import add_options
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.drive.runner import RunSettings
    from headrace.bench.load.workload_file import LoadedWorkload
    from headrace.bench.session import RequestOptions

_DEFAULT_INPUT, _DEFAULT_OUTPUT = "512", "128"

_OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option(
        "--target", required=True, metavar="URL", help="Server, e.g. http://127.0.0.1:8000 (with or without /v1)."
    ),
    click.option("--model", required=True, type=TEXT, metavar="NAME", help="Model name that requests carry."),
    click.option("--workload", metavar="NAME|FILE", help="Workload file, or the name of one that comes with headrace."),
    click.option("--input-length", metavar="FORM", help=f"Prompt tokens without a workload file [{_DEFAULT_INPUT}]."),
    click.option("--output-length", metavar="FORM", help=f"Output tokens without a workload file [{_DEFAULT_OUTPUT}]."),
    click.option(
        "--max-context",
        "--scale-lengths",
        "max_context",
        type=click.IntRange(min=64),
        metavar="TOKENS",
        help="The model's context: long lengths of the workload are scaled to it.",
    ),
    click.option("--lane", metavar="NAME", help="Lane of every request, without a workload file."),
    click.option("--slo-ttft", "slo_ttft_s", type=POSITIVE_S, metavar="S", help="SLO without a workload file: TTFT."),
    click.option("--slo-tpot", "slo_tpot_s", type=POSITIVE_S, metavar="S", help="SLO without a workload file: TPOT."),
    click.option("--slo-e2e", "slo_e2e_s", type=POSITIVE_S, metavar="S", help="SLO without a workload file: E2E."),
    click.option("--seed", type=SEED, default=0, show_default=True, help="Of the whole load."),
    click.option(
        "--salt",
        type=SEED,
        help="Of the prompts' texts [random, so that no cache of an earlier run answers].",
    ),
    click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True),
    click.option("--stream/--no-stream", default=True, show_default=True, help="Ask for a stream."),
    click.option(
        "--ignore-eos/--stop-at-eos",
        default=True,
        show_default=True,
        help="Generate the whole output length, on servers that know the field.",
    ),
    click.option(
        "--max-tokens-field",
        type=click.Choice(["max_tokens", "max_completion_tokens"]),
        default="max_tokens",
        show_default=True,
    ),
    click.option("--header", "header", multiple=True, metavar="NAME:VALUE", help="Header of every request."),
    click.option("--body", metavar="JSON", help="Fields of every request, e.g. '{\"temperature\": 0}'."),
    click.option("--api-key-env", metavar="VARIABLE", help="Variable with the API key [OPENAI_API_KEY if set]."),
    click.option(
        "--timeout", "timeout_s", type=POSITIVE_S, default=600.0, show_default=True, metavar="S", help="Per request."
    ),
    click.option(
        "--connect-timeout", "connect_timeout_s", type=POSITIVE_S, default=10.0, show_default=True, metavar="S"
    ),
    click.option(
        "--drain",
        "drain_s",
        type=SECONDS,
        default=60.0,
        show_default=True,
        metavar="S",
        help="How long requests may still run after the duration.",
    ),
    click.option(
        "--warmup", "warmup_s", type=SECONDS, default=0.0, show_default=True, metavar="S", help="Left out at the start."
    ),
    click.option(
        "--send-lag-limit",
        "send_lag_limit_ms",
        type=MILLISECONDS,
        default=10.0,
        show_default=True,
        metavar="MS",
        help="A p99 of the generator's own lateness beyond it makes the run invalid.",
    ),
    click.option("--label", default="", type=TEXT, metavar="TEXT", help="A name for the run in reports."),
)


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command, which gets them as keyword arguments for ``LoadOptions``."""
    return add_options(command, _OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The shared options as given."""

    target: str
    model: str
    workload: str | None
    input_length: str | None
    output_length: str | None
    max_context: int | None
    lane: str | None
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    slo_e2e_s: float | None
    seed: int
    salt: int | None
    endpoint: Literal["chat", "completions"]
    stream: bool
    ignore_eos: bool
    max_tokens_field: str
    header: tuple[str, ...]
    body: str | None
    api_key_env: str | None
    timeout_s: float
    connect_timeout_s: float
    drain_s: float
    warmup_s: float
    send_lag_limit_ms: float
    label: str

    def workload_with(self, arrivals: str | None, duration_s: float | None) -> LoadedWorkload:
        """The workload that the options describe. Raises ConfigError."""
        from headrace.bench.load.workload_file import load_workload, with_values

        if self.workload is not None:
            self._refuse_what_a_file_says()
            loaded = load_workload(self.workload)
        else:
            loaded = self._plain_workload(arrivals)
        return with_values(loaded, arrivals=arrivals, duration_s=duration_s, scale_to_context_tokens=self.max_context)

    def _refuse_what_a_file_says(self) -> None:
        given = {
            "--input-length": self.input_length,
            "--output-length": self.output_length,
            "--lane": self.lane,
            "--slo-ttft": self.slo_ttft_s,
            "--slo-tpot": self.slo_tpot_s,
            "--slo-e2e": self.slo_e2e_s,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError("the workload file says this for each of its classes; leave it away", where=name)

    def _plain_workload(self, arrivals: str | None) -> LoadedWorkload:
        """One class for all requests. A trace has lengths of its own unless both are given here."""
        from headrace.bench.load.workload import TrafficClass, Workload
        from headrace.bench.load.workload_file import LoadedWorkload

        if arrivals is None:
            raise ConfigError("say when requests come (e.g. 'poisson(2)'), or name a --workload", where="--arrivals")
        slo = SloTarget(self.slo_ttft_s, self.slo_tpot_s, self.slo_e2e_s)
        from_trace = arrivals.strip().startswith("trace") and self.input_length is None and self.output_length is None
        all_requests = TrafficClass(
            lane=self.lane,
            input_length=None if from_trace else self.input_length or _DEFAULT_INPUT,
            output_length=None if from_trace else self.output_length or _DEFAULT_OUTPUT,
            slo=slo,
        )
        workload = Workload(
            arrivals=arrivals,
            classes={"all": all_requests},
            trace_classes={"*": "all"} if from_trace else {},
        )
        return LoadedWorkload(workload, "command line", Path())

    def run_settings(self) -> RunSettings:
        """Where to, and how long."""
        from headrace.bench.drive.runner import RunSettings

        return RunSettings(
            target=self.target,
            model=self.model,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            drain_s=self.drain_s,
            warmup_s=self.warmup_s,
            api_key_env=self.api_key_env,
            label=self.label,
        )

    def request_options(self, *, salt: int) -> RequestOptions:
        """How requests are written. Raises ConfigError."""
        from headrace.bench.session import RequestOptions

        return RequestOptions(
            endpoint=self.endpoint,
            stream=self.stream,
            ignore_eos=self.ignore_eos,
            max_tokens_field=self.max_tokens_field,
            headers=dict(_header(text) for text in self.header),
            body=_fields(self.body),
            salt=salt,
        )

    def limits(self) -> Limits:
        """What the generator is held to."""
        return Limits(send_lag_p99_s=self.send_lag_limit_ms / 1e3)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    name, value = name.strip().lower(), value.strip()
    if not colon or not name:
        raise ConfigError(f"{text[:60]!a} is not NAME:VALUE", where="--header")
    if problem := header_problem(name, value):
        raise ConfigError(problem, where="--header")
    return name, value


def _fields(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"is not a JSON object: {error}", where="--body") from error
    if problem := body_problem(fields):
        raise ConfigError(problem, where="--body")
    return fields
