"""Which policy a name stands for, of headrace or of another engine, and what its engine is told of requests."""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from headrace.scheduling.knobs import SchedulingKnobs, Strategy
from headrace.scheduling.step import StepPolicy
from headrace.simulate.baselines.llama_server import LlamaServer
from headrace.simulate.baselines.sglang import Sglang
from headrace.simulate.baselines.vllm import Vllm

Baseline = Literal["vllm", "sglang", "llama-server"]
PolicyName = Literal["hybrid", "continuous", "static", "dynamic", "auto", "vllm", "sglang", "llama-server"]
BASELINES: Final[tuple[Baseline, ...]] = get_args(Baseline)

_STEP_TOKENS: Final[dict[Baseline, int]] = {"vllm": 2048, "sglang": 8192, "llama-server": 2048}
"""Tokens of a step by default; vLLM's are those of an A100 or a smaller GPU."""


def is_baseline(name: PolicyName) -> bool:
    """Whether the policy is another engine's: it knows no lanes, priorities and deadlines."""
    return name in BASELINES


def baseline_policy(name: PolicyName) -> StepPolicy | None:
    """The policy of another engine; None for headrace's own strategies, which the knobs name."""
    match name:
        case "vllm":
            return Vllm()
        case "sglang":
            return Sglang()
        case "llama-server":
            return LlamaServer()
        case _:
            return None


def knobs_for(name: PolicyName, knobs: SchedulingKnobs, *, told: bool) -> SchedulingKnobs:
    """The live values of an engine that runs ``name``. ``told``: its tokens of a step were given and stay; else a
    baseline has its own default. Caps and weights of lanes are headrace's alone."""
    for baseline in BASELINES:
        if name == baseline:
            tokens = knobs.step_tokens if told else _STEP_TOKENS[baseline]
            return msgspec.structs.replace(
                knobs, step_tokens=tokens, max_prefill_tokens=tokens, lane_caps={}, lane_weights={}
            )
    return msgspec.structs.replace(knobs, strategy=msgspec.convert(name, Strategy))
