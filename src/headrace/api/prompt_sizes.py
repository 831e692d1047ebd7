"""How many tokens a prompt should have, where no vocabulary is at hand: learned from what engines count."""

from __future__ import annotations

from typing import Final

FIRST_BYTES_PER_TOKEN: Final = 4.0
MEMORY: Final = 0.05
"""Weight of the latest prompt: some fifty count."""

_LEAST: Final = 1.0
_MOST: Final = 16.0


class PromptSizes:
    """Bytes of a prompt's JSON per token, by model."""

    def __init__(self) -> None:
        self._bytes_per_token: dict[str, float] = {}

    def estimate(self, model: str, prompt_bytes: int) -> int:
        """Tokens of a prompt of so many bytes; at least 1."""
        return max(1, round(prompt_bytes / self._bytes_per_token.get(model, FIRST_BYTES_PER_TOKEN)))

    def learn(self, model: str, prompt_bytes: int, tokens: int) -> None:
        """An engine counted ``tokens`` in such a prompt."""
        if tokens < 1 or prompt_bytes < 1:
            return
        seen = min(_MOST, max(_LEAST, prompt_bytes / tokens))
        before = self._bytes_per_token.get(model, FIRST_BYTES_PER_TOKEN)
        self._bytes_per_token[model] = before + MEMORY * (seen - before)
