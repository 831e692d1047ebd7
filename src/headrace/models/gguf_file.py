"""Telling a GGUF file that libllama can read from anything else, by its first bytes."""

from __future__ import annotations

import struct
from pathlib import Path

from headrace.errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
_HEADER_BYTES = 24  # magic, version (u32), number of tensors (u64), number of metadata entries (u64)


def check_gguf(path: Path) -> None:
    """Raises ``ModelError`` unless ``path`` is a readable file that begins like a supported GGUF."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise ModelError(f"there is no model file {path}") from None
    except OSError as error:
        raise ModelError(f"the model file {path} cannot be read: {error.strerror}") from None
    if header[:4] != MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it does not begin with the letters GGUF)")
    if len(header) < _HEADER_BYTES:
        raise ModelError(f"{path} is cut off: a GGUF header has {_HEADER_BYTES} bytes, this has {len(header)}")
    version = struct.unpack_from("<I", header, 4)[0]
    if version not in SUPPORTED_VERSIONS:
        known = " and ".join(map(str, SUPPORTED_VERSIONS))
        raise ModelError(f"{path} has GGUF version {version}; versions {known} are supported")
