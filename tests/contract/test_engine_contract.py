"""What every engine promises (``engines.protocol``), checked the same way for each."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import Any

import pytest

from headrace.engines.fleet.fleet import Fleet
from headrace.engines.protocol import Engine
from headrace.engines.remote.engine import RemoteEngine
from headrace.errors import EngineError, EngineNotReady
from headrace.messages.engine import Knobs, SamplingParams, Submit
from headrace.scheduling.knobs import SchedulingKnobs
from tests.contract.conftest import CONTEXT_TOKENS, SEQUENCES, Bench


def closing(stream: Any) -> Any:
    """``aclosing`` for a stream typed as the protocol's iterator."""
    return aclosing(stream)


async def until_free(bench: Bench) -> None:
    """Wait until nothing is live; the test's own time limit is the bound."""
    while (await bench.engine.snapshot()).sequences:
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
async def test_a_stream_ends_with_one_finish_and_counts_its_tokens(bench: Bench, max_tokens: int) -> None:
    """Outputs carry the request's id, only the last one ``finish``, and together ``max_tokens`` tokens."""
    request = bench.request(max_tokens=max_tokens)
    outputs = await bench.outputs(request)
    assert {output.request_id for output in outputs} == {request.request_id}
    assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish == "length"
    assert sum(len(output.token_ids) for output in outputs) == max_tokens
    assert outputs[0].prompt_tokens == 6
    waits = [output.queue_wait_s for output in outputs if output.queue_wait_s is not None]
    assert len(waits) == 1 and outputs[0].queue_wait_s == waits[0] >= 0.0


async def test_max_tokens_0_yields_only_the_end(bench: Bench) -> None:
    """Nothing is generated."""
    (output,) = await bench.outputs(bench.request(max_tokens=0))
    assert output.finish == "length" and output.token_ids == [] and output.text == ""


async def test_the_same_request_gives_the_same_text(bench: Bench) -> None:
    """Greedy is greedy, whichever stream and step it gets."""
    first = await bench.outputs(bench.request(max_tokens=20))
    second = await bench.outputs(bench.request(max_tokens=20))
    assert "".join(o.text for o in first) == "".join(o.text for o in second) != ""


async def test_fifty_at_once_each_get_their_own_answer(bench: Bench) -> None:
    """Six times more than run at once, of different lengths: each gets exactly its tokens, one end, and the
    engine is empty afterwards."""
    requests = [bench.request(max_tokens=1 + n % 13, prompt_tokens=1 + n) for n in range(50)]
    answers = await asyncio.gather(*map(bench.outputs, requests))
    for request, outputs in zip(requests, answers, strict=True):
        assert sum(len(output.token_ids) for output in outputs) == request.max_tokens
        assert [output.request_id for output in outputs] == [request.request_id] * len(outputs)
        assert outputs[-1].finish == "length" and outputs[0].prompt_tokens == len(request.prompt_tokens)
    snapshot = await bench.engine.snapshot()
    assert snapshot.sequences == [] and (snapshot.load.running, snapshot.load.waiting) == (0, 0)


async def test_an_abort_ends_the_stream_with_abort(bench: Bench) -> None:
    """A running sequence and a waiting one; the iterator itself ends normally."""
    running = [await bench.begin(bench.request(max_tokens=None)) for _ in range(SEQUENCES)]
    waiting = bench.request(max_tokens=None)
    waiting_outputs = asyncio.create_task(bench.outputs(waiting))
    while waiting.request_id not in (await bench.engine.snapshot()).sequences:
        await asyncio.sleep(0)
    bench.engine.abort(waiting.request_id)
    (end,) = await waiting_outputs
    assert end.finish == "abort" and end.token_ids == []
    for number, stream in enumerate(running):
        bench.engine.abort(f"r{number}")
        assert [output.finish async for output in stream][-1] == "abort"
    await until_free(bench)


async def test_aborting_nobody_is_nothing(bench: Bench) -> None:
    """Unknown ids and ids that have ended."""
    request = bench.request()
    await bench.outputs(request)
    bench.engine.abort(request.request_id)
    bench.engine.abort("never seen")
    assert (await bench.outputs(bench.request()))[-1].finish == "length"


async def test_closing_the_iterator_early_frees_the_sequence(bench: Bench) -> None:
    """As when a client disconnects: no one has to say abort."""
    async with closing(await bench.begin(bench.request(max_tokens=None))):
        assert (await bench.engine.snapshot()).load.running == 1
    await until_free(bench)
    assert (await bench.engine.snapshot()).load.running == 0


async def test_a_cancelled_reader_frees_the_sequence(bench: Bench) -> None:
    """A task that is cancelled while it waits for the next output."""
    reader = asyncio.create_task(bench.outputs(bench.request(max_tokens=None)))
    while not (await bench.engine.snapshot()).sequences:
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await until_free(bench)


async def test_a_live_id_is_refused_and_its_holder_goes_on(bench: Bench) -> None:
    """The second stream fails at once; the first is not touched and frees the id when it ends."""
    stream = await bench.begin(bench.request(max_tokens=None, request_id="same"))
    with pytest.raises(EngineError, match="already live"):
        await bench.outputs(bench.request(request_id="same"))
    assert (await anext(stream)).finish is None
    bench.engine.abort("same")
    assert [output.finish async for output in stream][-1] == "abort"
    again = await bench.outputs(bench.request(max_tokens=3, request_id="same"))
    assert sum(len(output.token_ids) for output in again) == 3


