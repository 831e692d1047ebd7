"""The engine's end of the socket: messages once each, in order, whoever looked at them before."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.engines.llama.build import Engine
from headrace.engines.llama.channel import Channel, GatewayGone
from headrace.engines.llama.core import Chores
from headrace.engines.llama.loop import EngineLoop
from headrace.errors import EngineError
from headrace.kv.account import KvAccount
from headrace.messages import framing
from headrace.messages.engine import (
    Abort,
    EngineLoad,
    EngineSnapshot,
    GatewayMessage,
    Shutdown,
    Snapshot,
    StepOutput,
    Submit,
)
from tests.engines.harness import request


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """The gateway's socket and the engine's channel."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Channel(theirs)


def send(gateway: socket.socket, *messages: GatewayMessage) -> None:
    """From the gateway."""
    gateway.sendall(b"".join(map(framing.encode, messages)))


def test_what_was_looked_at_is_received_once_and_in_order(ends: tuple[socket.socket, Channel]) -> None:
    """``look`` shows each message once; ``receive`` gives all of them, with those that came after."""
    gateway, channel = ends
    assert channel.look() == []
    send(gateway, Abort("a"), Abort("b"))
    assert channel.look() == [Abort("a"), Abort("b")]
    assert channel.look() == []
    send(gateway, Abort("c"))
    assert channel.look() == [Abort("c")]
    send(gateway, Abort("d"))
    assert channel.receive(wait_s=None) == [Abort("a"), Abort("b"), Abort("c"), Abort("d")]
    assert channel.receive(wait_s=0) == []


def test_a_frame_in_pieces_is_one_message(ends: tuple[socket.socket, Channel]) -> None:
    """However often one looks between them."""
    gateway, channel = ends
    frame = framing.encode(Abort("in pieces"))
    gateway.sendall(frame[:5])
    assert channel.look() == [] and channel.receive(wait_s=0) == []
    gateway.sendall(frame[5:])
    assert channel.receive(wait_s=None) == [Abort("in pieces")]


def test_waiting_ends_after_its_time_or_with_a_message(ends: tuple[socket.socket, Channel]) -> None:
    """A window far below a millisecond is kept as well as the system can."""
    gateway, channel = ends
    started_s = time.monotonic()
    assert channel.receive(wait_s=0.02) == []
    assert time.monotonic() - started_s >= 0.02
    send(gateway, Abort("a"))
    assert channel.receive(wait_s=3600.0) == [Abort("a")]
    send(gateway, Abort("b"))
    channel.look()
    assert channel.receive(wait_s=3600.0) == [Abort("b")], "what was looked at does not wait"


def test_a_look_never_raises_and_receive_does(ends: tuple[socket.socket, Channel]) -> None:
    """The gateway gone, or out of its mind: said when messages are received, not in the midst of a pass."""
    gateway, channel = ends
    gateway.sendall(b"\x01\x00\x00\x00\xc1")
    assert channel.look() == [] and channel.look() == []
    with pytest.raises(EngineError, match="unreadable message"):
        channel.receive(wait_s=None)


def test_a_gateway_that_leaves_is_noticed(ends: tuple[socket.socket, Channel]) -> None:
    """After a look as well as without."""
    gateway, channel = ends
    gateway.close()
    assert channel.look() == []
    with pytest.raises(GatewayGone):
        channel.receive(wait_s=0)


