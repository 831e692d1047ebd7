"""What may be configured about packing. Apart from ``codec_choice``: the gateway reads it without the codecs."""

from __future__ import annotations

from typing import Literal

CodecRule = Literal["auto", "zstd", "none"]
"""``auto``: as measured (``codec_choice``); the others: always, never."""
