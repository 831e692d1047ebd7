"""When an arrival's first and last token will come. Pure.

Every running sequence gets its decode step before the next prompt chunk, so a prompt of many chunks waits for as many
decode steps of everything that runs. With

- ``w``, ``c``: the arrival's own prompt tokens, and the tokens of a chunk
- ``P``, ``d(b)``: prefill tokens per second, and a decode step of ``b`` sequences (``EngineRates``)
- ``R``, ``O``: sequences that run, and the output tokens that they are still expected to make

computing ``x`` prompt tokens takes ``t(x) = x/P + min(ceil(x/c), O) d(R)``. The arrival's first token comes after ::

    TTFT = s/2 + min(by order, by share)
    by order = max(t(A + w), places + t(w)) / (1 - u)
    by share = max(t((Q + w) g), places + t(w g))

``s`` is the last step (0 when the engine has nothing to do).

*By order*: the engine serves lower priority numbers first. ``A`` are the prompt tokens that wait in more or equally
urgent lanes, less what has been computed of them since the last first token (at most half: what is under way is half
done on average). Ageing makes sequences of less urgent lanes as urgent in time: it takes them what their priority and
their later deadline put them behind (``scheduling.order``). When a lane's oldest has waited ``y`` seconds and that
takes ``z``, the part ``1 - z/y`` of what waits there counts as well, as if it had come evenly. What
comes during the wait and is more urgent overtakes: ``u`` is the share of engine time that strictly more urgent lanes
have been asking for, every token at the rate ``P``, at most ``MOST_UTILISATION``. (A wait under preemptive priorities
is the work ahead over ``1 - u``: M. Harchol-Balter, Performance Modeling and Design of Computer Systems, chapter 32.)

*By share*: a lane that is not asking for more than its weight gives it is not kept waiting by lanes that do. ``Q`` are
the prompt tokens that wait in its own lane and the aged ones, ``g`` the weights of all lanes with work over its own.

Of its own lane, other tenants' work counts up to as much as its own tenant has with it: a tenant's flood stands behind
the others' next requests.

``places`` is the wait for a free place when the sequences ahead and its own are more than fit: of ``n`` sequences
ahead, with ``T`` output tokens, ``e`` must end first, at the decode rate of a full batch: ``T e/n d(B)/B``. It is
computed for the engine's places (without less urgent sequences, which are preempted) and for the lane's cap.

The last token comes after ``m`` more decode steps, ``m`` being the expected output less one. Prompts of more or
equally urgent lanes delay them, those that wait now (``W`` tokens) and those that arrive on the way (a share ``v`` of
engine time), but never by more than one chunk per step. Less urgent prompts have to fit into the slack that is left ::

    finish = TTFT + m d(b) + min(W/P + m d(b) v/(1 - v), m c/P)

What this leaves out, on purpose: bands (a lane of one long sequence at a time), late requests that the engine puts
behind others, prefix reuse. They show in the typical ratio of what happened to what was predicted, which
``admission.accuracy`` keeps per lane. More work ahead never predicts an earlier time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.admission.rates import EngineRates

POINTS_PER_AGEING: Final = 10
"""Priority points that a sequence gains while it waits for ``EngineRates.ageing_s``."""
MOST_UTILISATION: Final = 0.8
"""So that a burst of urgent requests, taken for the usual rate, multiplies a wait by five at most."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sequences without a token: how many, their prompt tokens, and the output tokens expected of them."""

    sequences: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0

    def plus(self, other: Waiting) -> Waiting:
        return Waiting(
            self.sequences + other.sequences,
            self.prefill_tokens + other.prefill_tokens,
            self.output_tokens + other.output_tokens,
        )

    def at_most(self, other: Waiting) -> Waiting:
        return Waiting(
            min(self.sequences, other.sequences),
            min(self.prefill_tokens, other.prefill_tokens),
            min(self.output_tokens, other.output_tokens),
        )


@dataclass(frozen=True, slots=True)
class LaneWork:
    """What one lane has at the door and in the engine. Its first tokens are due ``due_s`` after arrival (0: no target).
    The oldest of ``waiting`` came ``oldest_s`` ago; ``running_output_tokens`` are still expected of ``running``
    sequences; ``*_tokens_per_s`` is what has been arriving lately."""

    priority: int
    weight: float = 1.0
    due_s: float = 0.0
    waiting: Waiting = Waiting()
    oldest_s: float = 0.0
    running: int = 0
    running_output_tokens: int = 0
    arriving_prefill_tokens_per_s: float = 0.0
    arriving_output_tokens_per_s: float = 0.0

    @property
    def sequences(self) -> int:
        return self.waiting.sequences + self.running

    @property
    def output_tokens(self) -> int:
        """Output tokens still to come, of all its sequences."""
        return self.waiting.output_tokens + self.running_output_tokens


