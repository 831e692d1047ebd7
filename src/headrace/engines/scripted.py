"""An engine without a model: outputs come from a script, steps from an injected pace.

It keeps the ``Engine`` protocol to the letter (slots, queue, abort, death and revival), so the gateway and
later the simulations can be driven through every situation deterministically.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.engines.output_stream import OutputStream
from headrace.engines.protocol import Engine
from headrace.errors import ContextTooLong, EngineError, EngineGone, EngineNotReady, RequestError
from headrace.kv.watermarks import KvLevel
from headrace.messages.engine import (
    BandPlan,
    EngineLoad,
    EngineSnapshot,
    FinishReason,
    Knobs,
    ModelInfo,
    Ready,
    SelfMeasurement,
    SequenceOutput,
    Submit,
    TokenLogprob,
)

EOS: Final = 256
VOCAB_SIZE: Final = 257
_EOS_TEXT: Final = "<|end|>"

Script = Callable[[Submit], Sequence[int]]
"""The tokens that a request is answered with, before ``max_tokens`` and stop strings; EOS may be among them."""

Pace = Callable[[EngineLoad], Awaitable[None]]
"""Awaited before every step: returns when the step is over. The load is the one before the step."""


def text_script(text: str) -> Script:
    """A script that answers everything with ``text``, one token per byte, and EOS."""
    tokens = (*text.encode(), EOS)
    return lambda _: tokens


async def immediate(_: EngineLoad) -> None:
    """The pace of an engine that needs no time; other tasks still get their turn."""
    await asyncio.sleep(0)


class ScriptedTokenizer:
    """One token per byte, and EOS. Its chat template is one line per message."""

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool, limit_tokens: int | None = None
    ) -> list[int]:
        if limit_tokens is not None and len(text) > limit_tokens * len(_EOS_TEXT):
            raise ContextTooLong(f"the prompt has more than the {limit_tokens} tokens that the context holds")
        if not parse_special or _EOS_TEXT not in text:
            return list(text.encode())
        tokens: list[int] = []
        for index, piece in enumerate(text.split(_EOS_TEXT)):
            tokens += [EOS] if index else []
            tokens += piece.encode()
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        kept = [token for token in token_ids if not (skip_special and token == EOS)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < VOCAB_SIZE:
            raise RequestError(f"token id {token_id} is outside 0..{VOCAB_SIZE - 1}", param="tokens")
        return _EOS_TEXT.encode() if token_id == EOS else bytes([token_id])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        lines = [f"tools: {len(tools)}"] if tools else []
        lines += [f"{message['role']}: {message['content']}" for message in messages]
        text = "\n".join(lines)
        return text if continue_final_message else text + ("\nassistant: " if add_generation_prompt else "\n")


class _Sequence:
    """One live sequence: its tokens to come, its text held back, and where its outputs go."""

    def __init__(self, request: Submit, tokens: Sequence[int], outputs: OutputStream) -> None:
        self.request = request
        self.outputs = outputs
        self.aborted = False
        self.running = False
        self.generated = 0
        self.queue_wait_s: float | None = None
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def step(self) -> SequenceOutput:
        """Generate one token, or end."""
        sampling = self.request.sampling
        if self.aborted:
            return self._output("", [], "abort")
        if self.request.max_tokens == 0:
            return self._output("", [], "length")
        token = self._next_token()
        self.generated += 1
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return self._output(self._release(), [token], "stop", token if token != EOS else None)
        special = token == EOS
        shown = (b"" if sampling.skip_special_tokens else _EOS_TEXT.encode()) if special else bytes([token])
        text = self._held + self._decoder.decode(shown)
        for stop in sampling.stop:
            at = text.find(stop)
            if at >= 0:
                kept = text[: at + len(stop)] if sampling.include_stop_text else text[:at]
                return self._output(kept, [token], "stop", stop)
        held = _held_back(text, sampling.stop)
        self._held = text[len(text) - held :]
        text = text[: len(text) - held]
        if self.request.max_tokens is not None and self.generated >= self.request.max_tokens:
            return self._output(text + self._release(), [token], "length")
        return self._output(text, [token], None)

    def _next_token(self) -> int:
        script = self._tokens
        if self.generated < len(script):
            return script[self.generated]
        return script[self.generated % len(script)] if self.request.sampling.ignore_eos and script else EOS

    def _release(self) -> str:
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return text

    def _output(
        self, text: str, tokens: list[int], finish: FinishReason | None, stop_reason: str | int | None = None
    ) -> SequenceOutput:
        sampling = self.request.sampling
        first = self.generated <= 1
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt = self.request.prompt_tokens
            prompt_logprobs = [_logprob(token, sampling.prompt_logprobs) for token in prompt]
            prompt_logprobs[0] = TokenLogprob(prompt[0], _bytes(prompt[0]), None, [])
        return SequenceOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=tokens,
            logprobs=None if sampling.logprobs is None else [_logprob(t, sampling.logprobs) for t in tokens],
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_reason=stop_reason,
            prompt_tokens=len(self.request.prompt_tokens),
            queue_wait_s=self.queue_wait_s if first else None,
        )


@dataclass(frozen=True, slots=True)
class LearnedRates:
    """What an engine says in its load reports of how fast it is (0: not known), whatever its pace, and of its KV
    memory, whatever it holds."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    batch_cap: int = 0
    kv_level: KvLevel = "normal"
    kv_drain_s: float = 0.0


