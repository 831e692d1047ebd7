"""Lengths made to fit the target's context.

A class says for which context its lengths were written. Against a smaller one, what its prompts hold of their own and
share is multiplied by context / written_for: one factor, so the shape of the distribution stays (lengths of 16k to
128k become 1k to 8k for a context of 8k). Outputs are not scaled: their cost does not depend on the context.

Whatever still would not fit is cut: a prompt and its output stay together below the context less a margin, which
takes up what the estimate of a text's tokens may be off.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.bench.load.workload import TrafficClass

_MARGIN_SHARE = 64
_LEAST_MARGIN_TOKENS = 16


@dataclass(frozen=True)
class ContextFit:
    """``context_tokens`` None: nothing is known of the target's context, and nothing is changed."""

    context_tokens: int | None = None

    @property
    def room_tokens(self) -> int | None:
        """What a prompt and its output may have together: the context less 1/64 of it, at least 16 tokens."""
        if self.context_tokens is None:
            return None
        return self.context_tokens - max(self.context_tokens // _MARGIN_SHARE, _LEAST_MARGIN_TOKENS)

    def factor(self, traffic: TrafficClass) -> float:
        """What the class's prompt lengths are multiplied by: at most 1."""
        if self.context_tokens is None or traffic.written_for_context_tokens is None:
            return 1.0
        return min(1.0, self.context_tokens / traffic.written_for_context_tokens)

    def cut(self, input_tokens: int, output_tokens: int) -> tuple[int, int]:
        """The lengths, cut to fit: the output to half of the room, the prompt to what that leaves."""
        room = self.room_tokens
        if room is None:
            return input_tokens, output_tokens
        output_tokens = min(output_tokens, room // 2)
        return min(input_tokens, room - output_tokens), output_tokens

    def cut_prefix(self, prefix_tokens: int) -> int:
        """A shared prefix's length, cut to a quarter of the room: every request of its class then has room for all
        of it, and for a question and an output."""
        room = self.room_tokens
        return prefix_tokens if room is None else min(prefix_tokens, room // 4)

    def fits(self, input_tokens: int, output_tokens: int) -> bool:
        room = self.room_tokens
        return room is None or input_tokens + output_tokens <= room
