"""The one seam for engines, and the seam for a model's text side.

Every engine (embedded llama.cpp, later vLLM, SGLang, any OpenAI-compatible server, the simulator)
implements ``Engine``; ``tests/contract`` runs one suite over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.engines.output_stream import OutputStream
from headrace.messages.engine import (
    EngineLoad,
    EngineSnapshot,
    Knobs,
    Ready,
    Submit,
)


class Engine(Protocol):
    """Generates tokens for many sequences at once."""

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it became ready; None while loading, restarting or closed."""

    @property
    def load(self) -> EngineLoad | None:
        """The latest load report, or None before the first."""

    async def start(self) -> Ready:
        """Start and wait until ready. Raises ModelError (cannot ever work) or EngineError."""

    def submit(self, request: Submit) -> OutputStream:
        """Run one sequence, from the first ``anext`` on; yields outputs until one has ``finish`` set.

        Raises EngineNotReady before any output when the engine is not ready, EngineGone when it dies on the
        way, EngineError when its id is live. Closing the iterator early (``aclose``) aborts the sequence; its
        id stays live until the engine has ended it.
        """

    def abort(self, request_id: str) -> None:
        """Ask for a sequence's end; a no-op for an unknown id."""

    async def snapshot(self) -> EngineSnapshot:
        """State for tests, debugging and idle-time checks. Raises EngineNotReady."""

    def set_knobs(self, knobs: Knobs) -> None:
        """Change live values; they apply from the next step on."""

    async def close(self) -> None:
        """End everything; running sequences finish with ``abort``. Safe to call twice."""


class Tokenizer(Protocol):
    """A model's text side, usable in the gateway without its weights. Thread-safe."""

    @property
    def vocab_size(self) -> int: ...

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool, limit_tokens: int | None = None
    ) -> list[int]:
        """Token ids of ``text``; with ``add_special`` the model's BOS/EOS rule applies, with
        ``parse_special`` the text forms of control tokens are recognised. Raises ContextTooLong as soon as it
        is certain that there are more than ``limit_tokens``, without computing the rest."""

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD. Raises RequestError for an id outside the vocab."""

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token (control tokens as their text form)."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the GGUF's chat template makes. Raises RequestError when the template refuses."""
