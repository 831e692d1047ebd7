"""``vllm.general_plugins``: what the API server may ask the engine core about headrace's scheduler."""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec

from headrace.errors import ConfigError, EngineError
from headrace.vllm.steer import Steering

STATUS: Final = "headrace_status"
CHANGE: Final = "headrace_change"


def register() -> None:
    """Add the two methods to vLLM's engine core. vLLM calls this in each of its processes, more than once in some."""
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    setattr(core, STATUS, _status)
    setattr(core, CHANGE, _change)


def _status(core: Any) -> dict[str, Any]:
    """``Status`` in plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(_steering(core).status())
    return plain


def _change(core: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Change knobs; ``{"refused": reason}`` when they cannot be, and nothing has changed then."""
    try:
        _steering(core).change(changes)
    except ConfigError as error:
        return {"refused": str(error)}
    return _status(core)


def _steering(core: Any) -> Steering:
    found = getattr(core.scheduler, "headrace", None)
    if not isinstance(found, Steering):
        raise EngineError("this server was not started with --scheduler-cls headrace.vllm.scheduler")
    return found
