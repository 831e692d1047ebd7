"""The lanes that headrace comes with. Targets are the operator's to set: no policy can meet 100 ms on
hardware whose single step takes longer, and ``serve`` says so at start."""

from __future__ import annotations

from headrace.control.breaker import BreakerConfig
from headrace.lanes.lane import SLO, Lane, LaneMatch


def default_lanes() -> dict[str, Lane]:
    """A fresh dict of the six default lanes, most urgent first."""
    return {
        "realtime": Lane(
            description="decisions that somebody or something waits for",
            slo=SLO(p99_e2e_s=0.2),
            priority=0,
            match=LaneMatch(path_prefixes=("/realtime",)),
            default_max_tokens=64,
            typical_prompt_tokens=128,
            typical_output_tokens=4,
            weight=8.0,
        ),
        "interactive": Lane(
            description="chat with a person",
            slo=SLO(p99_ttft_s=0.1, p99_e2e_s=0.5),
            priority=10,
            match=LaneMatch(path_prefixes=("/interactive",)),
            typical_prompt_tokens=64,
            typical_output_tokens=32,
            weight=8.0,
        ),
        "retrieval": Lane(
            description="answers over retrieved passages",
            slo=SLO(p99_e2e_s=0.3),
            priority=20,
            match=LaneMatch(path_prefixes=("/retrieval",)),
            typical_prompt_tokens=512,
            typical_output_tokens=32,
            weight=4.0,
        ),
        "captions": Lane(
            description="short descriptions and titles",
            slo=SLO(p99_e2e_s=1.0),
            priority=30,
            match=LaneMatch(path_prefixes=("/captions",)),
            typical_prompt_tokens=256,
            typical_output_tokens=48,
            weight=4.0,
        ),
        "long": Lane(
            description="documents: prompts over 8k tokens",
            slo=SLO(),
            priority=50,
            match=LaneMatch(path_prefixes=("/long",), prompt_tokens_over=8192),
            breaker=BreakerConfig(p99_ttft_s=30.0),
            typical_prompt_tokens=16384,
            typical_output_tokens=256,
            weight=2.0,
        ),
        "batch": Lane(
            description="offline work that nobody waits for",
            slo=SLO(),
            priority=100,
            match=LaneMatch(path_prefixes=("/batch",)),
            breaker=BreakerConfig(p99_ttft_s=30.0),
            typical_prompt_tokens=1024,
            typical_output_tokens=256,
        ),
    }
