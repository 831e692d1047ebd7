"""What a virtual engine is told of the machine that it stands for, and who hears of what it does."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from headrace.scheduling.bands import Band
from headrace.simulate.passes import PassLayout
from headrace.simulate.requests import RequestRecord


class EngineShape(Struct, frozen=True):
    """How an engine computes. ``layout``: how a plan becomes forward passes (``passes``). ``kv_travels``: a sequence
    that is preempted or promoted keeps its KV, copied out and in at ``copy_s_per_token`` each (in the embedded engine
    1,900 tokens are read in 5 ms and written in 6); otherwise it is computed again. ``cuts``: a prefill
    pass ends early for an arrival whose deadline that saves (not ``fused``). ``overhead_s`` passes with every
    step (planning, sampling, messages). ``noise`` is the standard deviation of the logarithm of a step's time.
    ``kv_tokens`` is what all sequences may hold together (None: every stream has memory of its own);
    ``watermarks``: the engine parks sequences when that gets scarce (a policy that preempts by itself does it instead).
    ``joins_decodes``: steps that no plan could change are computed together (``decode_runs``; ``fused``, one band, no
    noise): ``records`` are then as of the last step that anything but time ended (``settle`` brings them up to date).
    """

    bands: tuple[Band, ...]
    layout: PassLayout = "apart"
    kv_travels: bool = True
    copy_s_per_token: float = 3e-6
    cuts: bool = False
    overhead_s: float = 0.0
    noise: float = 0.0
    kv_tokens: int | None = None
    watermarks: bool = True
    joins_decodes: bool = False


class Listener(Protocol):
    """Hears of requests as their client would: of first tokens and of ends, at ``now_s``, when the step is over."""

    def first_token(self, record: RequestRecord, now_s: float) -> None: ...

    def ended(self, record: RequestRecord, now_s: float) -> None: ...
