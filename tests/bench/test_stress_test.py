"""benchmarks/stress_test.py under Locust: real processes, loaded for a few seconds as operators do it.

Nothing of it is imported here: Locust replaces the standard library's sockets in whatever process imports it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.scripted_process import scripted_server
from tests.bench.truth_server import Told, TruthServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOCUST = Path(sys.executable).with_name("locust")
KEY = "sk-test-0123"
FIRST_MS, GAP_MS, TOKENS = 20.0, 30.0, 8
WHOLE_MS = FIRST_MS + GAP_MS * (TOKENS - 1)


@dataclass(frozen=True)
class Run:
    """What a run of Locust left. Rows of the statistics by (type, name), numbers as Locust wrote them."""

    status: int
    output: str
    rows: dict[tuple[str, str], dict[str, str]]
    failures: list[dict[str, str]]
    exceptions: list[dict[str, str]]

    def count(self, name: str, kind: str = "E2E") -> int:
        return int(self.rows[kind, name]["Request Count"]) if (kind, name) in self.rows else 0

    def failed(self, name: str) -> int:
        return int(self.rows["E2E", name]["Failure Count"])

    def number(self, column: str, name: str, kind: str = "E2E") -> float:
        return float(self.rows[kind, name][column])

    def errors(self, name: str) -> set[str]:
        texts = (row["Error"] for row in self.failures if row["Name"] == name)
        return {re.fullmatch(r"CatchResponseError\(['\"](.*)['\"]\)", text, re.DOTALL)[1] for text in texts}  # type: ignore[index]


class Locust:
    """``locust -f stress_test.py`` from the benchmarks folder, as operators type it."""

    def __init__(self, url: str, folder: Path, *options: str, users: int, time: str) -> None:
        self._prefix = folder / "report"
        typed = ["--users", str(users), "--spawn-rate", "10", "--host", url, f"--csv={self._prefix}", "-t", time]
        self._process = subprocess.Popen(
            [str(LOCUST), "-f", "stress_test.py", *typed, *options],
            cwd=BENCHMARKS,
            env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST")}
            | {"OPENAI_API_KEY": KEY},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def result(self) -> Run:
        with self._process:
            try:
                output, _ = self._process.communicate(timeout=60)
            finally:
                self._process.kill()
        rows = {(row["Type"], row["Name"]): row for row in self._table("stats")}
        return Run(self._process.returncode, output, rows, self._table("failures"), self._table("exceptions"))

    def _table(self, name: str) -> list[dict[str, str]]:
        file = Path(f"{self._prefix}_{name}.csv")
        if not file.exists():  # wrong usage: nothing began
            return []
        with file.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))


def workload(folder: Path, classes: dict[str, Any], **more: Any) -> str:
    file = folder / "workload.yaml"
    plain = {"input_length": "fixed(32)", "output_length": f"fixed({TOKENS})"}
    filled = {name: {**plain, **fields} for name, fields in classes.items()}
    file.write_text(yaml.safe_dump({"arrivals": "poisson(1)", "duration_s": 10, "classes": filled, **more}))
    return f"--workload={file}"


@pytest.fixture
def truth_server() -> Iterator[TruthServer]:
    server = TruthServer(first_ms=FIRST_MS, gap_ms=GAP_MS)
    try:
        yield server
    finally:
        server.close()


def test_as_typed_it_drives_the_mix_and_ends_by_itself(tmp_path: Path) -> None:
    with scripted_server(tmp_path, step_s=0.001) as url:
        run = Locust(url, tmp_path, users=10, time="3s").result()
    assert run.status == 0, run.output
    assert not run.failures
    assert not run.exceptions
    legal = ("long_document", "dialogue", "short_generation")
    for name in legal:
        assert run.count(name) > 0
        assert run.count(f"TTFT {name}", "TTFT") == run.count(name)
        assert run.number("Average Content Size", name) > 0
        assert run.number("Average Response Time", name) >= run.number("Average Response Time", f"TTFT {name}", "TTFT")
    assert run.count("Aggregated", "") == sum(run.count(name) for name in (*legal, "malformed"))
    # The files hold the last second too: what Locust printed at its end.
    assert re.findall(r"Aggregated +(\d+) +0\(0\.00%\)", run.output)[-1] == run.rows["", "Aggregated"]["Request Count"]
    assert "model tiny, context 4096 tokens" in run.output
    assert (tmp_path / "report_stats_history.csv").stat().st_size > 0


def test_headrace_refuses_every_kind_of_illegal_request_and_each_counts_as_a_success(tmp_path: Path) -> None:
    with scripted_server(tmp_path) as url:
        illegal = workload(tmp_path, {"short": {"output_length": "fixed(1)"}}, malformed={"share": 1})
        run = Locust(url, tmp_path, illegal, users=4, time="2s").result()
    assert run.status == 0, run.output
    assert run.failed("malformed") == 0
    # One for each legal request; at the end a user may be between the two. Eight kinds are all among this many: one is
    # missing from 100 with a chance of 8 * (7/8)**100, 1.3e-5.
    assert 100 < run.count("malformed") <= run.count("short") + 4
    assert ("TTFT", "TTFT malformed") not in run.rows


def _noted(server: TruthServer) -> Iterator[Told]:
    """What the server noted. Of requests that came at the same moment it keeps one."""
    for number in range(server.counts()["requests"]):
        with contextlib.suppress(KeyError):
            yield server.told(str(number + 1))


class TestAgainstKnownAnswers:
    """One run against a server whose answers are known, class by class."""

    @pytest.fixture(scope="class")
    @staticmethod
    def told_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, list[Told]]]:
        folder = tmp_path_factory.mktemp("stress")
        chat = {
            "weight": 4,
            "lane": "interactive",
            "headers": {"x-tenant-id": "shop"},
            "shared_prefix": {"tokens": 10},
            "session": {"turns": "fixed(3)", "think_ms": "fixed(50)"},
        }
        error = '{"error": {"message": "lane full (17 waiting), retry in 7.5 s"}}'
        truths: dict[str, dict[str, object]] = {
            "shed": {"status": 429, "headers": {"retry-after": "8"}, "body": error},
            "unavailable": {"status": 503, "body": "not ready"},
            "rejected": {"status": 404, "body": f'{{"detail": "no access for {KEY}"}}'},
            "cut": {"tokens": 3, "end": "close"},
            "early": {"tokens": 3, "finish": False, "done": False},
            "error": {"chunks": [{"kind": "error", "text": "engine died"}]},
            "empty": {"tokens": 0},
            "open": {"tokens": 2, "stay_open_ms": 60_000},
        }
        classes = {"chat": chat, "whole": {"body": {"stream": False}}}
        classes |= {name: {"body": {"truth": truth}} for name, truth in truths.items()}
        server = TruthServer(first_ms=FIRST_MS, gap_ms=GAP_MS)
        try:
            options = workload(folder, classes, malformed={"share": 0.5, "kinds": {"unknown_model": 1, "no_body": 1}})
            run = Locust(server.url, folder, options, "--model=truth", users=8, time="3s").result()
            told = list(_noted(server))
        finally:
            server.close()
        yield run, told

    @pytest.fixture
    @staticmethod
    def run(told_run: tuple[Run, list[Told]]) -> Run:
        return told_run[0]

    @pytest.fixture
    @staticmethod
    def chats(told_run: tuple[Run, list[Told]]) -> list[tuple[Told, dict[str, Any]]]:
        """The chat requests as the server got them."""
        legal = [told for told in told_run[1] if told.headers.get("x-headrace-lane") == "interactive"]
        return [(told, json.loads(told.body)) for told in legal]

    def test_failures_make_the_exit_status_1_and_stop_nothing(self, run: Run) -> None:
        assert run.status == 1
        assert "Shutting down (exit code 1)" in run.output
        assert not run.exceptions

    def test_times_are_the_servers(self, run: Run) -> None:
        assert run.failed("chat") == 0
        # Never earlier than it was; and the first token is seen when it comes. Were the stream read in blocks of
        # 1,024 bytes, as Locust's own clients do, it would be seen with the last, after 230 ms: 100 ms is between.
        assert run.number("Min Response Time", "TTFT chat", "TTFT") >= FIRST_MS
        assert run.number("Median Response Time", "TTFT chat", "TTFT") < 100
        assert run.number("Min Response Time", "chat") >= WHOLE_MS
        assert run.number("Average Content Size", "chat") == TOKENS
        assert run.number("Average Content Size", "whole") == TOKENS

    def test_a_stream_that_stays_open_after_done_ends_with_its_last_token(self, run: Run) -> None:
        assert run.failed("open") == 0
        # Two tokens: 50 ms. The second for which a late usage is waited is not part of it.
        assert run.number("Median Response Time", "open") < 500

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("shed", "shed (HTTP status 429): lane full (# waiting), retry in #.# s"),
            ("unavailable", "http_error (HTTP status 503): not ready"),
            ("rejected", "rejected (HTTP status 404): no access for ***"),
            ("cut", "cut: the answer broke off: Incomplete response."),
            ("early", "cut: the stream ended early"),
            ("error", "error: engine died"),
            ("empty", "empty: an answer without content"),
        ],
    )
    def test_what_is_not_a_whole_answer_is_a_failure_with_a_reason_and_without_a_time(
        self, run: Run, name: str, message: str
    ) -> None:
        assert run.count(name) > 0
        assert run.failed(name) == run.count(name)
        assert run.errors(name) == {message}
        assert run.number("Max Response Time", name) == 0
        assert ("TTFT", f"TTFT {name}") not in run.rows

    def test_an_illegal_request_that_is_answered_is_a_failure(self, run: Run) -> None:
        unknown = "an illegal request (unknown_model) was not refused as it should be: HTTP status 200"
        assert run.errors("malformed") == {unknown}
        assert 0 < run.failed("malformed") < run.count("malformed")

    def test_requests_carry_what_their_class_says(self, chats: list[tuple[Told, dict[str, Any]]]) -> None:
        for told, body in chats:
            assert told.headers["x-tenant-id"] == "shop"
            assert told.headers["authorization"] == f"Bearer {KEY}"
            assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("truth", TOKENS, True)

    def test_conversations_carry_their_history_and_are_each_their_users_own(
        self, chats: list[tuple[Told, dict[str, Any]]]
    ) -> None:
        conversations: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
        for told, body in chats:
            conversations[told.headers["x-session-id"]].append(body["messages"])
        roles = ["system", "user", "assistant", "user", "assistant", "user"]
        lengths = set()
        for turns in conversations.values():
            for messages in turns:
                lengths.add(len(messages))
                assert [message["role"] for message in messages] == roles[: len(messages)]
                assert {message["content"] for message in messages[2::2]} <= {"word " * TOKENS}
            longest = max(turns, key=len)
            assert all(messages == longest[: len(messages)] for messages in turns)
        assert lengths == {2, 4, 6}  # three turns
        # The shared prefix is the application's, the first question the user's.
        assert len({turns[0][0]["content"] for turns in conversations.values()}) == 1
        assert len({turns[0][1]["content"] for turns in conversations.values()}) == len(conversations)

    def test_a_context_that_the_server_does_not_say_is_warned_about(self, run: Run) -> None:
        assert "the server does not say its context: taken to be 8192 tokens" in run.output


def test_a_server_that_dies_gives_failures_and_a_normal_end(truth_server: TruthServer, tmp_path: Path) -> None:
    users, seconds = 4, 3
    options = workload(tmp_path, {"stream": {}})
    locust = Locust(truth_server.url, tmp_path, options, "--model=truth", users=users, time=f"{seconds}s")
    deadline_s = time.monotonic() + 30
    while truth_server.counts()["requests"] < 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    truth_server.kill()
    run = locust.result()
    assert run.status == 1
    assert "Shutting down (exit code 1)" in run.output
    assert not run.exceptions
    errors = {text.partition(":")[0] for text in run.errors("stream")}
    assert "refused" in errors
    assert errors <= {"refused", "cut"}
    # A user that finds nobody tries again a second later, not at once: at most one request cut, and one refused at
    # once and one for each second.
    assert users < run.failed("stream") <= users * (2 + seconds)
    assert run.count("stream") > run.failed("stream")
    assert run.number("Min Response Time", "stream") >= WHOLE_MS


def test_what_is_under_way_at_the_end_may_end(tmp_path: Path) -> None:
    with scripted_server(tmp_path, answer="a long answer", step_s=0.5) as url:
        options = workload(tmp_path, {"slow": {"output_length": "fixed(4)"}})
        run = Locust(url, tmp_path, options, "--headless", users=3, time="1s").result()
    assert run.status == 0, run.output
    assert run.count("slow") == 3
    assert run.number("Min Response Time", "slow") > 1000


def test_what_is_cut_off_at_the_end_counts_only_when_it_is_late_already(tmp_path: Path) -> None:
    with scripted_server(tmp_path, step_s=60) as url:
        options = workload(tmp_path, {"strict": {"slo": {"ttft_s": 0.2}}, "patient": {"slo": {"ttft_s": 600}}})
        run = Locust(url, tmp_path, options, "--stop-timeout=0", users=12, time="1s").result()
    assert run.status == 1
    # Twelve users with a class each by a coin: all alike with a chance of 2**-11, and by the seed always the same.
    assert 0 < run.failed("strict") == run.count("strict") < 12
    assert run.errors("strict") == {"cancelled: the run ended before the answer did"}
    assert run.count("patient") == 0


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ((), 1, "error: --host: http://127.0.0.1:1 does not answer: [Errno 111] Connection refused"),
        (("--host=127.0.0.1:1",), 1, "error: --host: '127.0.0.1:1' is not like http://127.0.0.1:8000"),
        (("--salt=-1",), 2, "argument --salt: '-1' is not a whole number from 0 on"),
        (("--workload=mixed-enterprize",), 1, "no workload file 'mixed-enterprize'"),
    ],
)
def test_what_cannot_begin_says_why_and_fails(
    tmp_path: Path, options: tuple[str, ...], status: int, message: str
) -> None:
    run = Locust("http://127.0.0.1:1", tmp_path, *options, users=1, time="5s").result()
    assert run.status == status
    assert message in run.output
    assert "Traceback" not in run.output


def test_the_model_is_named_when_the_server_lists_none(truth_server: TruthServer, tmp_path: Path) -> None:
    run = Locust(truth_server.url, tmp_path, users=1, time="5s").result()
    assert run.status == 1
    assert "error: --model: GET /v1/models lists no model (HTTP status 200)" in run.output


def test_rows_are_each_users_own_and_the_seeds() -> None:
    script = """
