"""The factory that vLLM calls for its scheduler."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from headrace.errors import EngineError
from headrace.vllm.adapter import Adapter, read_sources
from headrace.vllm.contract import problems_of
from headrace.vllm.settings import settings_of
from headrace.vllm.steer import Steering
from headrace.vllm.versions import ADAPTERS, adapter_for

_LOG: Final = logging.getLogger("headrace.vllm")


def scheduler(**arguments: Any) -> Any:
    """vLLM's scheduler with headrace's policies, for ``--scheduler-cls headrace.vllm.scheduler``.

    ``arguments`` are those that vLLM gives to a scheduler class. Which of vLLM's schedulers is underneath follows from
    the resolved configuration: the asynchronous one exactly when vLLM would take it. Raises EngineError when this vLLM
    has a shape that headrace does not know, ConfigError for settings that are wrong.
    """
    vllm_config = arguments["vllm_config"]
    adapter = check_vllm()
    base = base_class(bool(vllm_config.scheduler_config.async_scheduling))
    settings = settings_of(getattr(vllm_config, "additional_config", None))
    made = scheduler_class(base)(**arguments)
    steering = Steering(made, adapter, settings)
    made.headrace = steering
    _LOG.info("headrace decides the steps of %s: %s, bands %s", base.__name__, steering.knobs, [*steering.bands])
    return made


def check_vllm() -> Adapter:
    """The adapter for the vLLM that is installed. Raises EngineError when none fits, saying what is different."""
    vllm = importlib.import_module("vllm")
    version = _version(str(vllm.__version__))
    adapter = adapter_for(version)
    if adapter is None:
        oldest = ".".join(map(str, ADAPTERS[0].since))
        raise EngineError(f"headrace's scheduler needs vLLM {oldest} or newer; this is {vllm.__version__}")
    problems = problems_of(read_sources(_folder(vllm)), adapter.contract)
    if problems:
        raise EngineError(
            f"headrace's scheduler does not know the shape of vLLM {vllm.__version__} ({'; '.join(problems)}). "
            "Start without --scheduler-cls, or with a headrace that knows this vLLM."
        )
    if version > ADAPTERS[-1].since:
        _LOG.warning("vLLM %s is newer than any that headrace was tested with; its shape is known", vllm.__version__)
    return adapter


def base_class(asynchronous: bool) -> Any:
    """vLLM's own scheduler class for the resolved configuration."""
    if asynchronous:
        return importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    return importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler


def scheduler_class(base: Any) -> Any:
    """``base`` with ``Steering`` (its attribute ``headrace``) around every step."""

    class HeadraceScheduler(base):  # type: ignore[misc]  # vLLM's class is chosen while running
        headrace: Steering

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            steering = self.headrace
            steering.before()
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                steering.restore()
            steering.after(output)
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            self.headrace.updated(scheduler_output)
            return super().update_from_output(scheduler_output, model_runner_output)

    HeadraceScheduler.__name__ = f"Headrace{base.__name__}"
    return HeadraceScheduler


def _version(text: str) -> tuple[int, int]:
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError) as error:
        raise EngineError(f"vLLM says that its version is {text!r}, which headrace cannot read") from error


def _folder(module: ModuleType) -> Path:
    if module.__file__ is None:
        raise EngineError("vLLM is not installed as files; headrace cannot check its shape")
    return Path(module.__file__).parent
