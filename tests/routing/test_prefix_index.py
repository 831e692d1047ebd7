"""What each replica was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.routing.prefix_index import BLOCK_BYTES, PrefixIndex, block_keys

prompts = st.lists(st.sampled_from("abc"), max_size=6).map(lambda blocks: "".join(b * BLOCK_BYTES for b in blocks))
sendings = st.lists(st.tuples(st.sampled_from(["r0", "r1", "r2"]), prompts), max_size=30)


def shared_blocks(one: str, other: str) -> int:
    count = 0
    for start in range(0, min(len(one), len(other)), BLOCK_BYTES):
        if one[start : start + BLOCK_BYTES] != other[start : start + BLOCK_BYTES]:
            break
        count += 1
    return count


@given(sendings, prompts)
def test_matches_are_the_longest_prefixes_that_were_sent(sent: list[tuple[str, str]], asked: str) -> None:
    """As long as the bound is not reached: exactly what a list of everything sent says."""
    index = PrefixIndex()
    for replica, prompt in sent:
        index.sent(replica, block_keys(prompt.encode()))
        index.check_integrity()
    expected = {
        replica: most
        for replica in ("r0", "r1", "r2")
        if (most := max((shared_blocks(prompt, asked) for name, prompt in sent if name == replica), default=0))
    }
    assert index.matches(block_keys(asked.encode())) == expected


@given(sendings, st.integers(1, 12))
def test_the_bound_holds_and_what_was_used_last_stays(sent: list[tuple[str, str]], most: int) -> None:
    index = PrefixIndex(most)
    for replica, prompt in sent:
        keys = block_keys(prompt.encode())
        index.sent(replica, keys)
        index.check_integrity()
        held = index.matches(keys).get(replica, 0)
        assert held == min(len(keys), most)


def test_a_replica_that_is_gone_matches_nothing() -> None:
    index = PrefixIndex()
    keys = block_keys(b"x" * BLOCK_BYTES * 3)
    index.sent("a", keys)
    index.sent("b", keys)
    index.forget_replica("a")
    index.forget("b", keys[2:])
    assert index.matches(keys) == {"b": 2}


def test_prompts_under_another_salt_have_nothing_in_common() -> None:
    prompt = b"x" * BLOCK_BYTES * 2
    assert not set(block_keys(prompt)) & set(block_keys(prompt, "tenant"))
