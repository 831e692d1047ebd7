"""vLLM 0.32: a paused scheduler may go on with requests that hold KV (``PauseState``); nothing else is let in then."""

from __future__ import annotations

from typing import Final

from headrace.vllm.adapter import Adapter
from headrace.vllm.contract import Contract

_BASE: Final = Contract()
ADAPTER: Final = Adapter(
    since=(0, 32),
    contract=Contract(attributes=_BASE.attributes | {"_pause_state"}, handles=_BASE.handles | {"_pause_state"}),
)
