"""Whether a vLLM has the shape that this plug-in steers, told from its sources.

vLLM's scheduler is no public interface and changes with every release. Names alone do not say enough: a handle that
``schedule`` no longer reads turns without effect. So the sources are read, not only the objects: the same check runs
when the plug-in starts and, without installing anything, over other releases (``scripts/check_vllm_contract.py``).
Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

SCHEDULER: Final = "v1/core/sched/scheduler.py"
ASYNC_SCHEDULER: Final = "v1/core/sched/async_scheduler.py"
QUEUE: Final = "v1/core/sched/request_queue.py"
REQUEST: Final = "v1/request.py"
ENGINE_CORE: Final = "v1/engine/core.py"
SOURCES: Final = (SCHEDULER, ASYNC_SCHEDULER, QUEUE, REQUEST, ENGINE_CORE)
"""Files that the check reads, below vLLM's package folder."""

QUEUE_PROTOCOL: Final = frozenset(
    {
        "add_request",
        "pop_request",
        "peek_request",
        "prepend_request",
        "prepend_requests",
        "remove_request",
        "remove_requests",
        "__bool__",
        "__len__",
        "__iter__",
    }
)
"""What ``gate.GatedQueue`` implements."""


METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "schedule": ("self",),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "_preempt_request": ("self", "request", "timestamp"),
    "get_kv_cache_usage": ("self",),
    "get_request_counts": ("self",),
    "shutdown": ("self",),
}


@dataclass(frozen=True)
class Contract:
    """What one range of vLLM versions has. ``queues`` are all queues of waiting requests that its scheduler keeps;
    ``attributes`` and ``request_attributes`` are set on a scheduler and on a request; ``handles`` are names that
    ``schedule`` reads, or the plug-in steers nothing by setting them; ``methods`` have these first parameters."""

    queues: frozenset[str] = frozenset({"waiting", "kv_holding_waiting"})
    attributes: frozenset[str] = frozenset(
        {
            "scheduler_config",
            "cache_config",
            "kv_cache_manager",
            "block_size",
            "max_model_len",
            "waiting",
            "running",
            "requests",
            "finished_req_ids",
            "max_num_running_reqs",
            "max_num_active_reqs",
            "max_num_scheduled_tokens",
            "adaptive_long_prefill_threshold",
        }
    )
    handles: frozenset[str] = frozenset(
        {
            "running",
            "waiting",
            "max_num_active_reqs",
            "max_num_scheduled_tokens",
            "long_prefill_token_threshold",
            "adaptive_long_prefill_threshold",
            "peek_request",
            "pop_request",
        }
    )
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: METHODS)
    request_attributes: frozenset[str] = frozenset(
        {
            "request_id",
            "priority",
            "arrival_time",
            "max_tokens",
            "num_prompt_tokens",
            "num_computed_tokens",
            "num_output_placeholders",
            "num_stale_output_tokens",
            "drop_stale_output",
            "num_preemptions",
            "spec_token_ids",
            "status",
            "sampling_params",
            "structured_output_request",
            "num_tokens",
            "is_finished",
        }
    )


def problems_of(sources: Mapping[str, str], contract: Contract) -> list[str]:
    """What in vLLM's ``sources`` (by the names in ``SOURCES``) is not as ``contract`` says; empty when it fits."""
    missing = [name for name in SOURCES if name not in sources]
    if missing:
        return [f"{name} is not there" for name in missing]
    trees: dict[str, ast.Module] = {}
    for name in SOURCES:
        try:
            trees[name] = ast.parse(sources[name])
        except SyntaxError as error:
            return [f"{name} cannot be read: {error}"]
    problems = _scheduler_problems(trees[SCHEDULER], contract)
    problems += _class_problems(trees[ASYNC_SCHEDULER], ASYNC_SCHEDULER, "AsyncScheduler", base="Scheduler")
    problems += _queue_problems(trees[QUEUE])
    problems += _request_problems(trees[REQUEST], contract)
    problems += _class_problems(trees[ENGINE_CORE], ENGINE_CORE, "EngineCore")
    return problems


