"""One request in the fleet: places, tries, hedges, going on elsewhere; exactly one end.

Before the first token a try that fails is made again on another replica, within a budget. After it the answer is
continued on another replica from the text that was sent, where the engines' API allows it; where it does not, the
request ends with an error that its client sees. A client's own fault ends it at once and counts against nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final, Protocol

import msgspec

from headrace.config.schema import Config
from headrace.control.concurrency import ReplicaTargets
from headrace.engines.fleet.budget import RetryBudget
from headrace.engines.fleet.group import Asked, Group, NoPlace, Place
from headrace.engines.output_stream import OutputStream
from headrace.engines.remote.request_body import can_continue
from headrace.errors import EngineError, EngineGone, EngineNotReady, RemoteFailure
from headrace.lanes.lane import Lane
from headrace.messages.engine import SequenceOutput, Submit

_logger = logging.getLogger(__name__)

MAX_BUSY_REST_S: Final = 5.0
BUSY_REST_S: Final = 0.25
_TOO_LONG_STATUS: Final = 400
MOST_CONTINUED_CHARS: Final = 4 * 1024 * 1024
"""An answer longer than this is not kept for going on elsewhere."""


class Watcher(Protocol):
    """Hears what happens to requests, for metrics, alerts and headers."""

    def attempt_ended(self, group: str, replica: str, outcome: str) -> None: ...

    def tried_again(self, group: str, how: str) -> None: ...

    def routed(self, group: str, reason: str) -> None: ...

    def degraded(self, submit: Submit, how: str) -> None: ...

    def first_token(self, place: Place, lane: str, ttft_s: float | None) -> None:
        """The breaker's measurement: None when it failed."""


class Attempt:
    """A request at one replica. Implements ``replica.Attempt``."""

    def __init__(
        self, place: Place, group: Group, submit: Submit, targets: ReplicaTargets, clock: Callable[[], float]
    ) -> None:
        self.place = place
        self.group = group
        self.submit = submit
        self._clock = clock
        self._ttft_target_s = targets.ttft_s
        self._replica = place.replica
        self._unanswered = submit.prompt_count
        self.began_s = clock()
        self.last_s = self.began_s
        self.streaming = False
        self.settled = False
        """Whether what came of it has been told to the replica's health and the lane's breaker."""
        self.failure: EngineError | None = None
        self._over = False
        place.began()
        self._replica.began(self, self._unanswered, targets)
        self.stream = self._replica.engine.submit(submit)

    def break_off(self, failure: RemoteFailure) -> None:
        """End it as if the engine had."""
        self.stream.fail(failure)

    def first_token(self) -> float:
        """Note the first token; the time it took."""
        self.last_s = self._clock()
        ttft_s = self.last_s - self.began_s
        self.streaming = True
        computed = max(0, self._unanswered - self.place.decision.cached_tokens)
        self._replica.answered(self._unanswered, computed, ttft_s, self._ttft_target_s)
        self._unanswered = 0
        return ttft_s

    def token(self, tokens: int) -> None:
        now_s = self._clock()
        self._replica.generated(tokens, now_s - self.last_s, now_s)
        self.last_s = now_s

    async def close(self) -> None:
        """The request leaves the replica, aborted where it still runs."""
        if not self._over:
            self._over = True
            self._replica.ended(self, self._unanswered)
        await self.stream.aclose()
        self.group.dispatch()