class Core:
    """As much of a core as the loop sees."""

    def __init__(self) -> None:
        self.threads = 1
        self.pause_s = 0.0
        self.has_work = False
        self.steps: list[float] = []
        self.submitted: list[str] = []
        self.emit: Any = None
        self.cut: Any = None
        self.saves: set[str] = set()
        self.during_step: Any = None
        self.chores: Chores = None
        self.chores_to_do: list[Chores] = []
        """What is left after each chore that is done."""

    def do_chores(self) -> StepOutput | None:
        self.chores = self.chores_to_do.pop(0)
        return None if self.chores is not None else StepOutput([], 0.0, self.load())

    def step(self) -> StepOutput:
        self.steps.append(time.monotonic())
        if self.during_step is not None:
            self.during_step()
        return StepOutput([], 0.0)

    def submit(self, submit: Submit) -> None:
        self.submitted.append(submit.request_id)
        self.has_work = True

    def cut_saves(self, submit: Submit, now_s: float) -> bool:
        assert abs(now_s - time.monotonic()) < 10
        return submit.request_id in self.saves

    def abort_all(self) -> None:
        self.has_work = False

    def load(self) -> EngineLoad:
        return EngineLoad(1, 0, 0, 1, 0, 1, 0, 0.0, 0, 0, 1)

    def band_plans(self) -> list[Any]:
        return []

    def kv_account(self) -> KvAccount:
        return KvAccount([])

    def live_ids(self) -> list[str]:
        return self.submitted

    def check_integrity(self) -> None:
        return None


def loop_over(core: Core, channel: Channel) -> EngineLoop:
    """The loop with fixed threads."""
    engine = SimpleNamespace(core=core, max_threads=1, ready=None)
    return EngineLoop(cast(Engine, engine), channel, fixed_threads=True)


def test_a_pass_is_cut_for_an_arrival_that_it_saves_and_nothing_is_lost(ends: tuple[socket.socket, Channel]) -> None:
    """Of what arrives during the step only a Submit counts; all of it is handled after the step, once."""
    gateway, channel = ends
    core, answers = Core(), []

    def during_step() -> None:
        core.during_step = None
        answers.append(core.cut())
        send(gateway, request("patient", [1]), Abort("patient"))
        answers.append(core.cut())
        send(gateway, request("urgent", [1]))
        answers.append(core.cut())
        answers.append(core.cut())
        send(gateway, Shutdown())

    core.saves = {"urgent"}
    core.during_step = during_step
    core.abort = lambda _: None  # type: ignore[attr-defined]
    send(gateway, request("first", [1]))
    loop_over(core, channel).run()
    assert answers == [False, False, True, False], "an arrival is asked about once"
    assert core.submitted == ["first", "patient", "urgent"]
    assert len(core.steps) == 2, "one, and one for the ends"


def test_an_idle_loop_does_chores_and_reports_when_they_are_done(ends: tuple[socket.socket, Channel]) -> None:
    """One after the other, without a step; the gateway gets the load that they leave."""
    gateway, channel = ends
    core = Core()
    core.chores, core.chores_to_do = "now", ["now", "soon", "soon", None]
    done = core.do_chores

    def do_chores() -> StepOutput | None:
        output = done()
        if output is not None:
            send(gateway, Shutdown())
        return output

    core.do_chores = do_chores  # type: ignore[method-assign]
    loop_over(core, channel).run()
    assert len(core.steps) == 1, "the one for the ends"
    frames = framing.FrameBuffer()
    first, *_ = [framing.decode_for_gateway(body) for body in frames.feed(gateway.recv(65536))]
    assert isinstance(first, StepOutput) and first.load == core.load()


def test_while_a_plan_waits_the_loop_sleeps_and_a_message_wakes_it(ends: tuple[socket.socket, Channel]) -> None:
    """Steps are a pause apart, not as fast as they can be; a snapshot is answered at once."""
    gateway, channel = ends
    core = Core()

    def during_step() -> None:
        core.pause_s = 0.02
        if len(core.steps) == 4:
            core.pause_s = 3600.0
            send(gateway, Snapshot(7), Shutdown())

    core.during_step = during_step
    send(gateway, request("first", [1]))
    loop_over(core, channel).run()
    gaps = [later - earlier for earlier, later in zip(core.steps[:4], core.steps[1:4], strict=False)]
    assert len(core.steps) == 5 and min(gaps) >= 0.02
    frames = framing.FrameBuffer()
    answers = [framing.decode_for_gateway(body) for body in frames.feed(gateway.recv(65536))]
    assert any(isinstance(answer, EngineSnapshot) and answer.ask_id == 7 for answer in answers)
