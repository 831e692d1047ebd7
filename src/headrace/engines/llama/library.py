"""The door to libllama: loads the bindings once per process, keeps its log, translates its failures.

Only the modules of ``engines.llama`` import this one. The bindings are imported inside ``load`` because
they are an optional dependency and take a while.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import ModelError

_WARN_LEVEL = 3


class Library:
    """libllama's functions (``api``, the low-level bindings module) and the end of its log."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self._recent: collections.deque[str] = collections.deque(maxlen=20)
        self._listener: Callable[[str], None] | None = None
        # libllama keeps only the pointer: the callback object has to live as long as the library is used.
        self._log_callback = api.llama_log_callback(self._on_log)
        api.llama_log_set(self._log_callback, None)
        api.llama_backend_init()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Within, ``listener`` gets every piece of text that libllama logs, at every level."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _on_log(self, level: int, text: bytes, _user: object) -> None:
        if self._listener is not None:
            self._listener(text.decode("utf-8", "replace"))
        if level >= _WARN_LEVEL:
            self._recent.append(text.decode("utf-8", "replace").strip())

    def recent_log(self) -> str:
        """The last warnings and errors, newest last, as one line."""
        return "; ".join(line for line in self._recent if line and line != ".")

    def system_info(self) -> str:
        """What the build and the processor support, in libllama's words."""
        info: bytes = self.api.llama_print_system_info()
        return info.decode("utf-8", "replace")

    def state_build(self) -> str:
        """Which libllama computes and writes states: the bindings' version, which pins the sources, and the version of
        the state's form."""
        return f"{importlib.metadata.version('llama-cpp-python')} state {self.api.LLAMA_STATE_SEQ_VERSION}"

    def address_of_logits(self) -> Callable[[Any, int], int | None]:
        """``llama_get_logits_ith`` as a function that returns a plain address (None for no logits). The
        bindings' own returns a ctypes pointer, whose conversion costs more than the call."""
        prototype = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        return prototype(("llama_get_logits_ith", self.api._lib))


@functools.cache
def load() -> Library:
    """Load libllama, once a process: it has one log, and calls what it was given for it until it is given another.
    Raises ModelError with the remedy when the bindings are missing or broken."""
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        raise ModelError(
            f"the embedded engine needs the llama.cpp bindings ({error}); install them with: "
            "pip install 'headrace[llama]'"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ModelError(f"the llama.cpp bindings are installed but do not load: {error}") from error
    return Library(api)
