"""``headrace knobs``, as a person runs it against a server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.admin_client import AdminClient, checked_url
from headrace.cli.knobs import knobs
from headrace.cli.main import main
from headrace.errors import AdminRequestFailed
from tests.api.harness import Served, config, serving


async def run(served: Served, *words: str, env: dict[str, str] | None = None) -> Result:
    """The command, in a thread: the server runs in this one."""
    command = ["knobs", words[0], "--url", served.base_url, *words[1:]]
    return await asyncio.to_thread(
        lambda: CliRunner().invoke(main, command, env={"HEADRACE_ADMIN_KEY": "", **(env or {})})
    )


async def test_get_shows_every_knob_in_a_table(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        result = await run(served, "get")
        names = [line.split()[0] for line in result.stdout.splitlines()]
        assert names == ["knob", *served.deps.live.knobs]
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("max_prefill_tokens")]
    assert line.split() == ["max_prefill_tokens", "512", "tokens", "512", "config", "1", "to", "65536"]


async def test_get_by_name_says_what_it_means_and_a_group_stands_for_all_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        result = await run(served, "get", "linger_s", "lane_caps")
        meaning = served.deps.live.knobs["linger_s"].note.text
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["linger_s", *(f"lane_caps.{lane}" for lane in config().lanes)]
    assert meaning in lines[1]


async def test_get_prints_json_for_programs(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        result = await run(served, "get", "--json", "max_num_seqs")
    told = json.loads(result.stdout)
    assert list(told) == ["max_num_seqs"]
    assert (told["max_num_seqs"]["value"], told["max_num_seqs"]["layer"]) == (None, "config")


async def test_set_says_what_changed_and_get_and_reset_know_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        done = await run(served, "set", "max_prefill_tokens=256", "lane_caps.long=2", "strategy=dynamic")
        again = await run(served, "set", "strategy=dynamic")
        told = await run(served, "get", "--json", "strategy")
        taken = await run(served, "set", "lane_caps.long=null")
        one = await run(served, "reset", "strategy")
        rest = await run(served, "reset", "--json")
    assert done.stdout == "strategy: hybrid -> dynamic\nmax_prefill_tokens: 512 -> 256\nlane_caps.long: null -> 2\n"
    assert (done.exit_code, again.stdout) == (0, "nothing changed\n")
    assert json.loads(told.stdout)["strategy"]["layer"] == "live"
    assert (taken.stdout, one.stdout) == ("lane_caps.long: 2 -> null\n", "strategy: dynamic -> hybrid\n")
    assert json.loads(rest.stdout)["changed"] == {"max_prefill_tokens": {"old": 256, "new": 512}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "max_prefil_tokens=1"], "max_prefil_tokens: there is no such knob; did you mean max_prefill_tokens?"),
        (["set", "linger_s=NaN"], 'linger_s: expected a number, got "NaN"'),
        (["set", "linger_s=[1]"], 'linger_s: expected a number, got "[1]"'),
        (["set", "strategy="], 'strategy: expected one of auto, continuous, dynamic, hybrid, static, got ""'),
        (["get", "lingers"], "there is no knob 'lingers'; did you mean linger_s?"),
        (["reset", "lingers"], "lingers: there is no such knob; did you mean linger_s?"),
    ],
)
async def test_what_the_server_refuses_is_told_in_a_line_and_exits_with_1(
    tmp_path: Path, words: list[str], said: str
) -> None:
    async with serving(tmp_path) as served:
        result = await run(served, *words)
        assert served.engine.knobs_set == []
    assert (result.exit_code, result.stderr) == (1, f"error: {said}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["set"],
        ["set", "linger_s"],
        ["set", "=1"],
        ["set", "linger_s=1", "linger_s=2"],
        ["get", "--url", "127.0.0.1:8000"],
        ["get", "--url", "http://127.0.0.1:port"],
        ["get", "--url", "http://127.0.0.1:8000/?x"],
        ["lose"],
    ],
)
def test_wrong_usage_is_2(words: list[str]) -> None:
    assert CliRunner().invoke(knobs, words).exit_code == 2


async def test_a_key_is_taken_from_the_flag_or_the_environment(tmp_path: Path) -> None:
    async with serving(tmp_path, config(admin_keys=("sk-admin",))) as served:
        without = await run(served, "get")
        wrong = await run(served, "get", "--key", "sk-wrong")
        by_flag = await run(served, "get", "--key", "sk-admin")
        by_variable = await run(served, "set", "linger_s=1", env={"HEADRACE_ADMIN_KEY": "sk-admin"})
        broken = await run(served, "get", "--key", "sk-very\nsecret")
    assert (without.exit_code, wrong.exit_code, by_flag.exit_code, by_variable.exit_code) == (1, 1, 0, 0)
    assert "--key or HEADRACE_ADMIN_KEY" in without.stderr
    assert wrong.stderr.startswith("error: the admin key is not valid")
    assert (broken.exit_code, "very" in broken.output) == (1, False)


def test_no_repr_shows_the_key() -> None:
    assert "sk-admin" not in repr(AdminClient("http://127.0.0.1:8000", "sk-admin"))


def test_a_server_that_is_not_there_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment does not get between."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = CliRunner().invoke(main, ["knobs", "get", "--url", f"http://127.0.0.1:{port}"])
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: no server answers at http://127.0.0.1:{port} (Connection refused);"
        " start one with `headrace serve`, or name it with --url\n",
    )


@contextmanager
def answering(*replies: bytes) -> Iterator[str]:
    """A server that is not headrace: one connection per reply. Gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def reply(status: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (reply("200 OK", b"<html>"), "does not answer as headrace does"),
        (reply("200 OK", b"[]"), "does not answer as headrace does"),
        (reply("502 Bad Gateway", b"<html>"), "answered with status 502, and not as headrace does"),
        (reply("302 Found", b"", "location: http://127.0.0.1:9/"), "answered with status 302, and not as headrace"),
        (reply("404 Not Found", b'{"error": {"message": "nothing"}}'), "has no admin API: nothing"),
        (reply("403 Forbidden", b'{"error": {"message": "a\\u001b[2Jb"}}'), "a [2Jb"),
        (b"", "no server answers"),
        (b"SSH-2.0-x\r\n", "no server answers"),
    ],
)
def test_another_server_is_told_from_headrace(answer: bytes, said: str) -> None:
    with answering(answer) as url, pytest.raises(AdminRequestFailed) as caught:
        AdminClient(url, "sk-admin").ask("GET", "/admin/knobs")
    assert said in str(caught.value)
    assert "sk-admin" not in str(caught.value)


def test_a_url_needs_no_care_about_its_slash() -> None:
    assert checked_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"
