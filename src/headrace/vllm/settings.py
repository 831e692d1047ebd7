"""The plug-in's settings: what vLLM was started with, and changes while it serves. Pure.

They come in vLLM's own option, ``--additional-config '{"headrace": {...}}'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs

KEY: Final = "headrace"


class EngineShape(Struct, frozen=True):
    """What vLLM allocated: ``max_num_seqs`` sequences at most, ``max_num_batched_tokens`` in a step, of up to
    ``max_model_len`` tokens each, over ``kv_tokens`` of KV memory."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``knobs`` are ``SchedulingKnobs`` by name, those that differ from the defaults. ``bands`` are
    (max_context_tokens, max_sequences), shortest first; none: one band for all. ``admin_keys`` open the knobs over
    HTTP, each a key, ``env:NAME`` or ``sha256:HEX``."""

    enabled: bool = True
    knobs: dict[str, Any] = {}
    bands: tuple[tuple[int, int], ...] = ()
    admin_keys: tuple[str, ...] = ()


def settings_of(additional_config: object) -> Settings:
    """From vLLM's ``additional_config``. Raises ConfigError."""
    if not isinstance(additional_config, Mapping) or additional_config.get(KEY) is None:
        return Settings()
    try:
        return msgspec.convert(additional_config[KEY], Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=f"--additional-config {KEY}") from error


def first_knobs(settings: Settings, shape: EngineShape) -> SchedulingKnobs:
    """The knobs to start with: a step may hold what vLLM allows unless said otherwise. Raises ConfigError."""
    most = shape.max_num_batched_tokens
    return _knobs(SchedulingKnobs(step_tokens=most, max_prefill_tokens=most), settings.knobs, shape)


def changed(knobs: SchedulingKnobs, changes: Mapping[str, Any], shape: EngineShape) -> SchedulingKnobs:
    """``knobs`` with ``changes`` by name. Raises ConfigError; then nothing is changed."""
    return _knobs(knobs, changes, shape)


def _knobs(base: SchedulingKnobs, changes: Mapping[str, Any], shape: EngineShape) -> SchedulingKnobs:
    values = msgspec.to_builtins(base)
    unknown = sorted(set(changes) - set(values))
    if unknown:
        raise ConfigError(f"no knob has this name; there are {', '.join(sorted(values))}", where=unknown[0])
    try:
        knobs = msgspec.convert({**values, **changes}, SchedulingKnobs)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(str(error), where="knobs") from error
    if knobs.max_num_seqs is None:
        knobs = msgspec.structs.replace(knobs, max_num_seqs=shape.max_num_seqs)
    for name, most in (("max_num_seqs", shape.max_num_seqs), ("step_tokens", shape.max_num_batched_tokens)):
        value = getattr(knobs, name)
        if value is not None and value > most:
            raise ConfigError(f"must be at most {most}, what vLLM was started with, not {value}", where=name)
    return knobs


def bands_of(settings: Settings, shape: EngineShape) -> tuple[Band, ...]:
    """The bands, the last of them up to ``max_model_len``. Raises ConfigError."""
    if not settings.bands:
        return (Band(shape.max_model_len, shape.max_num_seqs),)
    lengths = [length for length, _ in settings.bands]
    if lengths != sorted(set(lengths)) or lengths[0] < 1 or any(count < 1 for _, count in settings.bands):
        raise ConfigError("bands need rising lengths and at least one sequence each", where="bands")
    if lengths[-1] < shape.max_model_len:
        raise ConfigError(f"the last band must hold {shape.max_model_len} tokens, vLLM's max_model_len", where="bands")
    return tuple([Band(min(length, shape.max_model_len), count) for length, count in settings.bands])
