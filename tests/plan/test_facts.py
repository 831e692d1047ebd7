"""Published figures come out of the layouts: every KV figure of the reference facts."""

from __future__ import annotations

from datetime import date

import pytest

from headrace.kv.entry_types import ENTRY_TYPES
from headrace.kv.layout import CacheType, KvLayout
from headrace.plan.architectures import architectures, describe_named
from headrace.plan.circulating import multi_head_bytes_per_token

MIB, GIB = 1 << 20, 1 << 30
MILLION = 1 << 20
"""'1M tokens' of the published figures are 2^20."""
BF16 = CacheType.named("bf16")


def layout(name: str) -> KvLayout:
    return describe_named(name).layout


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "fp8_and_fp4"),
    [
        ("deepseek-v4-pro", 9_848, 5_511, 5_031),
        ("deepseek-v4-flash", 6_880, 3_850, 3_514),
        ("deepseek-v3", 70_272, None, None),
        ("deepseek-v3.2", 85_888, 48_068, None),
    ],
)
def test_bytes_per_token(name: str, bf16: int, fp8: int | None, fp8_and_fp4: int | None) -> None:
    """In bf16, in fp8 with fp8 and with fp4 indexer keys; the facts have whole bytes, cut off."""
    model = layout(name)
    assert model.bytes_per_token(BF16) == bf16
    if fp8 is not None:
        assert int(model.bytes_per_token(CacheType.named("fp8"))) == fp8
    if fp8_and_fp4 is not None:
        assert int(model.bytes_per_token(CacheType.named("fp8", "fp4"))) == fp8_and_fp4


@pytest.mark.parametrize(
    ("name", "said"),
    [("deepseek-v4-pro", 1_748_992), ("deepseek-v4-flash", 704_512), ("deepseek-v3", 1_748_992)],
)
def test_the_multi_head_formula(name: str, said: int) -> None:
    model = describe_named(name)
    assert multi_head_bytes_per_token(model.layers, model.hidden_entries, ENTRY_TYPES["bf16"]) == said


def test_how_wrong_the_multi_head_formula_is() -> None:
    """It overstates V4 by 100 to 350 times, V3 by 25."""

    def times(name: str, types: CacheType) -> float:
        model = describe_named(name)
        said = multi_head_bytes_per_token(model.layers, model.hidden_entries, BF16.kv)
        return float(said / model.layout.bytes_per_token(types))

    assert round(times("deepseek-v3", BF16)) == 25
    assert times("deepseek-v4-flash", BF16) == pytest.approx(102.4, abs=0.05)
    assert times("deepseek-v4-pro", CacheType.named("fp8", "fp4")) == pytest.approx(347.6, abs=0.05)


def test_entries_of_v4_and_v3_2() -> None:
    """One shared head of 512: 1,024 B, 584 B in fp8; an indexer key of 128: 256, 132 and 68 B."""
    rows = {cache.rows[0].form: cache for cache in layout("deepseek-v4-pro").caches}
    sizes = {types: [rows[form].row_bytes(CacheType.named(*types)) for form in ("shared_kv", "index")] for types in (
        ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "fp4"))}  # fmt: skip
    assert list(sizes.values()) == [[1024, 256], [584, 132], [584, 68]]
    latent = layout("deepseek-v3.2").caches[0]
    assert (latent.row_bytes(BF16), latent.row_bytes(CacheType.named("fp8"))) == (1152, 656)


def test_layers_of_v4() -> None:
    """Pro: 30 layers of ratio 4 and 31 of 128; Flash: 21, 20, and 2 with nothing but the window, which all have."""
    for name, layers, of_4, of_128 in (("deepseek-v4-pro", 61, 30, 31), ("deepseek-v4-flash", 43, 21, 20)):
        window, *compressed = layout(name).caches
        assert (window.layers, window.window_tokens) == (layers, 128)
        assert [(cache.every, cache.layers) for cache in compressed] == [(4, of_4), (4, of_4), (128, of_128)]


def test_a_million_tokens() -> None:
    """The published 9.62 GiB (V4) and 83.9 GiB (V3.2) are what grows with tokens; the facts' 9.63 GiB holds the
    compressors' state too, and their 4.92 GiB in fp8 and fp4 lies between what grows and both."""
    pro = layout("deepseek-v4-pro")
    growing = MILLION * pro.bytes_per_token(BF16)
    assert round(float(growing) / GIB, 2) == 9.62
    assert round(float(growing + pro.state_bytes) / GIB, 2) == 9.63
    small = MILLION * pro.bytes_per_token(CacheType.named("fp8", "fp4"))
    assert small / GIB < 4.92 < (small + pro.state_bytes) / GIB
    assert round(float(MILLION * layout("deepseek-v3.2").bytes_per_token(BF16)) / GIB, 1) == 83.9


@pytest.mark.parametrize(("name", "about_mib"), [("deepseek-v4-pro", 16.6), ("deepseek-v4-flash", 10.8)])
def test_the_fixed_state(name: str, about_mib: float) -> None:
    """The facts say 'about': within half a percent. It is the compressors' F32 state, without the window."""
    assert layout(name).state_bytes / MIB == pytest.approx(about_mib, rel=0.005)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),
        ("qwen3-8b", 2 * 36 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 2 * 48 * 4 * 128 * 2),
        ("smollm2-135m", 23_040),
        ("qwen3.5-27b", 2 * 16 * 4 * 256 * 2),
        ("gpt-oss-20b", 2 * 12 * 8 * 64 * 2),
    ],
)
def test_other_models(name: str, bytes_per_token: int) -> None:
    """Layers that keep every token, times KV heads, times their length; SmolLM2's as measured (23 KB a token)."""
    assert layout(name).bytes_per_token(BF16) == bytes_per_token


def test_every_architecture_can_be_sized_and_says_where_it_is_from() -> None:
    """No two names or aliases are alike, dates are dates, and the longest context has a size in every type."""
    names = [name for item in architectures().values() for name in (item.name, *item.aliases)]
    assert len(names) == len(set(names)) >= 20
    for item in architectures().values():
        assert item.source and date.fromisoformat(item.date) > date(2022, 1, 1)
        model = describe_named(item.name.upper())
        assert model.context_tokens
        for kind in ("f32", "f16", "fp8"):
            assert model.layout.sequence_bytes(model.context_tokens, CacheType.named(kind)) > 0