@dataclass(frozen=True, slots=True)
class Backlog:
    """All lanes' work, what waits in the arrival's lane by tenant, and for how long no sequence has begun although
    some waited."""

    lanes: Mapping[str, LaneWork]
    tenants: Mapping[str | None, Waiting]
    since_progress_s: float = 0.0

    @property
    def running(self) -> int:
        return sum([work.running for work in self.lanes.values()])


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its sequences' prompt lengths, and the output length expected of each. ``weight`` is its lane's,
    ``due_s`` when its first token is due after its arrival (0: no target), ``lane_places`` how many sequences of the
    lane may be in the engine (None: no cap)."""

    lane: str
    tenant: str | None
    priority: int
    weight: float
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    lane_places: int | None = None
    due_s: float = 0.0

    @property
    def as_waiting(self) -> Waiting:
        sequences = len(self.prompt_tokens)
        return Waiting(sequences, sum(self.prompt_tokens), self.output_tokens * sequences)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now to the first token, and from the first to the last; ``decode_only_s`` of the latter are decode
    steps, the rest prompts of others in between."""

    ttft_s: float
    decode_s: float
    decode_only_s: float = 0.0

    @property
    def finish_s(self) -> float:
        """Seconds from now to the last token."""
        return self.ttft_s + self.decode_s

    def scaled(self, ttft_ratio: float, decode_ratio: float) -> Prediction:
        """Corrected by the typical ratios of what happened to what was predicted."""
        return Prediction(self.ttft_s * ttft_ratio, self.decode_s * decode_ratio, self.decode_only_s)


def predict(backlog: Backlog, arrival: Arrival, rates: EngineRates) -> Prediction:
    """When the arrival's tokens will come if it is accepted now, by the formula above."""
    return Prediction(
        _ttft_s(backlog, arrival, rates), _decode_s(backlog, arrival, rates), _decode_only_s(backlog, arrival, rates)
    )


def predict_idle(arrival: Arrival, rates: EngineRates) -> Prediction:
    """When they would come if the engine had nothing else to do: what no wait is to blame for."""
    return predict(Backlog({}, {}), arrival, rates)


def _ttft_s(backlog: Backlog, arrival: Arrival, rates: EngineRates) -> float:
    own_tokens = arrival.prompt_tokens[0]
    queue = _queue_before(backlog, arrival)
    urgent = [
        work for name, work in backlog.lanes.items() if work.priority <= arrival.priority and name != arrival.lane
    ]
    places_s = _places_s(backlog, arrival, queue, urgent, rates)

    aged_tokens = sum([_aged(work, arrival, rates) for work in backlog.lanes.values()])
    waiting_tokens = queue.prefill_tokens + sum([work.waiting.prefill_tokens for work in urgent]) + aged_tokens
    left_tokens = waiting_tokens - _computed(waiting_tokens, backlog, rates)
    overtaken = 1 / (1 - _utilisation([work for work in urgent if work.priority < arrival.priority], rates))
    by_order_s = overtaken * max(
        _prefill_s(left_tokens + own_tokens, backlog, rates), places_s + _prefill_s(own_tokens, backlog, rates)
    )
    others = [work.weight for name, work in backlog.lanes.items() if name != arrival.lane and work.sequences]
    stretch = (sum(others) + arrival.weight) / arrival.weight
    by_share_s = max(
        _prefill_s((queue.prefill_tokens + aged_tokens + own_tokens) * stretch, backlog, rates),
        places_s + _prefill_s(own_tokens * stretch, backlog, rates),
    )
    busy = any([work.sequences for work in backlog.lanes.values()])
    return (rates.step_s / 2 if busy else 0.0) + min(by_order_s, by_share_s)


