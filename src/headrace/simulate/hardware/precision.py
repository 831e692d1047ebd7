"""What weights and KV are stored in, and what is computed with."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from headrace.errors import ConfigError
from headrace.kv.entry_types import INDEX_TYPE_NAMES, KV_TYPE_NAMES
from headrace.kv.layout import CacheType
from headrace.simulate.hardware.profiles import Hardware

WeightType = Literal["f16", "fp8", "fp4"]

WEIGHT_TYPES: Final[tuple[WeightType, ...]] = ("f16", "fp8", "fp4")
WEIGHT_BYTES: Final[dict[WeightType, float]] = {"f16": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 32}
"""Per weight. ``fp4``: 32 of them share a scale of one byte (OCP microscaling formats, MXFP4). Scales of FP8 blocks
(one F32 for 128 x 128) are below 0.1 % and left out."""
ACTIVATION_BYTES: Final = 2.0
"""Between matrices activations are 16-bit."""


class Precision(Struct, frozen=True):
    """``experts``: of routed experts' weights, where they differ (DeepSeek-V4: FP4 experts, the rest FP8). ``kv`` and
    ``index`` are names of ``kv.entry_types``."""

    weights: WeightType = "f16"
    experts: WeightType | None = None
    kv: str = "bf16"
    index: str | None = None

    @property
    def expert_weights(self) -> WeightType:
        return self.weights if self.experts is None else self.experts

    @property
    def cache(self) -> CacheType:
        """Types of KV rows. Raises ConfigError for names that there are not."""
        for name, known in ((self.kv, KV_TYPE_NAMES), (self.index, INDEX_TYPE_NAMES)):
            if name is not None and name not in known:
                raise ConfigError(f"{name!r} is no type of KV rows; known: {', '.join(known)}")
        return CacheType.named(self.kv, self.index)


def arithmetic(hardware: Hardware, stored: WeightType) -> WeightType:
    """What weights of this type are multiplied in. What the hardware has no arithmetic for is widened to the next
    type that it has, as engines' weight-only kernels do: FP4 weights are computed in FP8 on an H100, FP8 weights in
    FP16 on an A100."""
    kinds: list[WeightType] = list(WEIGHT_TYPES[: WEIGHT_TYPES.index(stored) + 1])
    return [kind for kind in kinds if kind in hardware.flops_per_s][-1]
