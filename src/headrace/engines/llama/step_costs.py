"""What each step was made of and how long it took, for the cost model."""

from __future__ import annotations

from headrace.scheduling.cost import Call, CostModel

LEARN_INTERVAL_S = 0.03
"""Learning from a step takes about 0.1 ms: of short steps only some are learned from."""


class StepCosts:
    """Collects a step's calls; at its end the model learns from it. Times are seconds of the caller's clock."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._calls: list[Call] = []
        self._learned_s = 0.0

    def add(self, rows: int, context_tokens: int, pairs: int) -> None:
        """A forward pass of this step (see ``Call``)."""
        self._calls.append(Call(rows, context_tokens, pairs))

    def end(self, started_s: float, ended_s: float) -> None:
        """The step is over."""
        if self._calls and ended_s - self._learned_s >= LEARN_INTERVAL_S:
            self._learned_s = ended_s
            self.model.learn(self._calls, ended_s - started_s)
        self._calls.clear()
