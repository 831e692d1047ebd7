"""Small batches with one thread may be computed one sequence at a time."""

from __future__ import annotations

from headrace.scheduling.bands import Band
from tests.engines.harness import Model, engine_core, request, run


def test_computed_one_by_one_or_together_the_tokens_are_the_same(tiny: Model) -> None:
    """``one_by_one_limit`` changes how a step is cut into calls, not what comes out."""
    requests = [request(f"r{n}", tiny.tokens("stone " * (n + 1)), max_tokens=10) for n in range(4)]
    with engine_core(tiny, Band(256, 4)) as core:
        together = run(core, requests)
    with engine_core(tiny, Band(256, 4)) as core:
        core.one_by_one_limit = 8
        apart = run(core, {n: [one] for n, one in enumerate(requests)})
    assert {name: result.tokens for name, result in apart.items()} == {
        name: result.tokens for name, result in together.items()
    }