async def test_an_id_can_be_used_again_once_its_closed_stream_has_ended(bench: Bench) -> None:
    """Outputs of the closed stream never reach the new one: until the engine has ended the old sequence the
    id is refused, after that the new one gets its whole answer."""
    async with closing(await bench.begin(bench.request(max_tokens=None, request_id="same"))):
        pass
    for _ in range(10_000):
        try:
            outputs = await bench.outputs(bench.request(max_tokens=7, request_id="same"))
        except EngineError:
            await asyncio.sleep(0)
            continue
        assert sum(len(output.token_ids) for output in outputs) == 7 and outputs[-1].finish == "length"
        return
    pytest.fail("the id is never given back")


async def test_a_late_reader_loses_nothing(bench: Bench) -> None:
    """Outputs wait for whoever reads them, and an unread end holds nothing in the engine."""
    stream = await bench.begin(bench.request(max_tokens=30, request_id="late"))
    await until_free(bench)
    rest = [output async for output in stream]
    assert 1 + sum(len(output.token_ids) for output in rest) == 30 and rest[-1].finish == "length"


async def test_a_prompt_that_cannot_be_served_is_an_end_not_a_crash(bench: Bench) -> None:
    """The engine answers with ``error`` or serves it, and serves the next one."""
    outputs = await bench.outputs(bench.request(prompt_tokens=CONTEXT_TOKENS + 1))
    assert outputs[-1].finish in ("error", "length")
    assert (await bench.outputs(bench.request()))[-1].finish == "length"


async def test_before_start_and_after_close_it_is_not_ready(new_engine: Engine) -> None:
    """``submit`` and ``snapshot`` say so, before any output; ``close`` may come at any time, and twice."""
    bench = Bench(new_engine, itertools.count())
    for _ in range(2):
        assert new_engine.ready is None
        with pytest.raises(EngineNotReady):
            await bench.outputs(bench.request())
        with pytest.raises(EngineNotReady):
            await new_engine.snapshot()
        new_engine.abort("nobody")
        await new_engine.close()
    await new_engine.start()
    assert (await bench.outputs(bench.request()))[-1].finish == "length"
    for _ in range(2):
        await new_engine.close()
        assert new_engine.ready is None
        with pytest.raises(EngineNotReady):
            await bench.outputs(bench.request())
        with pytest.raises(EngineNotReady):
            await new_engine.snapshot()


async def test_close_ends_running_and_waiting_streams_with_abort(bench: Bench) -> None:
    """No reader is left hanging, none gets an exception."""
    streams = [await bench.begin(bench.request(max_tokens=None)) for _ in range(SEQUENCES)]
    waiting = asyncio.create_task(bench.outputs(bench.request(max_tokens=None)))
    while len((await bench.engine.snapshot()).sequences) <= SEQUENCES:
        await asyncio.sleep(0)
    await bench.engine.close()
    for stream in streams:
        assert [output.finish async for output in stream][-1] == "abort"
    assert (await waiting)[-1].finish == "abort"


async def test_a_snapshot_says_what_is_there(bench: Bench) -> None:
    """Live ids, load and bands, while one runs and when nobody does."""
    assert (await bench.engine.snapshot()).sequences == []
    request = bench.request(max_tokens=None)
    async with closing(await bench.begin(request)):
        snapshot = await bench.engine.snapshot()
        assert snapshot.sequences == [request.request_id] and snapshot.integrity is None
        assert snapshot.load.running == 1 and 0 < snapshot.load.kv_used_tokens <= snapshot.load.kv_total_tokens
        assert bench.engine.ready is not None
        assert [b.max_context_tokens for b in snapshot.bands] == [
            b.max_context_tokens for b in bench.engine.ready.bands
        ]
        assert bench.engine.load is not None and bench.engine.load.running == 1


async def test_ready_describes_the_model(bench: Bench) -> None:
    """What the API and the gateway need to know is filled in and consistent."""
    ready = bench.engine.ready
    assert ready is not None and ready.threads >= 1
    # A remote engine does not say how many tokens its vocabulary has.
    assert (ready.model.vocab_size > 0 or isinstance(bench.engine, RemoteEngine | Fleet)) and ready.model.name
    assert ready.model.max_context_tokens == ready.bands[-1].max_context_tokens == CONTEXT_TOKENS
    assert all(band.max_sequences >= 1 for band in ready.bands)


async def test_knobs_turn_while_sequences_run(bench: Bench) -> None:
    """Any allowed value, mid-stream: every answer is whole."""
    streams = [asyncio.create_task(bench.outputs(bench.request(max_tokens=40))) for _ in range(4)]
    for step_tokens, chunk in ((1, 1), (64, 16), (3, 200), (10_000, 10_000), (128, 64)):
        bench.engine.set_knobs(Knobs(scheduling=SchedulingKnobs(step_tokens, chunk)))
        await bench.outputs(bench.request(max_tokens=2, prompt_tokens=20))
    for outputs in await asyncio.gather(*streams):
        assert outputs[-1].finish == "length"
        assert sum(len(output.token_ids) for output in outputs) == 40


async def test_stop_strings_and_log_probabilities_are_kept_by_every_engine(bench: Bench) -> None:
    """Two parameters whose effect the gateway relies on."""
    plain = bench.request(max_tokens=30)
    text = "".join(output.text for output in await bench.outputs(plain))
    stop = next(c for c in text if c.isascii() and c.isalpha())
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop=(stop,), logprobs=2)
    request = Submit("stopping", plain.prompt_tokens, sampling, "interactive", 0, 30)
    outputs = await bench.outputs(request)
    assert outputs[-1].finish == "stop" and outputs[-1].stop_reason == stop
    assert "".join(output.text for output in outputs) == text.split(stop)[0]
    entries = [entry for output in outputs for entry in output.logprobs or []]
    assert [entry.token_id for entry in entries] == [t for output in outputs for t in output.token_ids]
    assert all(len(entry.top) == 2 and entry.top[0][2] >= entry.top[1][2] for entry in entries)
