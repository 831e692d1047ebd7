"""Numbers out of a model's own description, each checked before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.errors import ModelError

MOST_LAYERS = 4096
MOST_ENTRIES = 1 << 24
"""Of one row, one head, one state's width."""
MOST_TOKENS = 1 << 32
_SHOWN_CHARS = 60


class Fields:
    """``values`` by key, of the file ``source``. Every question raises ModelError with file, key, value and range."""

    def __init__(self, source: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether there is a value other than null."""
        return self._values.get(self._prefix + key) is not None

    def raw(self, key: str) -> object:
        """The value as it is; None when there is none."""
        return self._values.get(self._prefix + key)

    def whole(self, key: str, *, least: int = 1, most: int = MOST_ENTRIES, default: int | None = None) -> int:
        """A whole number. Without a ``default`` it must be there."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.source}: {self._prefix}{key} is missing")
            return default
        return self._whole(key, value, least, most)

    def one_of(self, keys: Sequence[str], *, most: int = MOST_ENTRIES) -> int:
        """The first of these names that is there."""
        for key in keys:
            if self.has(key):
                return self.whole(key, most=most)
        raise ModelError(f"{self.source}: {self._prefix}{keys[0]} is missing")

    def wholes(self, key: str, count: int, *, least: int = 0, most: int = MOST_ENTRIES) -> tuple[int, ...]:
        """``count`` whole numbers: a list of that many (more may follow), or one number for all."""
        value = self.raw(key)
        if value is None:
            raise ModelError(f"{self.source}: {self._prefix}{key} is missing")
        if not isinstance(value, list | tuple):
            return (self._whole(key, value, least, most),) * count
        if len(value) < count:
            raise ModelError(f"{self.source}: {self._prefix}{key} has {len(value)} entries for {count} layers")
        return tuple([self._whole(key, item, least, most) for item in value[:count]])

    def texts(self, key: str, count: int) -> tuple[str, ...]:
        """A list of ``count`` texts."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) < count or not all(isinstance(item, str) for item in value):
            raise ModelError(
                f"{self.source}: {self._prefix}{key} must be a list of {count} texts, and is {_brief(value)}"
            )
        return tuple(value[:count])

    def _whole(self, key: str, value: object, least: int, most: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or (isinstance(value, bool) and least > 0) or not least <= value <= most:
            wanted = f"it must be a whole number from {least} to {most}"
            raise ModelError(f"{self.source}: {self._prefix}{key} is {_brief(value)}; {wanted}")
        return int(value)


def _brief(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