def _scheduler_problems(tree: ast.Module, contract: Contract) -> list[str]:
    scheduler = _class(tree, "Scheduler")
    if scheduler is None:
        return [f"{SCHEDULER} has no class Scheduler"]
    problems: list[str] = []
    methods = _methods(scheduler)
    for name, wanted in contract.methods.items():
        method = methods.get(name)
        if method is None:
            problems.append(f"Scheduler has no method {name}")
        elif tuple(_parameters(method)[: len(wanted)]) != wanted:
            problems.append(
                f"Scheduler.{name} takes ({', '.join(_parameters(method))}), not ({', '.join(wanted)}, ...)"
            )
    have = _self_attributes(scheduler)
    problems += [f"Scheduler has no attribute {name}" for name in sorted(contract.attributes - have)]
    queues = _queues(scheduler)
    problems += [
        f"Scheduler keeps another queue of waiting requests, {name}" for name in sorted(queues - contract.queues)
    ]
    problems += [f"Scheduler has no queue {name}" for name in sorted(contract.queues - queues)]
    schedule = methods.get("schedule")
    if schedule is not None:
        read = _attributes_read(schedule)
        problems += [f"Scheduler.schedule does not use {name}" for name in sorted(contract.handles - read)]
    preempt = methods.get("_preempt_request")
    if preempt is not None and "prepend_request" not in _attributes_read(preempt):
        problems.append("Scheduler._preempt_request does not put the request back into a queue")
    return problems


def _queue_problems(tree: ast.Module) -> list[str]:
    queue = _class(tree, "RequestQueue")
    if queue is None:
        return [f"{QUEUE} has no class RequestQueue"]
    abstract = {
        name
        for name, method in _methods(queue).items()
        if any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in method.decorator_list)
    }
    problems = [
        f"RequestQueue asks for {name}, which headrace's queue does not have"
        for name in sorted(abstract - QUEUE_PROTOCOL)
    ]
    return problems + [f"RequestQueue no longer has {name}" for name in sorted(QUEUE_PROTOCOL - abstract)]


def _request_problems(tree: ast.Module, contract: Contract) -> list[str]:
    request = _class(tree, "Request")
    if request is None:
        return [f"{REQUEST} has no class Request"]
    have = _self_attributes(request) | set(_methods(request))
    problems = [f"Request has no {name}" for name in sorted(contract.request_attributes - have)]
    status = _class(tree, "RequestStatus")
    if status is None:
        return [*problems, f"{REQUEST} has no class RequestStatus"]
    names = {
        t.id for node in status.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
    }
    wanted = {"WAITING", "RUNNING", "PREEMPTED", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"}
    return problems + [f"RequestStatus has no {name}" for name in sorted(wanted - names)]


def _class_problems(tree: ast.Module, file: str, name: str, *, base: str | None = None) -> list[str]:
    found = _class(tree, name)
    if found is None:
        return [f"{file} has no class {name}"]
    if base is not None and not any(isinstance(b, ast.Name) and b.id == base for b in found.bases):
        return [f"{name} does not derive from {base}"]
    return []


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}


def _parameters(method: ast.FunctionDef) -> list[str]:
    arguments = method.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _assigned(node: ast.ClassDef) -> Iterable[tuple[str, ast.expr | None]]:
    """Names that any method sets on ``self``, with what they are set to."""
    for child in ast.walk(node):
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        if isinstance(child, ast.Assign):
            targets, value = child.targets, child.value
        elif isinstance(child, ast.AnnAssign):
            targets, value = [child.target], child.value
        for target in targets:
            if isinstance(target, ast.Attribute) and _is_self(target.value):
                yield target.attr, value


def _self_attributes(node: ast.ClassDef) -> set[str]:
    return {name for name, _ in _assigned(node)}


def _queues(node: ast.ClassDef) -> set[str]:
    """Attributes that hold a queue of waiting requests."""
    return {
        name
        for name, value in _assigned(node)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "create_request_queue"
    }


def _attributes_read(method: ast.FunctionDef) -> set[str]:
    return {child.attr for child in ast.walk(method) if isinstance(child, ast.Attribute)}
