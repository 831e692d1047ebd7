"""vLLM's real scheduler with a model that only counts: every token it samples tells whose it is and where it stands.

The loop is that of vLLM's engine core: with two steps in flight the next one is scheduled before the last one's
output is known. The model sees scheduler outputs alone, as a worker does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.vllm import scheduler as headrace_scheduler
from headrace.vllm.build import base_class

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here; `make test-vllm` installs and runs this",
)


def vllm(module: str) -> Any:
    """A module of vLLM (or torch). What it warns of while it is imported is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


BLOCK_TOKENS = 16
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "vocab_size": 32000,
    "torch_dtype": "float32",
}


def token_of(request_id: str, position: int) -> int:
    """What the model samples for a request at a position: wrong order, gaps and repeats all show."""
    return 1 + zlib.crc32(f"{request_id}/{position}".encode()) % 30000


def vllm_config(
    folder: Path,
    *,
    asynchronous: bool = False,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 4096,
    blocks: int = 2048,
    policy: str = "fcfs",
    threshold: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """vLLM's configuration for a tiny model that is never loaded."""
    (folder / "config.json").write_text(json.dumps(TINY_MODEL), encoding="utf-8")
    configs = vllm("vllm.config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _config(
            configs,
            folder,
            asynchronous,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            blocks,
            policy,
            threshold,
            settings,
        )


def _config(
    configs: Any,
    folder: Path,
    asynchronous: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    blocks: int,
    policy: str,
    threshold: int,
    settings: Mapping[str, Any] | None,
) -> Any:
    model = configs.ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=max_model_len
    )
    scheduler = configs.SchedulerConfig(
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=threshold,
        policy=policy,
    )
    cache = configs.CacheConfig(block_size=BLOCK_TOKENS, gpu_memory_utilization=0.9, enable_prefix_caching=True)
    config = configs.VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)
    if settings is not None:
        config.additional_config = {"headrace": dict(settings)}
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    return config


def make_scheduler(config: Any, *, headrace: bool = True) -> Any:
    """The scheduler as vLLM's engine core makes it: headrace's, or the stock one."""
    blocks = config.cache_config.num_gpu_blocks
    assert blocks is not None
    kinds, torch = vllm("vllm.v1.kv_cache_interface"), vllm("torch")
    spec = kinds.FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [kinds.KVCacheGroupSpec(["layer"], spec)]
    kv = kinds.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    make = headrace_scheduler if headrace else base_class(bool(config.scheduler_config.async_scheduling))
    return make(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=vllm("vllm.v1.structured_output").StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    extra: Mapping[str, Any] | None = None,
    priority: int = 0,
    arrival_time: float | None = None,
) -> Any:
    """A request as it arrives in the engine core."""
    sampling = vllm("vllm.sampling_params").SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, extra_args=dict(extra) if extra else None
    )
    blocks, sha256 = vllm("vllm.v1.core.kv_cache_utils"), vllm("vllm.utils.hashing").sha256
    blocks.init_none_hash(sha256)
    return vllm("vllm.v1.request").Request(
        request_id,
        list(prompt),
        sampling,
        None,
        arrival_time=arrival_time,
        priority=priority,
        block_hasher=blocks.get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Prompt tokens that no other seed shares."""
    draw = random.Random(seed)
    return [draw.randrange(1, 30000) for _ in range(length)]


@dataclass
class Step:
    """One step as vLLM made it."""

    scheduled: dict[str, int]
    preempted: set[str]
    new: list[str]


@dataclass
class Engine:
    """The loop. ``depth`` steps may be in flight (2 with asynchronous scheduling). ``tick_s`` passes with every step on
    the clock that is handed to the plug-in, if any."""

    scheduler: Any
    depth: int = 1
    tick: Callable[[int], None] = lambda tokens: None
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    computed_tokens: int = 0
    _queue: deque[Any] = field(default_factory=deque)
    _known: dict[str, int] = field(default_factory=dict)

    def add(self, request: Any) -> None:
        self._known[request.request_id] = request.num_prompt_tokens
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, *request_ids: str) -> None:
        for request in self.scheduler.finish_requests(
            list(request_ids), vllm("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        ):
            self.finished[request.request_id] = "abort"

    def step(self) -> bool:
        """As ``EngineCore.step`` or ``step_with_batch_queue``. False when nothing is left to do."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.steps.append(
                Step(
                    dict(output.num_scheduled_tokens),
                    set(output.preempted_req_ids or ()),
                    [new.req_id for new in output.scheduled_new_reqs],
                )
            )
            self._queue.append(output)
            if len(self._queue) < self.depth and output.total_num_scheduled_tokens:
                return True
        elif not self._queue:
            return False
        self._finish(self._queue.popleft())
        return True

    def run(self, most_steps: int = 5000) -> None:
        """Until everything has ended."""
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {most_steps} steps")

    def _finish(self, output: Any) -> None:
        self.tick(output.total_num_scheduled_tokens)
        result = self._execute(output)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)

    def _execute(self, output: Any) -> Any:
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        req_ids, sampled = [], []
        for request_id, tokens in output.num_scheduled_tokens.items():
            assert tokens > 0
            end = begins[request_id] + tokens
            known = self._known[request_id]
            assert end <= known, f"{request_id}: {end} tokens computed of {known}"
            self.computed_tokens += tokens
            req_ids.append(request_id)
            if end == known:
                sampled.append([token_of(request_id, known)])
                self._known[request_id] += 1
            else:
                sampled.append([])
        return vllm("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def expected(request_id: str, prompt_tokens: int, tokens: int) -> list[int]:
    """What a request that was served to the end, whatever happened in between, has got."""
    return [token_of(request_id, prompt_tokens + index) for index in range(tokens)]
