"""What a KV block is called: a digest of everything that its bytes depend on.

A block's KV depends on the model, on how libllama lays it out, and on every token before it. Its address is therefore
a chain: the root stands for model, layout and namespace, and each block's address is the digest of its parent's address
and its own tokens. Equal addresses mean equal content; tokens are compared all the same where a block is used
(``block_tree``, ``block_file``), so that a collision costs a miss and cannot give wrong text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ADDRESS_BYTES: Final = 32

Digest = Callable[[bytes], bytes]
"""A digest of ``ADDRESS_BYTES`` bytes. Handed in, so that tests can make collisions."""

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 1 << 16


def blake2b(data: bytes) -> bytes:
    """The digest that is used."""
    return hashlib.blake2b(data, digest_size=ADDRESS_BYTES).digest()


def _fields(*parts: bytes) -> bytes:
    """Unambiguous: each part after its length."""
    return b"".join([len(part).to_bytes(8, "little") + part for part in parts])


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the bytes of a block mean. ``weights`` identifies the model file, ``build`` the libllama that computed and
    wrote the state, ``layout`` how a state is laid out (layers, row sizes, types: the precision is among them),
    ``adapter`` what changes the weights while serving (empty: nothing). ``rotation``: how many numbers of a row of K,
    and of V, libllama rotates together before it stores them (``kv.quantise``), which the bytes do not show."""

    weights: bytes
    build: str
    layout: bytes
    adapter: str = ""
    rotation: tuple[int, int] = (0, 0)

    def digest(self, digest: Digest = blake2b) -> bytes:
        """Everything in ``ADDRESS_BYTES`` bytes."""
        rotation = b"%d %d" % self.rotation
        return digest(_fields(self.weights, self.build.encode(), self.layout, self.adapter.encode(), rotation))


def weights_identity(path: Path) -> bytes:
    """A digest of a model file's size, time of change and ``_SAMPLES`` samples over its whole length. Reading all of
    it would take a large model's start many seconds; a file changed in place has another time, another model other
    bytes nearly everywhere. A copy of the file with a new time is taken for another model: nothing stored is used then,
    which is safe. Raises OSError."""
    about = path.stat()
    state = hashlib.blake2b(_fields(str(about.st_size).encode(), str(about.st_mtime_ns).encode()), digest_size=32)
    step = max(_SAMPLE_BYTES, about.st_size // _SAMPLES)
    with path.open("rb") as file:
        for start in range(0, about.st_size, step):
            file.seek(start)
            state.update(file.read(_SAMPLE_BYTES))
    return state.digest()


Namespace = tuple[str, str, str | None]
"""Who shares: adapter, kind of sharing, and the tenant (None: nobody in particular)."""


def root_address(fingerprint: bytes, namespace: Namespace, digest: Digest = blake2b) -> bytes:
    """The address that the first blocks of a namespace hang on. The tenant's name cannot be read from it."""
    adapter, sharing, tenant = namespace
    owner = b"" if tenant is None else b"tenant:" + tenant.encode()
    return digest(_fields(b"root", fingerprint, adapter.encode(), sharing.encode(), owner))


def child_address(parent: bytes, tokens: bytes, digest: Digest = blake2b) -> bytes:
    """The address of a block of packed ``tokens`` after ``parent``."""
    return digest(_fields(b"block", parent, tokens))