def _decode_s(backlog: Backlog, arrival: Arrival, rates: EngineRates) -> float:
    """From the first token of the first sequence to the last token of all."""
    steps = max(0, arrival.output_tokens - 1)
    lanes = backlog.lanes.values()
    decode_s = _decode_only_s(backlog, arrival, rates)
    urgent = [work for work in lanes if work.priority <= arrival.priority]
    arriving_per_s = sum([work.arriving_prefill_tokens_per_s for work in urgent])
    arriving = min(MOST_UTILISATION, arriving_per_s / rates.prefill_tokens_per_s)
    prompts_s = sum([work.waiting.prefill_tokens for work in urgent]) / rates.prefill_tokens_per_s
    delayed_s = min(
        prompts_s + decode_s * arriving / (1 - arriving), steps * rates.chunk_tokens / rates.prefill_tokens_per_s
    )
    other_prompts = sum(arrival.prompt_tokens[1:])
    return decode_s + delayed_s + other_prompts / rates.prefill_tokens_per_s


def _decode_only_s(backlog: Backlog, arrival: Arrival, rates: EngineRates) -> float:
    """The decode steps between the first and the last token."""
    steps = max(0, arrival.output_tokens - 1)
    lanes = backlog.lanes.values()
    beside = sum([work.sequences if work.priority <= arrival.priority else work.running for work in lanes])
    return steps * rates.decode_s(min(rates.places, beside + len(arrival.prompt_tokens)))


def _prefill_s(tokens: float, backlog: Backlog, rates: EngineRates) -> float:
    """Computing prompt tokens beside what runs."""
    running_tokens = sum([work.running_output_tokens for work in backlog.lanes.values()])
    decodes = min(math.ceil(tokens / rates.chunk_tokens), running_tokens)
    return rates.prefill_s(tokens) + decodes * rates.decode_s(backlog.running)


def _queue_before(backlog: Backlog, arrival: Arrival) -> Waiting:
    """What its own lane's waiting sequences amount to for the arrival."""
    own = backlog.tenants.get(arrival.tenant, Waiting())
    fair, queue = own.plus(arrival.as_waiting), own
    for tenant, waiting in backlog.tenants.items():
        if tenant != arrival.tenant:
            queue = queue.plus(waiting.at_most(fair))
    return queue


def _aged(work: LaneWork, arrival: Arrival, rates: EngineRates) -> float:
    """Prompt tokens of a less urgent lane that have waited so long that they come before the arrival."""
    points = work.priority - arrival.priority
    ageing_s = points * rates.ageing_s / POINTS_PER_AGEING + max(0.0, work.due_s - arrival.due_s)
    if points <= 0 or work.oldest_s <= ageing_s:
        return 0.0
    return work.waiting.prefill_tokens * (1 - ageing_s / work.oldest_s)


def _computed(waiting_tokens: float, backlog: Backlog, rates: EngineRates) -> float:
    """Of the prompt tokens that wait, those that have been computed since the last sequence began."""
    chunk_s = rates.chunk_tokens / rates.prefill_tokens_per_s + rates.decode_s(backlog.running)
    return min(backlog.since_progress_s * rates.chunk_tokens / chunk_s, waiting_tokens / 2)


def _utilisation(lanes: list[LaneWork], rates: EngineRates) -> float:
    tokens_per_s = sum([work.arriving_prefill_tokens_per_s + work.arriving_output_tokens_per_s for work in lanes])
    return min(MOST_UTILISATION, tokens_per_s / rates.prefill_tokens_per_s)


def _places_s(backlog: Backlog, arrival: Arrival, queue: Waiting, urgent: list[LaneWork], rates: EngineRates) -> float:
    """Until there is a place for the arrival: in the engine, and in its lane."""
    own = backlog.lanes.get(arrival.lane, LaneWork(arrival.priority))
    wanted = len(arrival.prompt_tokens)
    sequences = queue.sequences + own.running + sum([work.sequences for work in urgent])
    output_tokens = queue.output_tokens + own.running_output_tokens + sum([work.output_tokens for work in urgent])
    wait_s = _place_s(sequences, output_tokens, wanted, rates.places, rates.decode_s(rates.places))
    if arrival.lane_places is None:
        return wait_s
    # At the lane's door tenants are not told apart: first come, first served.
    step_s = rates.decode_s(min(rates.places, max(backlog.running, arrival.lane_places)))
    return max(wait_s, _place_s(own.sequences, own.output_tokens, wanted, arrival.lane_places, step_s))


def _place_s(sequences: int, output_tokens: int, wanted: int, places: int, step_s: float) -> float:
    """Until ``wanted`` of ``places`` are free, all of them decoding once in ``step_s``."""
    excess = min(sequences, sequences + wanted - places)
    return output_tokens * excess / sequences * step_s / places if excess > 0 else 0.0
