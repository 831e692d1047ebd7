"""What each forward pass was made of and how long it took, for the cost model."""

from __future__ import annotations

from headrace.scheduling.cost import Call, CostModel, CostPrior

LEARN_INTERVAL_S = 0.03
"""Learning takes about 0.1 ms: of short steps only some are learned from."""
_SEPARATE_CALLS = 4
"""Up to so many passes of a step are learned from one by one; more as one sum, which costs no more than one."""


class StepCosts:
    """Collects a step's forward passes; at its end the model learns from them. Times are seconds of the caller's
    clock."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._calls: list[Call] = []
        self._took_s: list[float] = []
        self._learned_s = 0.0

    @property
    def known(self) -> bool:
        """True once anything was measured on this machine."""
        return self.model.steps > 0 or self.model.prior != CostPrior()

    def add(self, rows: int, context_tokens: int, pairs: int, took_s: float) -> None:
        """A forward pass of this step (see ``Call``), computed to its end in ``took_s``."""
        self._calls.append(Call(rows, context_tokens, pairs))
        self._took_s.append(took_s)

    def forget_pause(self) -> None:
        """Learn from the next step too, however soon it ends: for measuring."""
        self._learned_s = -LEARN_INTERVAL_S

    def end(self, ended_s: float) -> None:
        """The step is over."""
        if self._calls and ended_s - self._learned_s >= LEARN_INTERVAL_S:
            self._learned_s = ended_s
            if len(self._calls) <= _SEPARATE_CALLS:
                for call, took_s in zip(self._calls, self._took_s, strict=True):
                    self.model.learn([call], took_s)
            else:
                self.model.learn(self._calls, sum(self._took_s))
        self._calls.clear()
        self._took_s.clear()
