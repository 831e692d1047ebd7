"""The matrices of models add up to what their publishers say."""

from __future__ import annotations

import pytest

from headrace.plan.architectures import architectures
from headrace.plan.described import UnknownLayout
from headrace.simulate.hardware.matrices import matrices_of

_NOT_KNOWN = {"nemotron-3-nano-30b-a3b", "qwen3.5-27b", "qwen3.5-397b-a17b"}


@pytest.mark.parametrize("name", sorted(set(architectures()) - _NOT_KNOWN))
def test_weights_of_every_known_architecture_are_as_many_as_published(name: str) -> None:
    """Publishers round: 120 billion are 116.8, and 1.6 trillion 1.57. Hence 5 %."""
    found = architectures()[name]
    matrices = matrices_of(found.config, name)
    assert 0 < matrices.active_parameters <= matrices.parameters
    if found.parameters is not None:
        assert matrices.parameters == pytest.approx(found.parameters, rel=0.05)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("deepseek-v4-pro", 49e9),
        ("deepseek-v4-flash", 13e9),
        ("deepseek-v3", 37e9),
        ("qwen3-30b-a3b", 3.3e9),
        ("qwen3-235b-a22b", 22e9),
        ("gpt-oss-120b", 5.1e9),
    ],
)
def test_weights_that_a_token_meets_are_as_many_as_published(name: str, active: float) -> None:
    """The published figures count the embedding's table in some of them and not in others: 10 %."""
    assert matrices_of(architectures()[name].config, name).active_parameters == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize("name", sorted(_NOT_KNOWN))
def test_what_is_not_known_is_refused(name: str) -> None:
    """Recurrent layers are not taken for attention."""
    with pytest.raises(UnknownLayout, match="not known"):
        matrices_of(architectures()[name].config, name)


def test_a_tied_vocabulary_counts_once() -> None:
    """SmolLM2's head is its embedding table; Llama's is not."""
    tied = matrices_of(architectures()["smollm2-135m"].config, "smollm2-135m")
    apart = matrices_of(architectures()["llama-3.1-8b"].config, "llama-3.1-8b")
    assert tied.embedding_weights == 0
    assert apart.embedding_weights == 128_256 * 4_096
