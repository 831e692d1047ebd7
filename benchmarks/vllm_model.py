"""SmolLM2 as vLLM reads it: the GGUF that headrace fetches, turned into a float32 checkpoint. Needs transformers."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from headrace.models.store import resolve


def checkpoint(folder: Path) -> Path:
    """The checkpoint's folder, made once: weights, configuration and tokenizer of the small model."""
    if (folder / "done").is_file():
        return folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers
        from safetensors.torch import save_file

        gguf = Path(resolve("smollm2"))
        source: dict[str, Any] = {"gguf_file": gguf.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the weights below are plain numbers
    config |= {"dtype": "float32", "torch_dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / "done").touch()
    return folder


if __name__ == "__main__":
    print(checkpoint(Path(sys.argv[1])))
