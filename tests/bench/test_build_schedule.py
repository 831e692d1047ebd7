"""The schedule: what it holds is what the workload says, and nothing moves what it should not."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.load.build_schedule import build_schedule, schedule_sha256
from headrace.bench.load.closed_plan import LEAST_ROUND_S, MOST_REQUESTS, requests_per_user
from headrace.bench.load.context_fit import ContextFit
from headrace.bench.load.workload import IllegalTraffic, PrefixPool, Session, TrafficClass
from headrace.bench.load.workload_file import load_workload, with_values
from headrace.bench.planned import PlannedRequest, Schedule, SloTarget
from headrace.bench.requests.malformed import BEYOND_ANY_CONTEXT_TOKENS, MALFORMED_KINDS
from headrace.errors import ConfigError
from tests.bench.schedules import SHORT, legal, schedule

LONG = TrafficClass(input_length="uniform(1000, 9000)", output_length="200", lane="long")


DIALOGUE = TrafficClass(
    input_length="uniform(20, 60)",
    output_length="uniform(50, 90)",
    shared_prefix=PrefixPool(tokens=300, count=4),
    session=Session(turns="uniform(2, 6)", think_ms="uniform(500, 1500)"),
)


def changed(traffic: TrafficClass, **fields: Any) -> TrafficClass:
    return msgspec.structs.replace(traffic, **fields)


def of(planned: Schedule, name: str) -> list[PlannedRequest]:
    return [request for request in planned.requests if request.class_name == name]


def assert_share(count: int, total: int, share: float) -> None:
    """``count`` of ``total`` is binomial with ``share``: within 4.5 standard deviations (7 in a million outside)."""
    assert abs(count - total * share) < 4.5 * sqrt(total * share * (1 - share)), (count, total, share)


def lengths(requests: list[PlannedRequest]) -> list[tuple[int, int, int]]:
    return [(request.input_tokens, request.output_tokens, request.text_seed) for request in requests]


# -- one seed, nothing else -------------------------------------------------------------------------------

MIX: dict[str, Any] = {
    "classes": {
        "short": changed(SHORT, weight=5),
        "dialogue": changed(DIALOGUE, weight=3),
        "long": changed(LONG, weight=2),
    },
    "malformed": IllegalTraffic(share=0.05),
}


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert schedule(**MIX) == schedule(**MIX)
    assert schedule_sha256(schedule(**MIX)) == schedule_sha256(schedule(**MIX))
    assert schedule_sha256(schedule(**MIX)) != schedule_sha256(schedule(seed=8, **MIX))
    assert not set(lengths(legal(schedule(**MIX)))) & set(lengths(legal(schedule(seed=8, **MIX))))


def test_the_digest_is_of_the_load_and_not_of_where_it_came_from() -> None:
    planned = schedule(**MIX)
    digest = schedule_sha256(planned)
    assert schedule_sha256(msgspec.structs.replace(planned, source={"a": 1}, seed=0)) == digest
    fewer = msgspec.structs.replace(planned, requests=planned.requests[:-1])
    slower = msgspec.structs.replace(planned, slos={"short": SloTarget(ttft_s=1)})
    assert len({digest, schedule_sha256(fewer), schedule_sha256(slower)}) == 3


def test_a_schedule_survives_being_written_and_read() -> None:
    planned = schedule(**MIX)
    read = msgspec.json.decode(msgspec.json.encode(planned), type=Schedule)
    assert read.requests == planned.requests
    assert schedule_sha256(read) == schedule_sha256(planned)


def test_changing_one_class_changes_no_other() -> None:
    before = schedule(**MIX)
    longer = changed(LONG, weight=2, input_length="lognormal(median=3000, sigma=1)", output_length="uniform(5, 6)")
    after = schedule(classes={**MIX["classes"], "long": longer}, malformed=MIX["malformed"])
    for name in ("short", "dialogue", "malformed"):
        # Indices stay too: the slots' classes have not moved.
        assert of(before, name) == of(after, name)
    assert [r.due_ns for r in of(before, "long")] == [r.due_ns for r in of(after, "long")]
    assert lengths(of(before, "long")) != lengths(of(after, "long"))


def test_another_mix_of_classes_takes_the_same_requests_of_each() -> None:
    before = lengths(of(schedule(**MIX), "short"))
    after = lengths(of(schedule(classes={"other": LONG, "short": SHORT}), "short"))
    shared = min(len(before), len(after))
    assert shared > 1000
    assert before[:shared] == after[:shared]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    shorter, longer = schedule(**MIX), schedule(duration_s=90.0, **MIX)
    # The last illegal request's place is the one thing that may depend on the end.
    assert longer.requests[: len(shorter.requests) - 1] == shorter.requests[:-1]


# -- shares and times -------------------------------------------------------------------------------------


def test_times_are_in_order_within_the_run_and_indices_count_them() -> None:
    planned = schedule(**MIX)
    dues = [request.due_ns for request in planned.requests]
    assert all(due is not None and 0 <= due < 60e9 for due in dues)
    assert all(before <= after for before, after in pairwise(dues) if before is not None and after is not None)
    assert [request.index for request in planned.requests] == list(range(len(planned.requests)))


def test_shares_of_requests_are_the_weights_with_turns_counted_as_requests() -> None:
    planned = schedule(arrivals="poisson(400)", **MIX)
    counts = Counter(request.class_name for request in legal(planned))
    total = sum(counts.values())
    # Later turns that no slot has paid for at the end are the only ones above the binomial count: some dozens at most.
    assert_share(counts["short"], total, 0.5)
    assert_share(counts["dialogue"], total, 0.3)
    assert_share(counts["long"], total, 0.2)
    # The whole rate is the arrivals': a Poisson count of mean 24,000, within 4.5 standard deviations.
    assert abs(total - 24000) < 4.5 * sqrt(24000)


def test_the_share_of_turns_holds_in_every_part_of_a_run() -> None:
    requests = legal(schedule(arrivals="constant(400)", **MIX))
    for start_s in range(0, 60, 10):
        part = [request for request in requests if start_s * 1e9 <= (request.due_ns or 0) < (start_s + 10) * 1e9]
        turns = [request for request in part if request.class_name == "dialogue"]
        assert_share(len(turns), len(part), 0.3)


def test_illegal_requests_come_on_top_and_take_no_legal_one_away() -> None:
    clean = schedule(classes=MIX["classes"], arrivals="poisson(300)")
    planned = schedule(arrivals="poisson(300)", **MIX)
    assert lengths(legal(planned)) == lengths(clean.requests)
    assert [request.due_ns for request in legal(planned)] == [request.due_ns for request in clean.requests]
    illegal = of(planned, "malformed")
    assert len(illegal) == len(planned.requests) - len(clean.requests)
    assert_share(len(illegal), len(clean.requests), 0.05)
    kinds = Counter(request.malformed for request in illegal)
    assert set(kinds) == set(MALFORMED_KINDS)
    for kind in MALFORMED_KINDS:
        assert_share(kinds[kind], len(illegal), 1 / 8)


def test_kinds_of_illegal_requests_come_by_their_weights() -> None:
    malformed = IllegalTraffic(share=1.0, kinds={"no_body": 3, "too_long": 1, "huge_body": 0})
    illegal = of(schedule(malformed=malformed), "malformed")
    kinds = Counter(request.malformed for request in illegal)
    assert set(kinds) == {"no_body", "too_long"}
    assert_share(kinds["no_body"], len(illegal), 0.75)


def test_a_prompt_that_is_too_long_is_so_for_the_target_at_hand() -> None:
    malformed = IllegalTraffic(share=0.5, kinds={"too_long": 1})
    known = of(schedule(malformed=malformed, scale_to_context_tokens=8192), "malformed")
    unknown = of(schedule(malformed=malformed), "malformed")
    assert {request.input_tokens for request in known} == {16384}
    assert {request.input_tokens for request in unknown} == {BEYOND_ANY_CONTEXT_TOKENS}


def test_a_class_of_weight_zero_sends_nothing() -> None:
    planned = schedule(classes={"a": SHORT, "off": changed(LONG, weight=0)})
    assert {request.class_name for request in planned.requests} == {"a"}


def test_what_a_class_says_is_in_each_of_its_requests() -> None:
    traffic = changed(SHORT, headers={"x-a": "b"}, body={"top_p": 1}, priority=4, slo=SloTarget(e2e_s=2))
    planned = schedule(classes={"c": traffic})
    request = planned.requests[0]
    assert (request.lane, request.headers, request.body, request.priority) == (
        "captions",
        {"x-a": "b"},
        {"top_p": 1},
        4,
    )
    assert planned.slos == {"c": SloTarget(e2e_s=2)}


def test_text_seeds_differ_between_all_requests() -> None:
    requests = legal(schedule(arrivals="poisson(400)", **MIX))
    # 24,000 numbers below 2**53: two are alike with a chance of 3e-8.
    assert len({request.text_seed for request in requests}) == len(requests)


def test_each_shared_prefix_is_as_likely_as_the_others() -> None:
    traffic = changed(SHORT, shared_prefix=PrefixPool(tokens=800, count=10))
    requests = schedule(classes={"rag": traffic}).requests
    keys = Counter(request.prefix.key for request in requests if request.prefix is not None)
    assert set(keys) == {f"rag/{number}" for number in range(10)}
    for count in keys.values():
        assert_share(count, len(requests), 0.1)
    assert all(810 <= request.input_tokens <= 1300 for request in requests)


def test_a_run_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a single request comes in 1 s"):
        schedule(arrivals="poisson(0.000001)", duration_s=1.0)


def test_lengths_of_one_files_rows_stay_together(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("in,out\n10,1\n200,20\n3000,300\n")
    rows = TrafficClass(input_length="empirical(l.csv, column=in)", output_length="empirical(l.csv, column=out)")
    requests = schedule(classes={"c": rows}, folder=tmp_path).requests
    assert {(r.input_tokens, r.output_tokens) for r in requests} == {(10, 1), (200, 20), (3000, 300)}


# -- conversations ----------------------------------------------------------------------------------------


def test_a_later_turn_is_due_its_think_time_after_the_one_before_and_grows_by_it() -> None:
    planned = schedule(**MIX)
    later = [request for request in of(planned, "dialogue") if request.turn]
    assert len(later) > 500
    for request in later:
        assert request.after is not None
        before = planned.requests[request.after]
        assert (before.session, before.turn, before.prefix) == (request.session, request.turn - 1, request.prefix)
        assert 500e6 <= (request.due_ns or 0) - (before.due_ns or 0) <= 1500e6
        assert 20 <= request.input_tokens - before.input_tokens - before.output_tokens <= 60
    firsts = [request for request in of(planned, "dialogue") if not request.turn]
    assert all(request.after is None and 320 <= request.input_tokens <= 360 for request in firsts)
    assert len({request.session for request in firsts}) == len(firsts)


def test_conversations_have_the_turns_that_were_drawn() -> None:
    planned = schedule(**MIX)
    turns = Counter(request.session for request in of(planned, "dialogue"))
    begun_early = [
        turns[request.session]
        for request in of(planned, "dialogue")
        if not request.turn and (request.due_ns or 0) < 50e9  # six turns take 7.5 s at most: these all ended
    ]
    assert set(begun_early) == {2, 3, 4, 5, 6}
    # The mean of uniform(2, 6) is 4, its standard deviation 1.42; within 4.5 standard errors.
    assert abs(sum(begun_early) / len(begun_early) - 4) < 4.5 * 1.42 / sqrt(len(begun_early))


def test_without_history_turns_stand_alone_in_one_session() -> None:
    session = Session(turns="3", think_ms="100", history=False)
    planned = schedule(classes={"d": changed(DIALOGUE, session=session)})
    later = [request for request in planned.requests if request.turn]
    assert later
    assert all(request.after is None and 320 <= request.input_tokens <= 360 for request in later)


def test_conversations_go_on_when_all_begin_at_once() -> None:
    planned = schedule(classes={"d": DIALOGUE}, arrivals="poisson(inf, count=20)")
    firsts = [request for request in planned.requests if not request.turn]
    assert [request.due_ns for request in firsts] == [0] * 20
    assert 40 <= len(planned.requests) <= 120


def test_a_conversation_ends_before_the_turn_that_would_not_fit() -> None:
    session = Session(turns="50", think_ms="10")
    planned = schedule(classes={"d": changed(DIALOGUE, session=session)}, scale_to_context_tokens=1024)
    assert all(request.input_tokens + request.output_tokens <= 1008 for request in planned.requests)
    turns = Counter(request.session for request in planned.requests)
    # The prefix and 5 turns of at most 150 tokens fit into 1,008; 10 of at least 70 do not.
    assert max(turns.values()) < 11
    ended = [request.session for request in planned.requests if not request.turn and (request.due_ns or 0) < 59e9]
    assert min(turns[name] for name in ended) >= 4


# -- the context ------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.integers(64, 200_000), st.integers(1, 300_000), st.integers(1, 300_000))
def test_a_prompt_and_its_output_always_fit_and_neither_vanishes(context: int, prompt: int, output: int) -> None:
    fit = ContextFit(context)
    room = fit.room_tokens
    assert room is not None
    assert 0 < room <= context - 16
    cut_prompt, cut_output = fit.cut(prompt, output)
    assert 1 <= cut_prompt <= prompt
    assert 1 <= cut_output <= output
    assert fit.fits(cut_prompt, cut_output)
    assert 1 <= fit.cut_prefix(prompt) < fit.cut(10**6, output)[0]
    if fit.fits(prompt, output) and output <= room // 2:
        assert (cut_prompt, cut_output) == (prompt, output)


def test_long_lengths_are_scaled_by_one_factor_and_others_stay() -> None:
    long = changed(LONG, input_length="uniform(16384, 131072)", written_for_context_tokens=131072)
    classes = {"long": long, "short": SHORT}
    whole, scaled = schedule(classes=classes), schedule(classes=classes, scale_to_context_tokens=8192)
    assert scaled.source["length_factors"] == {"long": 1 / 16}
    assert lengths(of(whole, "short")) == lengths(of(scaled, "short"))
    room = 8192 - 128 - 200
    for before, after in zip(of(whole, "long"), of(scaled, "long"), strict=True):
        assert after.input_tokens == min(round(before.input_tokens / 16), room)
        assert after.output_tokens == before.output_tokens == 200
    assert max(request.input_tokens for request in of(scaled, "long")) == room


def test_a_context_larger_than_written_for_scales_nothing() -> None:
    long = changed(LONG, written_for_context_tokens=16384)
    planned = schedule(classes={"long": long}, scale_to_context_tokens=32768)
    assert planned.source["length_factors"] == {}
    assert lengths(planned.requests) == lengths(schedule(classes={"long": long}).requests)


# -- closed loop ------------------------------------------------------------------------------------------


def test_a_closed_loop_gives_every_user_a_row_long_enough_for_the_run() -> None:
    planned = schedule(arrivals="closed(8, think=0.5)", duration_s=5.2, classes={"short": SHORT})
    assert planned.concurrency == 8
    per_user = Counter(request.user for request in planned.requests)
    assert per_user == dict.fromkeys(range(8), 11)
    assert planned.source["requests_per_user"] == 11
    assert all(request.due_ns is None for request in planned.requests)
    assert [request.think_ns for request in planned.requests] == [0] * 8 + [500_000_000] * 80
    assert [request.index for request in planned.requests] == list(range(88))


@given(st.integers(1, 10**6), st.floats(0.1, 86400), st.floats(0, 60))
def test_a_row_lasts_the_run_or_the_schedule_is_full(users: int, duration_s: float, think_s: float) -> None:
    count = requests_per_user(users, duration_s, think_s)
    assert count >= 1
    assert count * (think_s + LEAST_ROUND_S) >= duration_s or (count + 1) * users > MOST_REQUESTS
    assert count * users <= max(MOST_REQUESTS, users)


def test_in_a_closed_loop_shares_hold_from_the_first_request_on() -> None:
    planned = schedule(arrivals="closed(500)", duration_s=0.5, **MIX)
    requests = legal(planned)
    for part in (requests[:500], requests[:5000], requests):
        assert_share(sum(request.class_name == "dialogue" for request in part), len(part), 0.3)
    assert_share(len(planned.requests) - len(requests), len(requests), 0.05)


def test_a_users_conversation_goes_on_with_that_user_in_its_own_rhythm() -> None:
    planned = schedule(arrivals="closed(5, think=2)", duration_s=200.0, **MIX)
    later = [request for request in of(planned, "dialogue") if request.turn]
    assert later
    for request in later:
        assert request.after is not None
        before = planned.requests[request.after]
        assert (before.user, before.session, before.turn) == (request.user, request.session, request.turn - 1)
        assert 500e6 <= request.think_ns <= 1500e6
    others = [request for request in legal(planned) if not request.turn and request.index >= 6]
    assert {request.think_ns for request in others} == {2_000_000_000}


# -- the shipped workload ---------------------------------------------------------------------------------


def test_the_mixed_workload_comes_out_as_its_file_says() -> None:
    loaded = with_values(load_workload("mixed-enterprise"), arrivals="poisson(100)", scale_to_context_tokens=8192)
    planned = build_schedule(loaded, seed=1)
    requests = legal(planned)
    counts = Counter(request.class_name for request in requests)
    for name, share in (("long_document", 0.2), ("dialogue", 0.3), ("short_generation", 0.5)):
        assert_share(counts[name], len(requests), share)
    assert_share(len(planned.requests) - len(requests), len(requests), 0.05)
    assert all(request.input_tokens + request.output_tokens <= 8064 for request in requests)
    assert all(request.input_tokens >= 512 for request in requests if request.class_name == "long_document")
