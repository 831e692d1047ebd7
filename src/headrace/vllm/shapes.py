"""What the plug-in uses of vLLM's objects, as types of its own: headrace is checked and imported without vLLM.

``contract`` compares these with the vLLM that is there when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol


class SamplingParams(Protocol):
    """``extra_args`` is where ``vllm_xargs`` of the request's body arrive."""

    extra_args: Mapping[str, Any] | None


class StructuredOutput(Protocol):
    """A request whose output must follow a grammar; ``grammar`` is None until it has been compiled."""

    @property
    def grammar(self) -> object | None: ...


class Request(Protocol):
    """vLLM's account of one request, in the engine core.

    ``num_tokens`` are prompt and output so far. ``num_computed_tokens`` counts tokens of steps that are still in
    flight; ``num_output_placeholders`` are output tokens that those will bring (asynchronous scheduling).
    ``num_stale_output_tokens`` of a preempted request are still to be delivered.
    """

    request_id: str
    priority: int
    arrival_time: float
    max_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_stale_output_tokens: int
    drop_stale_output: bool
    num_preemptions: int
    spec_token_ids: list[int]
    status: Any
    sampling_params: SamplingParams | None
    structured_output_request: StructuredOutput | None

    @property
    def num_tokens(self) -> int: ...

    def is_finished(self) -> bool: ...


class RequestQueue(Protocol):
    """vLLM's queue protocol."""

    def add_request(self, request: Request) -> None: ...
    def pop_request(self) -> Request: ...
    def peek_request(self) -> Request: ...
    def prepend_request(self, request: Request) -> None: ...
    def prepend_requests(self, requests: Iterable[Request]) -> None: ...
    def remove_request(self, request: Request) -> None: ...
    def remove_requests(self, requests: Iterable[Request]) -> None: ...
    def __bool__(self) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class BlockPool(Protocol):
    """The free KV blocks, those that keep a cached prefix included."""

    def get_num_free_blocks(self) -> int: ...


class KvCacheManager(Protocol):
    """KV blocks; ``get_computed_blocks`` says second how many tokens of a request are cached."""

    block_pool: BlockPool

    def get_computed_blocks(self, request: Request) -> Sequence[Any]: ...


class SchedulerConfig(Protocol):
    """The resolved ``--max-num-seqs`` and so on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    async_scheduling: bool | None


class CacheConfig(Protocol):
    """``num_gpu_blocks`` of ``block_size`` tokens each."""

    num_gpu_blocks: int | None


class Scheduler(Protocol):
    """What is read and set of vLLM's scheduler."""

    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    kv_cache_manager: KvCacheManager
    block_size: int
    max_model_len: int
    waiting: RequestQueue
    running: list[Request]
    requests: dict[str, Request]
    finished_req_ids: set[str]
    max_num_running_reqs: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    adaptive_long_prefill_threshold: bool

    def _preempt_request(self, request: Request, timestamp: float) -> None: ...
    def get_kv_cache_usage(self) -> float: ...


class StepOutput(Protocol):
    """What vLLM's ``schedule`` returns."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
