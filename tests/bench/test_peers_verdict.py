"""benchmarks/peers: the arithmetic by which headrace is judged against its peers, on pools made up by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.peers.pool import Pool
from benchmarks.peers.servers import Setting, headrace, lane_sections
from benchmarks.peers.table import COLUMNS as TABLE_COLUMNS
from benchmarks.peers.table import cells
from benchmarks.peers.verdict import COLUMNS, Measured, Verdict, verdicts
from headrace.bench.load.workload_file import load_workload
from headrace.bench.planned import SloTarget
from headrace.bench.results.summary import summarise
from headrace.config.load import load
from tests.bench.bench_records import answered, failed, run_info

P99_ANSWERS = 368
"""The fewest that support a p99 (bench.statistics.quantiles)."""
P90_ANSWERS = 36
RIVALS = ("llama-server", "llama-server -b 256")


def near(value: Any) -> Any:
    """``pytest.approx``, for comparisons within tuples that mypy would take for impossible."""
    return pytest.approx(value)


def pool(
    answers: int = P99_ANSWERS,
    *,
    ttft_s: float = 1.0,
    e2e_s: float = 2.0,
    shed: int = 0,
    tokens_per_s: float = 100.0,
    goodput_rps: float = 1.0,
) -> Pool:
    """100 s of requests that all took the same time."""
    return Pool(
        seconds=100.0,
        offered=answers + shed,
        good=answers,
        good_in_time=goodput_rps * 100,
        prompt_tokens=tokens_per_s * 80,
        output_tokens=tokens_per_s * 20,
        outcomes=Counter(ok=answers, shed=shed),
        ttft_s=(ttft_s,) * answers,
        e2e_s=(e2e_s,) * answers,
    )


def one_class(load: float, group: str, **sides: Pool | list[Pool]) -> dict[tuple[float, str, str], dict[int, Pool]]:
    """Measured pools of one class; ``ours``, ``llama`` and ``small_batch`` are one round or several."""
    names = {"ours": "headrace", "llama": RIVALS[0], "small_batch": RIVALS[1]}
    return {
        (load, names[side], group): dict(enumerate(pools if isinstance(pools, list) else [pools]))
        for side, pools in sides.items()
    }


def judged(measured: Measured, what: str) -> Verdict:
    """The only row whose name begins with ``what``."""
    (found,) = [one for one in verdicts(measured, subject="headrace", rivals=RIVALS) if one.what.startswith(what)]
    return found


class TestPercentiles:
    def test_the_short_lane_is_compared_with_the_variant_that_is_better_in_that_figure(self) -> None:
        """-b 256 has the better TTFT, the defaults the better E2E: each row is held against the better one."""
        measured = one_class(
            1.0,
            "short_generation",
            ours=pool(ttft_s=0.3, e2e_s=3.0),
            llama=pool(ttft_s=10.0, e2e_s=12.0),
            small_batch=pool(ttft_s=6.0, e2e_s=30.0),
        )
        ttft, e2e = judged(measured, "TTFT p99, short_generation"), judged(measured, "E2E p99, short_generation")
        assert (ttft.against, ttft.theirs, ttft.ratio) == ("llama-server -b 256", 6.0, near(0.05))
        assert (ttft.met, ttft.aim_met, ttft.word) == (True, False, "met")
        assert (e2e.against, e2e.theirs, e2e.ratio) == ("llama-server", 12.0, near(0.25))
        assert (e2e.met, e2e.aim_met, e2e.word) == (False, None, "NOT met")

    def test_the_p99_of_all_rounds_together_is_the_figure_and_the_rounds_give_the_spread(self) -> None:
        """Three rounds of 150 support a p99 only together. The last round is slow: with it 150 of 450 are, so the
        p99 is the slow one, while the median round is quick."""
        ours = [pool(150, ttft_s=0.1), pool(150, ttft_s=0.2), pool(150, ttft_s=0.9)]
        measured = one_class(1.0, "dialogue", ours=ours, llama=[pool(150, ttft_s=10.0)] * 3)
        row = judged(measured, "TTFT p99, dialogue")
        assert row.ours == 0.9
        assert row.ratio == near(0.09)
        assert row.rounds == near((0.01, 0.02, 0.09))
        spread = row.plain()["ratio_spread"]
        assert spread == near({"median": 0.02, "low": 0.01, "high": 0.09})

    def test_a_sample_too_small_for_a_p99_is_judged_by_the_highest_percentile_it_supports_and_says_so(self) -> None:
        measured = one_class(1.0, "dialogue", ours=pool(P90_ANSWERS, ttft_s=0.1), llama=pool(P99_ANSWERS, ttft_s=10.0))
        row = judged(measured, "TTFT")
        assert row.what == "TTFT p90, dialogue"
        assert row.word == "aim met by p90"
        assert "36 answers do not support a p99" in row.note

    def test_one_answer_fewer_than_a_p99_takes_is_no_p99(self) -> None:
        whole = one_class(1.0, "dialogue", ours=pool(P99_ANSWERS), llama=pool(P99_ANSWERS))
        short = one_class(1.0, "dialogue", ours=pool(P99_ANSWERS - 1), llama=pool(P99_ANSWERS))
        assert judged(whole, "TTFT").stand_in is None
        assert judged(short, "TTFT").stand_in == "p95"

    def test_a_variant_that_answered_too_few_is_left_out_by_name(self) -> None:
        measured = one_class(1.0, "dialogue", ours=pool(), llama=pool(ttft_s=20.0), small_batch=pool(40, ttft_s=0.1))
        row = judged(measured, "TTFT")
        assert row.against == "llama-server"
        assert "llama-server -b 256 answered too few to compare" in row.note

    def test_a_handful_of_answers_is_no_figure_and_no_verdict(self) -> None:
        measured = one_class(1.0, "dialogue", ours=pool(5, shed=20), llama=pool())
        row = judged(measured, "TTFT")
        assert (row.ours, row.ratio, row.met, row.word) == (None, None, None, "no figure")
        assert "answered 5 of 25, shed 20" in row.note

    def test_a_row_says_how_many_each_side_answered(self) -> None:
        """Percentiles are those of answered requests: shedding makes them better, and must be seen beside them."""
        measured = one_class(1.0, "dialogue", ours=pool(400, shed=100), llama=pool(500))
        assert judged(measured, "TTFT").note == "answered 80.0 %, the other 100 %"

    def test_short_lanes_are_judged_at_full_load_only(self) -> None:
        assert verdicts(one_class(1.5, "dialogue", ours=pool(), llama=pool()), subject="headrace", rivals=RIVALS) == []


class TestRates:
    def test_goodput_is_judged_at_overload_and_tokens_at_every_load(self) -> None:
        measured = {
            **one_class(0.7, "all", ours=pool(tokens_per_s=99), llama=pool(tokens_per_s=100)),
            **one_class(1.5, "all", ours=pool(goodput_rps=4, tokens_per_s=130), llama=pool(tokens_per_s=100)),
        }
        found = verdicts(measured, subject="headrace", rivals=RIVALS)
        assert [(one.load, one.what, one.ratio, one.word) for one in found] == [
            (0.7, "total tokens/s", near(0.99), "NOT met"),
            (1.5, "goodput", near(4.0), "met"),
            (1.5, "total tokens/s", near(1.3), "aim met"),
        ]

    def test_the_better_variant_of_a_rate_is_the_higher_one(self) -> None:
        measured = one_class(
            1.0,
            "all",
            ours=pool(tokens_per_s=100),
            llama=pool(tokens_per_s=90),
            small_batch=pool(tokens_per_s=125),
        )
        row = judged(measured, "total tokens/s")
        assert (row.against, row.ratio, row.met) == ("llama-server -b 256", near(0.8), False)

    def test_goodput_over_none_at_all_is_met_and_has_no_number_in_json(self) -> None:
        measured = one_class(1.5, "all", ours=pool(goodput_rps=1), llama=pool(goodput_rps=0))
        row = judged(measured, "goodput")
        assert row.ratio == math.inf
        assert row.met is True
        assert row.plain()["ratio"] is None
        json.dumps(row.plain(), allow_nan=False)

    def test_nothing_over_nothing_is_no_figure(self) -> None:
        measured = one_class(1.5, "all", ours=pool(goodput_rps=0), llama=pool(goodput_rps=0))
        assert judged(measured, "goodput").word == "no figure"

    def test_only_rounds_that_both_sides_ran_are_compared(self) -> None:
        """A run that was ended in its third round has a round of ours without one of theirs."""
        ours = [pool(tokens_per_s=100), pool(tokens_per_s=100), pool(tokens_per_s=400)]
        measured = one_class(1.0, "all", ours=ours, llama=[pool(tokens_per_s=100)] * 2)
        row = judged(measured, "total tokens/s")
        assert (row.ours, row.rounds) == (100.0, (1.0, 1.0))

    def test_where_both_answer_everything_the_row_says_that_the_offer_limits_it(self) -> None:
        everything = one_class(0.7, "all", ours=pool(), llama=pool())
        some = one_class(0.7, "all", ours=pool(shed=100), llama=pool())
        assert judged(everything, "total").note == "both answered what was offered: no more was asked for"
        assert judged(some, "total").note == "answered 78.6 %, the other 100 %"


class TestLongRequests:
    def test_the_mean_of_answered_ones_is_judged_and_the_fates_of_all_are_told(self) -> None:
        measured = one_class(1.5, "long_document", ours=pool(30, e2e_s=12.0, shed=20), llama=pool(50, e2e_s=10.0))
        row = judged(measured, "E2E mean")
        assert (row.ratio, row.met) == (near(1.2), True)
        assert row.note == "answered 30 of 50, shed 20; the other answered 50 of 50, shed 0"

    def test_a_rival_that_answered_none_gives_no_figure(self) -> None:
        measured = one_class(1.5, "long_document", ours=pool(30), llama=pool(0, shed=9))
        assert judged(measured, "E2E mean").word == "no figure"


class TestOwnStrategies:
    def test_each_simpler_strategy_has_rows_of_its_own(self) -> None:
        measured = {
            (1.0, "headrace hybrid", "all"): {0: pool(tokens_per_s=300)},
            (1.0, "headrace hybrid", "dialogue"): {0: pool(ttft_s=0.5, e2e_s=1.3)},
            (1.0, "headrace static", "all"): {0: pool(tokens_per_s=100)},
            (1.0, "headrace static", "dialogue"): {0: pool(ttft_s=1.0, e2e_s=2.0)},
            (1.0, "headrace dynamic", "all"): {0: pool(tokens_per_s=150)},
        }
        found = verdicts(
            measured, subject="headrace hybrid", rivals=[], simpler=["headrace static", "headrace dynamic"]
        )
        assert [(one.against, one.what, one.ratio, one.met) for one in found] == [
            ("headrace static", "total tokens/s", near(3.0), True),
            ("headrace static", "goodput", near(1.0), False),
            ("headrace static", "TTFT p99, dialogue", near(0.5), True),
            ("headrace static", "E2E p99, dialogue", near(0.65), False),
            ("headrace dynamic", "total tokens/s", near(2.0), False),
            ("headrace dynamic", "goodput", near(1.0), False),
        ]


class TestPools:
    def test_rates_are_of_the_seconds_in_which_requests_were_sent(self) -> None:
        """In 10 s of load: one good answer in time (8 + 3 tokens), one whose last token and end come after the load
        (its prompt's 10 tokens and two tokens count), one shed, one still waiting at the end, one refused."""
        records = [
            answered(0, 1000, ttft_ms=100, gaps_ms=(100, 100), prompt_tokens=8),
            answered(1, 9000, ttft_ms=500, gaps_ms=(200, 800)),
            failed(2, 3000, "shed", status=429),
            failed(3, 4000, "cancelled", end_ms=40_000),
            failed(4, 5000, "refused"),
        ]
        summary = summarise(run_info(), records)
        found = Pool.of(summary.whole, records, summary.window.length_s)
        assert (found.offered, found.answered, found.shed, found.timeouts, found.errors) == (5, 2, 1, 1, 1)
        assert found.good == 2
        assert found.goodput_rps == near(0.1)
        assert found.tokens_per_s == near((8 + 3 + 10 + 2) / 10)
        assert found.output_tokens_per_s == near((3 + 2) / 10)
        assert sorted(found.ttft_s) == near([0.1, 0.5])
        assert found.e2e_mean_s == near((0.3 + 1.5) / 2)

    def test_rounds_together_weigh_by_their_time(self) -> None:
        half = replace(pool(tokens_per_s=100, goodput_rps=2), seconds=50.0)
        both = Pool.together([half, pool(answers=10, shed=5, tokens_per_s=100, goodput_rps=1)])
        assert both.seconds == 150.0
        assert both.tokens_per_s == near(20_000 / 150)
        assert both.goodput_rps == near(2.0)
        assert (both.offered, both.answered, both.shed) == (P99_ANSWERS + 15, P99_ANSWERS + 10, 5)

    def test_an_empty_pool_has_no_figures(self) -> None:
        plain = Pool().plain()
        assert {plain[name] for name in ("attainment", "goodput_rps", "tokens_per_s", "e2e_mean_s", "ttft_p50_s")} == {
            None
        }

    def test_rows_have_as_many_cells_as_columns(self) -> None:
        (row,) = verdicts(one_class(0.7, "all", ours=pool(), llama=pool()), subject="headrace", rivals=RIVALS)
        assert len(row.cells()) == len(COLUMNS)
        assert len(["70%", "headrace", "all", *cells(pool(shed=3))]) == len(TABLE_COLUMNS)


class TestConfiguration:
    def test_lanes_get_the_slo_of_their_class_and_keep_no_default_target(self, tmp_path: Path) -> None:
        """What headrace is started with says the same as what its requests are judged by."""
        workload = load_workload("mixed-enterprise").workload
        lanes = lane_sections(workload, {"overload": "shed", "patience": 1.0})
        setting = Setting(tmp_path / "model.gguf", "tiny", threads=2, context_tokens=4096)
        file = tmp_path / "headrace.yaml"
        file.write_text(headrace(setting, lanes, strategy="static").config)
        config = load(file, env={})
        for traffic in workload.classes.values():
            assert traffic.lane is not None
            slo = config.lanes[traffic.lane].slo
            assert SloTarget(slo.p99_ttft_s, slo.p99_tpot_s, slo.p99_e2e_s) == traffic.slo
            assert (config.lanes[traffic.lane].overload, config.lanes[traffic.lane].patience) == ("shed", 1.0)
        assert config.engine.scheduling.strategy == "static"

    def test_one_lane_cannot_have_two_slos(self) -> None:
        workload = load_workload("mixed-enterprise").workload
        moved = msgspec.structs.replace(workload.classes["dialogue"], lane="captions")
        both = msgspec.structs.replace(workload, classes={**workload.classes, "dialogue": moved})
        with pytest.raises(ValueError, match="lane captions"):
            lane_sections(both, {})