import itertools
from stress_test import Load, _for_one_user
from headrace.bench.requests.bodies import RequestBodies
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import TokenScale
from headrace.bench.load.workload_file import load_workload

workload = _for_one_user(load_workload("mixed-enterprise"), 4096)
bodies = RequestBodies(model="m", texts=PromptTexts(), scale=TokenScale())

def row(seed, worker, user, part):
    return Load(None, workload, bodies, seed, worker, itertools.count()).row(user, part)

places = list(itertools.product((0, 1), repeat=4))
rows = [row(*place) for place in places]
assert rows == [row(*place) for place in places]
first = rows[0]
for other in rows[1:]:
    assert [request.input_tokens for request in other] != [request.input_tokens for request in first]
for one, two in itertools.combinations(rows[:8], 2):  # of one run: no text and no conversation twice
    assert not {request.text_seed for request in one} & {request.text_seed for request in two}
    assert not {r.session for r in one if r.session} & {r.session for r in two if r.session}
legal = [request for row in rows for request in row if request.malformed is None]
share = len([request for request in legal if request.class_name == "short_generation"]) / len(legal)
assert abs(share - 0.5) < 0.03, share  # of 8,016 draws: more than five standard deviations
assert all(request.input_tokens + request.output_tokens < 4096 for request in legal)
print("as it should be")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "as it should be\n", done.stderr