class Run:
    """Runs one ``Submit``; outputs go to ``outer``. ``groups`` and ``config_now`` are those of the moment
    itself: a request whose group a reload takes away goes on in the one that serves its lane then."""

    def __init__(
        self,
        submit: Submit,
        outer: OutputStream,
        config: Config,
        groups: dict[str, Group],
        *,
        config_now: Callable[[], Config],
        keys: tuple[int, ...],
        block_tokens: float,
        session: str | None,
        budget: RetryBudget,
        watcher: Watcher,
        clock: Callable[[], float],
        randomness: Random,
        on_end: Callable[[], None],
    ) -> None:
        self.submit = submit
        self.outer = outer
        self._config_now = config_now
        self._groups = groups
        self._lane: Lane = config.lanes.get(submit.lane) or Lane()
        self._primary = groups[config.group_of(self._lane)]
        fallback = self._lane.fallback.group
        self._fallback = None if fallback is None else groups.get(fallback)
        self._group = self._primary
        self._keys = keys
        self._block_tokens = block_tokens
        self._session = session
        self._budget = budget
        self._watcher = watcher
        self._clock = clock
        self._randomness = randomness
        self._on_end = on_end
        self._avoid: frozenset[str] = frozenset()
        self._room = asyncio.Event()
        self._sent: list[str] | None = []
        self._sent_chars = 0
        self._sent_tokens = 0
        self._began = False
        self._first_wait_s: float | None = None

    async def run(self) -> None:
        """Until the outer stream has its end: an output with ``finish``, or an error."""
        self.outer.bound(self._pressed)
        limit_s = self._primary.config.timeouts.total_s
        last: SequenceOutput | EngineError
        try:
            async with asyncio.timeout(limit_s):
                last = await self._tries()
        except TimeoutError:
            last = RemoteFailure(f"the answer was not whole within {limit_s:g} s", kind="timeout")
        except NoPlace as error:
            last = error
            if error.too_long and not self._began:
                last = SequenceOutput(
                    self.submit.request_id, finish="error", error=str(error), refused_status=_TOO_LONG_STATUS
                )
        except EngineError as error:
            last = error
        # The last thing that its reader hears: by then nothing of it is left.
        self._on_end()
        self.outer.push(last)

    async def _tries(self) -> SequenceOutput:
        tries = 0
        while True:
            tries += 1
            place = await self._place()
            try:
                return await self._attempt(place)
            except NoPlace:
                raise
            except (RemoteFailure, EngineGone, EngineNotReady) as error:
                self._avoid |= {place.replica.name}
                await self._again(tries, error)

    async def _again(self, tries: int, error: EngineError) -> None:
        """Whether and when to try again. Raises ``error`` when not."""
        retry = self._group.config.retry
        if tries >= retry.tries:
            raise error
        if self._began:
            wire = self.submit.wire
            if self._sent is None or wire is None or not self._can_continue():
                raise error
            if not self._budget.take():
                raise error
            self._watcher.tried_again(self._group.name, "continue")
            return
        if not self._budget.take():
            raise error
        self._watcher.tried_again(self._group.name, "retry")
        longest_s = retry.backoff_s * 2 ** (tries - 1)
        await asyncio.sleep(longest_s * (0.5 + 0.5 * self._randomness.random()))

    def _can_continue(self) -> bool:
        kind = self._group.config.kind
        return kind != "embedded" and can_continue(self.submit, kind)

    async def _place(self) -> Place:
        """A place, wherever the lane is served by now. Raises NoPlace."""
        while True:
            try:
                return await self._place_in_group()
            except NoPlace as error:
                if not error.gone or not self._regroup():
                    raise

    def _regroup(self) -> bool:
        """Whether another group serves the lane since the configuration changed; the request is its from then on."""
        config = self._config_now()
        lane = config.lanes.get(self.submit.lane) or Lane()
        group = self._groups.get(config.group_of(lane))
        if group is None or group is self._primary or (self._began and not self._continues_in(group)):
            return False
        if group.config.kind == "embedded" and not self.submit.prompt_tokens:
            return False  # it was planned for engines that take text
        fallback = lane.fallback.group
        self._lane = msgspec.structs.replace(self._lane, fallback=lane.fallback)
        self._fallback = None if fallback is None else self._groups.get(fallback)
        self._group = self._primary = group
        return True

    async def _place_in_group(self) -> Place:
        """A place in the lane's group; in its fallback where that cannot serve; where there is none, on a replica that
        is too slow. Raises NoPlace."""
        if self._group is not self._primary:
            return await self._group.place(self._asked(self._group))
        try:
            place = await self._primary.place(self._asked(self._primary))
            self._watcher.routed(self._primary.name, place.decision.reason)
            return place
        except NoPlace as error:
            if self._fallback is not None and not (self._began and not self._continues_in(self._fallback)):
                try:
                    place = await self._fallback.place(self._asked(self._fallback))
                except NoPlace:
                    if not error.breaker:
                        raise
                else:
                    self._group = self._fallback
                    self._watcher.degraded(self.submit, f"group={self._fallback.name}")
                    self._watcher.routed(self._fallback.name, "fallback")
                    return place
            elif not error.breaker:
                raise
        self._watcher.degraded(self.submit, "slow")
        place = await self._primary.place(replace(self._asked(self._primary), last_resort=True))
        self._watcher.routed(self._primary.name, "last_resort")
        return place

    def _continues_in(self, group: Group) -> bool:
        kind = group.config.kind
        # Another model would go on in another voice.
        return (
            group.config.model == self._primary.config.model and kind != "embedded" and can_continue(self.submit, kind)
        )

    def _asked(self, group: Group) -> Asked:
        submit = self.submit
        return Asked(
            lane=submit.lane,
            breaker=self._lane.breaker,
            priority=submit.priority,
            arrived_s=submit.arrived_s,
            deadline_s=submit.deadline_s,
            prompt_tokens=max(1, submit.prompt_count + self._sent_tokens),
            output_tokens=submit.expected_tokens or 0,
            keys=self._keys,
            block_tokens=self._block_tokens,
            session=self._session,
            avoid=self._avoid,
        )

    def _targets(self) -> ReplicaTargets:
        slo = self._lane.slo
        itl_s = self.submit.tpot_s if self.submit.tpot_s is not None else slo.p99_tpot_s
        ttft_s = slo.p99_ttft_s
        if itl_s is None and slo.p99_e2e_s is not None:
            # What the end of the answer leaves to each token of a typical one.
            itl_s = slo.p99_e2e_s / max(2, self._lane.typical_output_tokens)
        return ReplicaTargets(ttft_s, itl_s)

    def _request(self, group: Group) -> Submit:
        """What goes to an engine of the group: from where the answer broke off, in the group's model."""
        submit, wire = self.submit, self.submit.wire
        if group.config.kind == "embedded":
            return msgspec.structs.replace(submit, wire=None)  # it takes token ids
        if wire is not None and self._sent_tokens and self._sent is not None:
            text = "".join(self._sent)
            wire = msgspec.structs.replace(wire, continued=text, continued_tokens=self._sent_tokens)
        model = self._lane.fallback.model if group is self._fallback and group is not self._primary else None
        if wire is not None and model is not None:
            wire = msgspec.structs.replace(wire, model=model)
        return submit if wire is submit.wire else msgspec.structs.replace(submit, wire=wire)

    async def _attempt(self, place: Place) -> SequenceOutput:
        """One try, whole; its last output, which is not sent yet. Raises EngineError when it failed."""
        attempt = Attempt(place, self._group, self._request(self._group), self._targets(), self._clock)
        attempts = [attempt]
        try:
            attempt, output = await self._first(attempts)
            return await self._stream(attempt, output)
        except EngineError as error:
            failing = [one for one in attempts if one.failure is error] or [attempt]
            self._failed(failing[0], error)
            raise
        finally:
            for one in attempts:
                self._undecided(one)
                await one.close()

    async def _first(self, attempts: list[Attempt]) -> tuple[Attempt, SequenceOutput]:
        """The first output, and whose it is. With hedging a second replica is asked when the first is late."""
        after_s = self._lane.hedge_after_s
        first = attempts[0]
        if after_s is None or self._began:
            return first, await anext(first.stream)
        readers = {asyncio.ensure_future(anext(first.stream)): first}
        try:
            done, _ = await asyncio.wait(readers, timeout=after_s)
            if not done:
                second = self._hedge(first)
                if second is not None:
                    attempts.append(second)
                    readers[asyncio.ensure_future(anext(second.stream))] = second
            problem: EngineError | None = None
            while readers:
                done, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
                for reader in done:
                    attempt = readers.pop(reader)
                    error = reader.exception()
                    if error is None:
                        return attempt, reader.result()
                    if not isinstance(error, EngineError):
                        raise error
                    problem = attempt.failure = error
                    if readers:
                        self._failed(attempt, error)
            assert problem is not None
            raise problem
        finally:
            for reader in readers:
                reader.cancel()
            if readers:
                await asyncio.gather(*readers, return_exceptions=True)

    def _hedge(self, first: Attempt) -> Attempt | None:
        avoid = self._avoid | {first.place.replica.name}
        found = self._group.try_place(replace(self._asked(self._group), avoid=avoid))
        if not isinstance(found, Place):
            return None
        if found.replica is first.place.replica or not self._budget.take():
            found.give_back()
            return None
        self._watcher.tried_again(self._group.name, "hedge")
        return Attempt(found, self._group, self._request(self._group), self._targets(), self._clock)

    async def _stream(self, attempt: Attempt, output: SequenceOutput) -> SequenceOutput:
        """Everything from the first output on, to the outer stream; returns the last one."""
        outer, stream = self.outer, attempt.stream
        if output.refused_status:
            self._refused(attempt)
            return output
        if output.finish == "error":
            raise RemoteFailure("the engine gave the request up", kind="cut")
        self._answered(attempt)
        if self._keys:
            attempt.group.sent(attempt.place.replica.name, self._keys)
        wait_s = self._first_wait(attempt)
        again = self._began
        self._began = True
        # A continued answer's prompt is longer than what the client sent.
        prompt_tokens = self.submit.prompt_count if output.finish is None or again else output.prompt_tokens
        output = msgspec.structs.replace(output, queue_wait_s=None if again else wait_s, prompt_tokens=prompt_tokens)
        if output.finish is not None:
            self._succeeded(attempt)
            return output
        self._push(output)

        def forward(output: SequenceOutput) -> bool:
            if outer.pressed:
                return False
            attempt.token(output.tokens)
            self._push(output)
            return True

        stream.forward(forward)
        async for output in stream:
            if output.finish in ("error", "abort"):
                raise RemoteFailure("the engine gave the request up", kind="cut")
            if output.finish is not None:
                self._sent_tokens += output.tokens
                self._succeeded(attempt)
                return self._ending(output)
            attempt.token(output.tokens)
            self._push(output)
            if outer.pressed:
                await self._room.wait()
        raise EngineGone("the engine stopped answering")

    def _ending(self, output: SequenceOutput) -> SequenceOutput:
        """The last output of an answer that was continued says the prompt that the client sent."""
        if output.finish is None or not self._avoid:
            return output
        return msgspec.structs.replace(output, prompt_tokens=self.submit.prompt_count)

    def _push(self, output: SequenceOutput) -> None:
        if self._sent is not None:
            if output.delta is not None or self._sent_chars > MOST_CONTINUED_CHARS:
                self._sent = None
            elif output.text:
                self._sent.append(output.text)
                self._sent_chars += len(output.text)
        self._sent_tokens += output.tokens
        self.outer.push(output)

    def _first_wait(self, attempt: Attempt) -> float:
        if self._first_wait_s is None:
            self._first_wait_s = max(0.0, attempt.began_s - self.submit.arrived_s)
        return self._first_wait_s

    def _pressed(self, pressed: bool) -> None:
        if pressed:
            self._room.clear()
        else:
            self._room.set()

    # What came of attempts, for the health of replicas and the lane's breakers.

    def _answered(self, attempt: Attempt) -> None:
        ttft_s = attempt.first_token()
        self._watcher.first_token(attempt.place, self.submit.lane, ttft_s)

    def _succeeded(self, attempt: Attempt) -> None:
        place = attempt.place
        attempt.settled = True
        place.replica.health.succeeded()
        self._watcher.attempt_ended(attempt.group.name, place.replica.name, "ok")
        attempt.group.remember(self._session, place.replica.name, self.submit.prompt_count + self._sent_tokens)

    def _refused(self, attempt: Attempt) -> None:
        """The client's fault, by the engine's word."""
        self._undecided(attempt)
        self._watcher.attempt_ended(attempt.group.name, attempt.place.replica.name, "refused")
        if self._sent_tokens:
            raise EngineError("the engine cannot go on with an answer that another one began")

    def _undecided(self, attempt: Attempt) -> None:
        if attempt.settled:
            return
        attempt.settled = True
        replica = attempt.place.replica
        replica.health.undecided()
        if not attempt.streaming:
            replica.breakers[self.submit.lane].gave_up(probe=attempt.place.probe)

    def _failed(self, attempt: Attempt, error: EngineError) -> None:
        if attempt.settled:
            return
        place, replica = attempt.place, attempt.place.replica
        kind = error.kind if isinstance(error, RemoteFailure) else "gone"
        _logger.warning("request %s on %s/%s: %s", self.submit.request_id, attempt.group.name, replica.name, error)
        self._watcher.attempt_ended(attempt.group.name, replica.name, kind)
        if kind == "busy":
            self._undecided(attempt)
            rest_s = getattr(error, "retry_after_s", None)
            replica.busy(BUSY_REST_S if rest_s is None else min(MAX_BUSY_REST_S, max(BUSY_REST_S, rest_s)))
            return
        attempt.settled = True
        replica.health.failed(self._clock())
        if not attempt.streaming:
            self._watcher.first_token(place, self.submit.lane, None)
