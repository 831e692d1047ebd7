"""Step times from measured prompts and tokens by batch, in the form of splitwise-sim's ``perf_model.csv``.

Columns: model, hardware, tensor_parallel, prompt_size, batch_size, prompt_time and token_time (ms). A prompt pass is
looked up by all its tokens, a decode pass by its sequences. The table says nothing of passes with both: those take
what a prompt pass of as many rows takes, and no less than their decodes alone.
"""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError
from headrace.simulate.hardware.interpolate import Curve
from headrace.simulate.hardware.table_files import csv_rows
from headrace.simulate.hardware.work import Work

_MS = 1e-3
_COLUMNS = ("tensor_parallel", "prompt_size", "batch_size", "prompt_time", "token_time")


class BatchTable:
    """``StepTimes`` of one model on one machine. Medians over repetitions are the mean here (they are within 1 %).

    Raises ConfigError where the table has no such measurements, with those that it has.
    """

    def __init__(self, path: Path, *, model: str, hardware: str, tensor: int, copy_s_per_token: float = 0.0) -> None:
        prompts: list[tuple[float, float]] = []
        tokens: list[tuple[float, float]] = []
        known: set[str] = set()
        for (parts, prompt, batch, prompt_ms, token_ms), (name, machine) in csv_rows(
            path, _COLUMNS, ("model", "hardware")
        ):
            known.add(f"{name} on {machine} with {parts:.0f} ranks")
            if (name, machine, parts) == (model, hardware, tensor):
                prompts.append((prompt * batch, prompt_ms * _MS))
                tokens.append((batch, token_ms * _MS))
        if not prompts:
            have = "; ".join(sorted(known)) or "nothing"
            raise ConfigError(f"{path} has no {model} on {hardware} with {tensor} ranks; it has {have}")
        self.source = f"measured {model} on {tensor} x {hardware}, {path.name}"
        self.prompt_s = Curve(prompts)
        self.token_s = Curve(tokens)
        self._copy_s_per_token = copy_s_per_token

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass of which only the sums are known (``Work.of_call`` says what is assumed)."""
        return self.pass_s(Work.of_call(rows, context_tokens, pairs))

    def pass_s(self, work: Work) -> float:
        """One forward pass."""
        if not work.rows:
            return 0.0
        decodes_s = self.token_s(work.decodes) if work.decodes else 0.0
        return max(decodes_s, self.prompt_s(work.rows)) if work.chunks else decodes_s

    def move_s(self, tokens: int, band: int) -> float:
        """Copying a sequence's KV, which the table does not hold."""
        return self._copy_s_per_token * tokens
