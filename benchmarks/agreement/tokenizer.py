"""A tokenizer folder for Hugging Face programs, made of a GGUF file's own vocabulary: nothing is downloaded.

    python -m benchmarks.agreement.tokenizer MODEL.gguf FOLDER

For models whose ``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE) and whose pre-tokenizer is SmolLM's: each
digit by itself, then GPT-2's pattern.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader

_CONTROL = 3
"""GGUF's token type of the tokens that stand for no text."""


def tokenizer_json(reader: GGUFReader) -> dict[str, Any]:
    """The contents of ``tokenizer.json``. Raises ValueError for another kind of tokenizer."""

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    kind = (field("model"), field("pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer is {kind}; this script writes ('gpt2', 'smollm')")
    tokens: list[str] = field("tokens")
    control = [place for place, kind in enumerate(field("token_type")) if kind == _CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": place,
                "content": tokens[place],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for place in control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": field("merges"),
        },
    }


def main() -> None:
    """Write the folder."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.agreement.tokenizer MODEL.gguf FOLDER")
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    contents = tokenizer_json(GGUFReader(source))
    (folder / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
