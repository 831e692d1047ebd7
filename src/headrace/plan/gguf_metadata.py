"""The metadata and the tensor names of a GGUF file, read without libllama and without its weights.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of tensors, number of
entries; then entries (key, type, value) and tensors (name, shape, type, offset), little-endian. Every count is held
against what is left of the file before it is believed, so that a truncated or hostile file ends in a ModelError.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelError
from headrace.models.gguf_file import check_gguf

Value = int | float | bool | str | tuple[int | float | bool, ...]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_NUMBERS = 1 << 16
"""Arrays of numbers beyond this are none that describe an architecture (token scores): they are passed over."""
_MOST_DIMENSIONS = 8
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """``values`` by key (arrays of texts and long arrays are left out), ``tensors`` by name with their number of
    weights."""

    path: Path
    values: dict[str, Value]
    tensors: dict[str, int]

    @property
    def architecture(self) -> str:
        """``general.architecture``. Raises ModelError when the file has none."""
        name = self.values.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise ModelError(f"{self.path} does not say its architecture (general.architecture)")
        return name

    @property
    def parameters(self) -> int:
        """Weights of all tensors."""
        return sum(self.tensors.values())


def read_gguf(path: Path) -> GgufMetadata:
    """Raises ModelError: no such file, not a GGUF, or cut off or broken at a byte that is named."""
    check_gguf(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except OSError as error:
        raise ModelError(f"the model file {path} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads one file from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 8  # behind the magic and the version, which ``check_gguf`` has looked at

    def read(self) -> GgufMetadata:
        tensors, entries = self._number("Q"), self._number("Q")
        self._believe(entries, 8 + 4 + 1, "metadata entries")
        values: dict[str, Value] = {}
        for _ in range(entries):
            key = self._text("a key")
            value = self._value(self._number("I"), key)
            if value is not None:
                values[key] = value
        self._believe(tensors, _LEAST_TENSOR_BYTES, "tensors")
        return GgufMetadata(self._path, values, dict([self._tensor() for _ in range(tensors)]))

    def _value(self, kind: int, key: str) -> Value | None:
        if kind == _STRING:
            return self._text(f"the value of {key}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._broken(f"{key} has the type {kind}, which GGUF does not know")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> Value | None:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._believe(count, 8, f"texts in {key}")
            for _ in range(count):
                self._skip(self._number("Q"), key)
            return None
        if kind not in _SCALARS:
            raise self._broken(f"{key} is an array of the type {kind}, which is not read")
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        self._believe(count, size, f"numbers in {key}")
        if count > _MOST_NUMBERS:
            self._skip(count * size, key)
            return None
        numbers: tuple[int | float | bool, ...] = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, self._at)
        self._at += count * size
        return numbers

    def _tensor(self) -> tuple[str, int]:
        name = self._text("a tensor's name")
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._broken(f"the tensor {name} has {dimensions} dimensions")
        shape = [self._number("Q") for _ in range(dimensions)]
        self._skip(4 + 8, f"the tensor {name}")
        return name, math.prod(shape)

    def _text(self, what: str) -> str:
        length, start = self._number("Q"), self._at
        self._skip(length, what)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        size = struct.calcsize(f"<{code}")
        start = self._at
        self._skip(size, "a number")
        number: int = struct.unpack_from(f"<{code}", self._data, start)[0]
        return number

    def _skip(self, count: int, what: str) -> None:
        if count > len(self._data) - self._at:
            raise self._broken(f"it ends within {what}")
        self._at += count

    def _believe(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > len(self._data) - self._at:
            raise self._broken(f"it says that {count} {what} follow, and has {len(self._data) - self._at} bytes left")

    def _broken(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} is cut off or broken at byte {self._at}: {problem}")
