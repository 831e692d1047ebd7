"""The model's text side, over the real vocabulary."""

from __future__ import annotations

import pytest

from headrace.errors import ContextTooLong
from tests.engines.harness import Model

pytestmark = pytest.mark.model


@pytest.mark.parametrize("add_special", [False, True])
def test_a_long_text_cut_at_special_tokens_gives_the_same_tokens(smollm2: Model, add_special: bool) -> None:
    """Long texts are tokenized in pieces; the pieces' tokens are those of the whole."""
    vocabulary = smollm2.vocabulary
    text = "".join(f"<|im_start|>user\nTell me {n} things, \n\n é流  please<|im_end|>\n" for n in range(900))
    whole = vocabulary._encode_bytes(text.encode(), add_special, True)
    assert len(vocabulary._pieces(text.encode())) > 2
    assert vocabulary.encode(text, add_special=add_special, parse_special=True) == whole


def test_more_than_the_context_holds_is_refused_without_tokenizing_it_all(smollm2: Model) -> None:
    """Before anything is tokenized when the bytes alone are too many, else as soon as it is certain."""
    encode = smollm2.vocabulary.encode
    with pytest.raises(ContextTooLong, match="bytes of prompt cannot fit"):
        encode("a" * 10_000_000, add_special=False, parse_special=True, limit_tokens=8192)
    with pytest.raises(ContextTooLong, match="more than the 8192 tokens"):
        encode("<|im_start|>" * 30_000, add_special=False, parse_special=True, limit_tokens=8192)
