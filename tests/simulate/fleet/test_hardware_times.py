"""Engines of a fleet take the step times of hardware profiles and calibrations."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from tests.simulate.fleet.small import run_of, scenario_of, workload_of


def mean_e2e_s(times: str) -> float:
    """Of a light load, answered whole."""
    run = run_of(scenario_of(engine={"times": times, "stated": None}), workload_of("poisson(2)", 20.0))
    ended = [record for record in run.records if record.outcome == "ok"]
    assert ended and len(ended) == len(run.records)
    return sum([(record.end_ns or 0) - (record.ready_ns or 0) for record in ended]) / len(ended) / 1e9


def test_a_faster_machine_answers_sooner() -> None:
    """The same model and load; memory of an H100 is several times as fast as that of an L4."""
    assert mean_e2e_s("roofline(h100, llama-3.1-8b)") < 0.3 * mean_e2e_s("roofline(l4, llama-3.1-8b)")


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("roofline(h1000, llama-3.1-8b)", "h1000"),
        ("roofline(h100, llama-9)", "llama-9"),
        ("roofline(h100)", "roofline"),
        ("rooflin(h100, llama-3.1-8b)", "rooflin"),
        ("no-such-file.json", "no-such-file.json"),
    ],
)
def test_times_that_are_not_there_are_refused_with_their_place(times: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        scenario_of(engine={"times": times, "stated": None})
    assert message in str(error.value) and "times" in str(error.value)
