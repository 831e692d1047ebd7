"""The contract accepts the shape that the plug-in steers and names what is different in another one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.errors import EngineError
from headrace.vllm.build import check_vllm
from headrace.vllm.contract import ASYNC_SCHEDULER, ENGINE_CORE, QUEUE, QUEUE_PROTOCOL, REQUEST, SCHEDULER, problems_of
from headrace.vllm.versions import ADAPTERS, adapter_for
from tests.vllm.harness import needs_vllm

CONTRACT = ADAPTERS[-1].contract


def a_vllm() -> dict[str, str]:
    """Sources of the smallest vLLM that fits."""
    attributes = "\n".join(f"        self.{name} = 0" for name in sorted(CONTRACT.attributes - CONTRACT.queues))
    queues = "\n".join(f"        self.{name} = create_request_queue(0)" for name in sorted(CONTRACT.queues))
    reads = "\n".join(f"        self.{name}" for name in sorted(CONTRACT.handles))
    methods = "\n".join(
        f"    def {name}({', '.join(parameters)}): ..."
        for name, parameters in CONTRACT.methods.items()
        if name not in ("schedule", "_preempt_request")
    )
    request = "\n".join(f"        self.{name} = 0" for name in sorted(CONTRACT.request_attributes))
    statuses = ("WAITING", "RUNNING", "PREEMPTED", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")
    return {
        SCHEDULER: (
            f"class Scheduler:\n    def __init__(self):\n{attributes}\n{queues}\n    def schedule(self):\n{reads}\n"
            "    def _preempt_request(self, request, timestamp):\n        self.waiting.prepend_request(request)\n"
            f"{methods}\n"
        ),
        ASYNC_SCHEDULER: "class AsyncScheduler(Scheduler): ...\n",
        QUEUE: "class RequestQueue:\n"
        + "".join(f"    @abstractmethod\n    def {name}(self): ...\n" for name in sorted(QUEUE_PROTOCOL)),
        REQUEST: f"class Request:\n    def __init__(self):\n{request}\nclass RequestStatus:\n"
        + "".join(f"    {name} = 1\n" for name in statuses),
        ENGINE_CORE: "class EngineCore: ...\n",
    }


def test_the_shape_that_is_known_fits() -> None:
    """No problem is made up."""
    assert problems_of(a_vllm(), CONTRACT) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (SCHEDULER, "self.max_num_active_reqs = 0", "self.max_num_busy = 0", "no attribute max_num_active_reqs"),
        (
            SCHEDULER,
            "self.waiting = create_request_queue(0)",
            "self.waiting = create_request_queue(0); self.skipped_waiting = create_request_queue(0)",
            "another queue of waiting requests, skipped_waiting",
        ),
        (SCHEDULER, "        self.long_prefill_token_threshold\n", "", "does not use long_prefill_token_threshold"),
        (SCHEDULER, "(self, request, timestamp)", "(self, timestamp, request)", "_preempt_request takes"),
        (SCHEDULER, "def get_kv_cache_usage(self)", "def kv_usage(self)", "no method get_kv_cache_usage"),
        (SCHEDULER, "self.waiting.prepend_request(request)", "pass", "does not put the request back"),
        (QUEUE, "def __len__", "def size", "no longer has __len__"),
        (
            QUEUE,
            "class RequestQueue:\n",
            "class RequestQueue:\n    @abstractmethod\n    def rank(self): ...\n",
            "asks for rank",
        ),
        (REQUEST, "self.num_output_placeholders = 0", "pass", "Request has no num_output_placeholders"),
        (REQUEST, "PREEMPTED = 1", "EVICTED = 1", "RequestStatus has no PREEMPTED"),
        (ASYNC_SCHEDULER, "(Scheduler)", "", "does not derive from Scheduler"),
        (ENGINE_CORE, "class EngineCore", "class Engine", "no class EngineCore"),
        (SCHEDULER, "class Scheduler:", "class Scheduler", "cannot be read"),
    ],
)
def test_what_is_different_is_named(file: str, old: str, new: str, said: str) -> None:
    """Every part of the contract can fail, with words that say which."""
    sources = a_vllm()
    assert old in sources[file]
    sources[file] = sources[file].replace(old, new)
    assert any(said in problem for problem in problems_of(sources, CONTRACT))


def test_a_file_that_is_missing_is_named() -> None:
    """A vLLM that moved its scheduler."""
    sources = a_vllm()
    del sources[QUEUE]
    assert problems_of(sources, CONTRACT) == [f"{QUEUE} is not there"]


def test_versions() -> None:
    """Older ones have no adapter, newer ones the newest, whose contract then decides."""
    assert adapter_for((0, 30)) is None
    assert adapter_for((0, 31)) is ADAPTERS[0]
    assert adapter_for((0, 32)) is ADAPTERS[1]
    assert adapter_for((1, 0)) is ADAPTERS[-1]


def test_headrace_imports_without_vllm() -> None:
    """Nothing below headrace.vllm imports vLLM before vLLM asks for its scheduler."""
    code = (
        "import sys; sys.modules['vllm'] = None; import headrace.vllm, headrace.vllm.http_plugin;"
        "import headrace.vllm.engine_plugin; assert callable(headrace.vllm.scheduler)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_vllm
def test_the_installed_vllm_fits() -> None:
    """The one that the other tests run on."""
    assert check_vllm() in ADAPTERS


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that no adapter knows is refused with what is needed."""
    import types

    module = types.ModuleType("vllm")
    module.__version__ = "0.30.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(EngineError, match=r"needs vLLM 0\.31 or newer; this is 0\.30\.1"):
        check_vllm()
