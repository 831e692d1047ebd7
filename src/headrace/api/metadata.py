"""Limits of a stored completion's metadata."""

from __future__ import annotations

from headrace.errors import RequestError

MAX_PAIRS = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise RequestError when there are too many pairs or one is too long."""
    if not metadata:
        return
    if len(metadata) > MAX_PAIRS:
        raise RequestError(f"metadata holds {len(metadata)} pairs; at most {MAX_PAIRS} are allowed", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS:
            raise RequestError(
                f"metadata keys hold at most {MAX_KEY_CHARACTERS} characters, values {MAX_VALUE_CHARACTERS}",
                param="metadata",
            )
