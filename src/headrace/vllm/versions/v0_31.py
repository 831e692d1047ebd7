"""vLLM 0.31: the running cap became ``max_num_active_reqs``, and requests that hold KV wait in a queue of their own,
which vLLM always serves first."""

from __future__ import annotations

from typing import Final

from headrace.vllm.adapter import Adapter
from headrace.vllm.contract import Contract

ADAPTER: Final = Adapter(since=(0, 31), contract=Contract())
