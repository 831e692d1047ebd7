"""The text side of a gateway whose engines are all remote: there is no vocabulary here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headrace.errors import RequestError


class NoVocabulary:
    """Implements ``engines.protocol.Tokenizer`` by saying that it cannot."""

    @property
    def vocab_size(self) -> int:
        return 0

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool, limit_tokens: int | None = None
    ) -> list[int]:
        self._refuse()

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        self._refuse()

    def token_bytes(self, token_id: int) -> bytes:
        self._refuse()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError(
            "this gateway has no vocabulary: its engines are remote; ask one of them", code="no_vocabulary"
        )
