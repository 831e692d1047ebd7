"""headrace's policies inside vLLM: ``vllm serve MODEL --scheduler-cls headrace.vllm.scheduler``.

vLLM's scheduler goes on doing what it does (KV blocks, prefix cache, speculative tokens, grammars); what it is shown
before each step decides who runs. The policies are the same modules that the embedded engine and the simulator use.
Nothing here imports vLLM until vLLM itself asks for the scheduler.
"""

from __future__ import annotations

from headrace.vllm.build import scheduler

__all__ = ["scheduler"]
