"""Converting a GGUF to another quantisation with libllama, in a process of its own.

A child process, because libllama writes hundreds of lines to stderr and aborts the whole process on some
malformed files. ``python -m headrace.models.convert SOURCE TARGET FTYPE`` is the child.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.errors import ModelError

# Values of libllama's enum llama_ftype.
FTYPES = {"Q8_0": 7}


def require_libllama() -> str:
    """The installed bindings' version. Raises ``ModelError`` when there are none."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise ModelError("the llama.cpp bindings are not installed: pip install 'headrace[llama]'")
    return importlib.metadata.version("llama-cpp-python")


def convert(source: Path, target: Path, quantisation: str) -> None:
    """Writes ``source`` as ``target`` in ``quantisation``. Raises ``ModelError`` when libllama cannot."""
    require_libllama()
    ftype = FTYPES[quantisation]
    command = [sys.executable, "-m", "headrace.models.convert", str(source), str(target), str(ftype)]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if child.returncode == 0:
        return
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    why = lines[-1].strip() if lines else "it said nothing"
    if child.returncode < 0:
        why = f"killed by {signal.Signals(-child.returncode).name}; last words: {why}"
    raise ModelError(f"converting {source.name} to {quantisation} failed: {why}")


def _quantize(source: str, target: str, ftype: int) -> int:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    params.allow_requantize = True  # the source is quantised already
    params.nthread = os.cpu_count() or 1
    return int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(1 if _quantize(sys.argv[1], sys.argv[2], int(sys.argv[3])) else 0)
