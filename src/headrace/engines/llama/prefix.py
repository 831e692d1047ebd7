"""Who may begin with whose KV."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from headrace.messages.engine import PrefixSharing, Submit


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """``enabled``: sequences begin with KV that others computed of the same first tokens. ``sharing`` says within
    what: with ``tenant``, the time to the first token tells nobody what another tenant's prompts begin with."""

    enabled: bool = True
    sharing: PrefixSharing = "tenant"

    def namespace(self, request: Submit) -> Hashable:
        """Sequences share within (adapter, sharing, tenant); a core serves one model, without an adapter. Requests
        without a tenant are one tenant's, which is not everybody: what all share stays out of sight when the engine is
        started again with ``tenant`` over the same files."""
        return ("", self.sharing, request.tenant if self.sharing == "tenant" else None)

    def reusable(self, request: Submit) -> bool:
        """Whether KV may stand for the computing of its prompt; not where every position's logits are wanted."""
        return self.enabled and request.sampling.prompt_logprobs is None


PREFIX_DEFAULT: Final = PrefixRules()