class ScriptedEngine(Engine):
    """Generates scripted tokens for at most ``max_sequences`` sequences at once, in order of arrival. What it says of
    its speed, measured at start (``measurement``) and ``learned``, is scripted too."""

    def __init__(
        self,
        script: Script,
        *,
        clock: Callable[[], float],
        pace: Pace = immediate,
        max_sequences: int = 32,
        max_context_tokens: int = 4096,
        measurement: SelfMeasurement | None = None,
        learned: LearnedRates | None = None,
    ) -> None:
        self._script = script
        self._clock = clock
        self._pace = pace
        self._max_sequences = max_sequences
        self._max_context_tokens = max_context_tokens
        self._measurement = measurement
        self._learned = learned or LearnedRates()
        self._ready: Ready | None = None
        self._load: EngineLoad | None = None
        self._live: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.submitted: list[Submit] = []
        """Every request that came, for whoever wants to see what the gateway asked for."""
        self.knobs_set: list[Knobs] = []
        """Every change of knobs that came; none has an effect here."""

    @property
    def ready(self) -> Ready | None:
        return self._ready

    @property
    def load(self) -> EngineLoad | None:
        return self._load

    @property
    def live_requests(self) -> list[str]:
        return list(self._live)

    async def start(self) -> Ready:
        self._ready = self._describe()
        self._task = asyncio.create_task(self._run())
        return self._ready

    def submit(self, request: Submit) -> OutputStream:
        def begin(outputs: OutputStream) -> None:
            if self._ready is None:
                raise EngineNotReady("the scripted engine is not ready")
            if request.request_id in self._live:
                raise EngineError(f"request id {request.request_id} is already live")
            self.submitted.append(request)
            sequence = _Sequence(request, self._script(request), outputs)
            self._live[request.request_id] = sequence
            self._waiting.append(sequence)
            self._work.set()

        def abort(outputs: OutputStream) -> None:
            sequence = self._live.get(request.request_id)
            if sequence is not None and sequence.outputs is outputs:
                self.abort(request.request_id)

        return OutputStream(begin, abort)

    def abort(self, request_id: str) -> None:
        sequence = self._live.get(request_id)
        if sequence is not None:
            sequence.aborted = True
            self._work.set()

    async def snapshot(self) -> EngineSnapshot:
        if self._ready is None:
            raise EngineNotReady("the scripted engine is not ready")
        load = self._load or self._measure(0.0)
        return EngineSnapshot(0, load, self._ready.bands, list(self._live), None)

    def set_knobs(self, knobs: Knobs) -> None:
        self.knobs_set.append(knobs)

    async def close(self) -> None:
        for sequence in self._live.values():
            sequence.aborted = True
        self._step()
        self._ready = None
        await self._stop()

    def kill(self, reason: str = "the engine process died") -> None:
        """Die on the spot, as a process does: running sequences raise EngineGone."""
        self._ready = None
        for sequence in self._live.values():
            sequence.outputs.push(EngineGone(reason))
        self._live.clear()
        self._waiting.clear()

    def revive(self) -> None:
        """Be ready again after ``kill``."""
        self._ready = self._describe()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            begun_s = self._clock()
            await self._pace(self._load or self._measure(0.0))
            self._step()
            self._load = self._measure(self._clock() - begun_s)
            if not self._live:
                self._work.clear()

    def _step(self) -> None:
        running = sum(sequence.running for sequence in self._live.values())
        while self._waiting and running < self._max_sequences:
            sequence = self._waiting.popleft()
            sequence.running = True
            sequence.queue_wait_s = max(0.0, self._clock() - sequence.request.arrived_s)
            running += 1
        for request_id, sequence in list(self._live.items()):
            if not sequence.running and not sequence.aborted:
                continue
            output = sequence.step()
            sequence.outputs.push(output)
            if output.finish is not None:
                del self._live[request_id]
                if not sequence.running:
                    self._waiting.remove(sequence)

    def _measure(self, step_s: float) -> EngineLoad:
        running = [sequence for sequence in self._live.values() if sequence.running]
        used = sum(len(sequence.request.prompt_tokens) + sequence.generated for sequence in running)
        total = self._max_sequences * self._max_context_tokens
        return EngineLoad(
            running=len(running),
            waiting=len(self._waiting),
            kv_used_tokens=used,
            kv_total_tokens=total,
            kv_used_bytes=used,
            kv_total_bytes=total,
            waiting_prefill_tokens=sum(len(sequence.request.prompt_tokens) for sequence in self._waiting),
            step_s=step_s,
            decode_tokens=len(running),
            prefill_tokens=0,
            threads=1,
            prefill_tokens_per_s=self._learned.prefill_tokens_per_s,
            decode_step_s=self._learned.decode_step_s,
            batch_cap=self._learned.batch_cap,
            kv_level=self._learned.kv_level,
            kv_drain_s=self._learned.kv_drain_s,
        )

    def _describe(self) -> Ready:
        context = self._max_context_tokens
        model = ModelInfo("scripted", "", "scripted", 0, 0, context, context, VOCAB_SIZE, 1)
        band = BandPlan(context, self._max_sequences, self._max_sequences * context, created=True)
        return Ready(model, [band], band.kv_bytes, 1, self._measurement)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _bytes(token: int) -> bytes:
    return _EOS_TEXT.encode() if token == EOS else bytes([token])


def _logprob(token: int, count: int) -> TokenLogprob:
    """The chosen token is the most likely, the next ids follow at a distance of one."""
    nearby = [(token + offset) % VOCAB_SIZE for offset in range(count)]
    top = [(other, _bytes(other), -0.5 - rank) for rank, other in enumerate(nearby)]
    return TokenLogprob(token, _bytes(token), -0.5, top)
