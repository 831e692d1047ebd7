"""The options that ``simulate run`` and ``simulate sweep`` share: the load, and what is changed of the scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from headrace.cli.bench_options import LoadOptions
from headrace.cli.bench_values import POSITIVE_S, SECONDS, SEED, TEXT
from headrace.cli.shared_options import add_options
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.load.workload_file import LoadedWorkload
    from headrace.simulate.fleet.run import RunOptions
    from headrace.simulate.fleet.scenario_file import LoadedScenario

_OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option("--workload", metavar="NAME|FILE", help="Workload file, or the name of one that comes with headrace."),
    click.option("--duration", "duration_s", type=POSITIVE_S, metavar="S", help="Seconds in which requests come."),
    click.option("--input-length", metavar="FORM", help="Prompt tokens without a workload file [512]."),
    click.option("--output-length", metavar="FORM", help="Output tokens without a workload file [128]."),
    click.option(
        "--max-context",
        type=click.IntRange(min=64),
        metavar="TOKENS",
        help="The model's context: long lengths of the workload are scaled to it.",
    ),
    click.option("--lane", metavar="NAME", help="Lane of every request, without a workload file."),
    click.option("--slo-ttft", "slo_ttft_s", type=POSITIVE_S, metavar="S", help="SLO without a workload file: TTFT."),
    click.option("--slo-tpot", "slo_tpot_s", type=POSITIVE_S, metavar="S", help="SLO without a workload file: TPOT."),
    click.option("--slo-e2e", "slo_e2e_s", type=POSITIVE_S, metavar="S", help="SLO without a workload file: E2E."),
    click.option(
        "--config", type=click.Path(exists=True, path_type=Path), help="Configuration with lanes and tenants."
    ),
    click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a value of the scenario."),
    click.option("--seed", type=SEED, default=0, show_default=True, help="Of the whole run."),
    click.option(
        "--drain", "drain_s", type=SECONDS, default=60.0, show_default=True, metavar="S", help="After the duration."
    ),
    click.option(
        "--warmup", "warmup_s", type=SECONDS, default=0.0, show_default=True, metavar="S", help="Left out at the start."
    ),
    click.option("--label", default="", type=TEXT, metavar="TEXT", help="A name for the run in reports."),
)


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command, which gets them as keyword arguments for ``SimulateOptions``."""
    return add_options(command, _OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The shared options as given."""

    workload: str | None
    duration_s: float | None
    input_length: str | None
    output_length: str | None
    max_context: int | None
    lane: str | None
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    slo_e2e_s: float | None
    config: Path | None
    changes: tuple[str, ...]
    seed: int
    drain_s: float
    warmup_s: float
    label: str

    def workload_with(self, arrivals: str | None) -> LoadedWorkload:
        """The workload that the options describe, as ``headrace bench`` reads it. Raises ConfigError."""
        like_bench = LoadOptions(
            target="",
            model="simulated",
            workload=self.workload,
            input_length=self.input_length,
            output_length=self.output_length,
            max_context=self.max_context,
            lane=self.lane,
            slo_ttft_s=self.slo_ttft_s,
            slo_tpot_s=self.slo_tpot_s,
            slo_e2e_s=self.slo_e2e_s,
            seed=self.seed,
            salt=0,
            endpoint="chat",
            stream=True,
            ignore_eos=True,
            max_tokens_field="max_tokens",
            header=(),
            body=None,
            api_key_env=None,
            timeout_s=1.0,
            connect_timeout_s=1.0,
            drain_s=self.drain_s,
            warmup_s=self.warmup_s,
            send_lag_limit_ms=10.0,
            label=self.label,
        )
        return like_bench.workload_with(arrivals, self.duration_s)

    def scenario(self, source: str) -> LoadedScenario:
        """The scenario with what is changed of it. Raises ConfigError."""
        from headrace.simulate.fleet.scenario_file import LoadedScenario, load_scenario, with_knob

        loaded = load_scenario(source)
        scenario = loaded.scenario
        for text in self.changes:
            key, value = key_value(text, "--set")
            scenario = with_knob(scenario, key, value)
        if self.config is not None:
            scenario = with_knob(scenario, "config", str(self.config.resolve()))
        return LoadedScenario(scenario, loaded.name, loaded.folder)

    def run_options(self) -> RunOptions:
        """Seed, warm-up and the like."""
        from headrace.simulate.fleet.run import RunOptions

        return RunOptions(seed=self.seed, warmup_s=self.warmup_s, drain_s=self.drain_s, label=self.label)


def key_value(text: str, option: str) -> tuple[str, object]:
    """``gateway.routing=random`` -> the key and its value, read as YAML. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text[:60]!a} is not KEY=VALUE, such as groups.main.replicas=4", where=option)
    return key.strip(), _value(value, option)


def key_values(text: str, option: str) -> tuple[str, list[object]]:
    """``groups.main.replicas=4,8`` -> the key and its values. Raises ConfigError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(f"{text[:60]!a} is not KEY=VALUE,VALUE, such as groups.main.replicas=4,8", where=option)
    return key.strip(), [_value(value, option) for value in values.split(",")]


def _value(text: str, option: str) -> object:
    try:
        value: object = yaml.safe_load(text.strip())
    except yaml.YAMLError as error:
        raise ConfigError(f"{text[:60]!a} cannot be read as a value", where=option) from error
    # YAML 1.1 takes 1e-4 for text.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
