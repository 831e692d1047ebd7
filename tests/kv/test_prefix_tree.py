"""The tree against a plain dictionary of token lists: the longest common prefix is exact, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv import prefix_tree
from headrace.kv.prefix_tree import PrefixTree, Watch
from headrace.kv.token_blocks import BLOCK_BYTES, KV_BLOCK_TOKENS, block_at, common_tokens, packed
from tests.kv.sequences_of_runs import SEQUENCES, common_length

NAMESPACES = st.sampled_from(("a", "b"))
HOLDERS = st.integers(0, 5)


class TreeMachine(RuleBasedStateMachine):
    """Holders come, grow, shrink, change their name and go, while prompts wait."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[int] = PrefixTree()
        self.held: dict[int, tuple[str, list[int]]] = {}
        self.watches: list[tuple[Watch[int], list[int]]] = []
        self.told: dict[Watch[int], int] = {}

    @rule(holder=HOLDERS, namespace=NAMESPACES, tokens=SEQUENCES)
    def add(self, holder: int, namespace: str, tokens: list[int]) -> None:
        if holder in self.held:
            with pytest.raises(ValueError, match="already"):
                self.tree.add(holder, namespace, tokens)
            return
        self.tree.add(holder, namespace, tokens)
        self.held[holder] = (namespace, tokens)

    @precondition(lambda self: self.watches)
    @rule(holder=HOLDERS, data=st.data())
    def add_prefix(self, holder: int, data: st.DataObject) -> None:
        watch, prompt = data.draw(st.sampled_from(self.watches))
        if holder in self.held:
            return
        tokens = data.draw(st.integers(0, len(prompt)))
        with pytest.raises(ValueError, match="tokens, not"):
            self.tree.add_prefix(holder, watch, len(prompt) + 1)
        self.tree.add_prefix(holder, watch, tokens)
        self.held[holder] = (str(watch.namespace), prompt[:tokens])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=SEQUENCES)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        self.tree.extend(holder, tokens)
        namespace, before = self.held[holder]
        self.held[holder] = (namespace, before + tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        namespace, before = self.held[holder]
        tokens = data.draw(st.integers(0, len(before)))
        with pytest.raises(ValueError, match="tokens, not"):
            self.tree.truncate(holder, len(before) + 1)
        self.tree.truncate(holder, tokens)
        self.held[holder] = (namespace, before[:tokens])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), new=HOLDERS)
    def rename(self, data: st.DataObject, new: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        if new in self.held:
            with pytest.raises(ValueError, match="already"):
                self.tree.rename(holder, new)
            return
        self.tree.rename(holder, new)
        self.held[new] = self.held.pop(holder)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        one, other = data.draw(st.permutations(sorted(self.held)))[:2]
        self.tree.exchange(one, other)
        self.held[one], self.held[other] = self.held[other], self.held[one]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        self.tree.remove(holder)
        del self.held[holder]
        with pytest.raises(KeyError):
            self.tree.remove(holder)

    @rule(namespace=NAMESPACES, tokens=SEQUENCES)
    def watch(self, namespace: str, tokens: list[int]) -> None:
        self.watches.append((self.tree.watch(f"w{len(self.watches)}", namespace, tokens), tokens))

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.watches) - 1))
        watch, _ = self.watches.pop(index)
        self.tree.unwatch(watch)
        self.told.pop(watch, None)
        with pytest.raises(KeyError):
            self.tree.unwatch(watch)

    @invariant()
    def lengths_and_sharing_agree(self) -> None:
        assert self.tree.check_integrity() is None
        assert sorted(self.tree.holders()) == sorted(self.held) and len(self.tree) == len(self.held)
        for holder, (namespace, tokens) in self.held.items():
            assert holder in self.tree
            assert self.tree.tokens(holder) == len(tokens) and self.tree.namespace(holder) == namespace
            others = [t for other, (n, t) in self.held.items() if other != holder and n == namespace]
            shared = max([common_length(tokens, other) for other in others], default=0)
            assert self.tree.shared_tokens(holder) == shared // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        distinct = {
            (namespace, tuple(tokens[:end]))
            for namespace, tokens in self.held.values()
            for end in range(KV_BLOCK_TOKENS, len(tokens) + 1, KV_BLOCK_TOKENS)
        }
        assert self.tree.blocks == len(distinct)

    @invariant()
    def matches_are_exact_and_longest_first(self) -> None:
        for watch, prompt in self.watches:
            found = list(self.tree.matches(watch))
            expected = {h: common_length(prompt, t) for h, (n, t) in self.held.items() if n == watch.namespace}
            assert {match.holder: match.tokens for match in found} == expected
            assert len(found) == len(expected)
            assert [match.tokens for match in found] == sorted(expected.values(), reverse=True)

    @invariant()
    def whoever_waits_is_told_of_every_change(self) -> None:
        for watch in self.tree.take_moved():
            self.told[watch] = watch.cached_tokens
        for watch, prompt in self.watches:
            longest = max([common_length(prompt, t) for n, t in self.held.values() if n == watch.namespace], default=0)
            whole = longest // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
            assert self.told[watch] == watch.cached_tokens == min(whole, max(0, len(prompt) - 1))
            assert self.tree.cached_tokens(watch.namespace, prompt) == watch.cached_tokens
        assert len(self.told) == len(self.watches)

    def teardown(self) -> None:
        for holder in self.held:
            self.tree.remove(holder)
        for watch, _ in self.watches:
            self.tree.unwatch(watch)
        assert self.tree.blocks == 0 and not self.tree._roots and self.tree.check_integrity() is None


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(SEQUENCES, SEQUENCES)
def test_common_tokens_of_packed_sequences_are_those_of_the_lists(one: list[int], other: list[int]) -> None:
    """Comparing bytes gives whole tokens: a token that agrees in three of its four bytes is another token."""
    assert common_tokens(packed(one), packed(other)) == common_length(one, other)
    high = [token << 24 | 5 for token in other]
    assert common_tokens(packed([5, *one]), packed(high)) == common_length([5, *one], high)
    assert common_tokens(packed([1, 0]), packed([1, -(2**31)])) == 1


class AllAlike(bytes):
    """A block whose hash is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_colliding_hashes_cost_time_and_never_give_another_prompts_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one hash for all blocks, blocks that differ in one token stay apart."""
    monkeypatch.setattr(prefix_tree, "block_at", lambda data, depth: AllAlike(block_at(data, depth)))
    tree: PrefixTree[int] = PrefixTree()
    first = [1] * (2 * KV_BLOCK_TOKENS)
    for holder in range(20):
        changed = list(first)
        changed[holder * 12] = 2
        tree.add(holder, "", changed)
    assert {hash(block) for block in tree._roots[""].children} == {7}
    for holder in range(20):
        changed = list(first)
        changed[holder * 12] = 2
        best = next(iter(tree.matches(tree.watch("w", "", changed))))
        assert (best.holder, best.tokens) == (holder, len(first))
    longest = max(match.tokens for match in tree.matches(tree.watch("w", "", first)))
    assert longest == 19 * 12
    assert tree.check_integrity() is None


def test_a_namespace_neither_gives_nor_shows_anything_to_another() -> None:
    """The same prompt under another tenant's salt matches nothing, before and after the first one's blocks exist."""
    tree: PrefixTree[int] = PrefixTree()
    prompt = list(range(1000))
    other = tree.watch("other", ("model", "tenant b"), prompt)
    tree.take_moved()
    tree.add(0, ("model", "tenant a"), prompt)
    assert tree.take_moved() == []
    assert list(tree.matches(other)) == [] and other.cached_tokens == 0
    own = tree.watch("own", ("model", "tenant a"), prompt)
    assert [match.tokens for match in tree.matches(own)] == [1000]
    assert own.cached_tokens == 896


def test_a_decoded_token_touches_the_tree_only_when_it_completes_a_block() -> None:
    """Of 128 decoded tokens one makes a node; the others only grow the tail."""
    tree: PrefixTree[int] = PrefixTree()
    tree.add(0, "", range(130))
    for token in range(125):
        tree.extend(0, (token,))
        assert tree.blocks == 1
    tree.extend(0, (125,))
    assert tree.blocks == 2 and tree.tokens(0) == 256


def test_integrity_names_each_kind_of_damage() -> None:
    """The self-check can fail."""

    def grown() -> PrefixTree[int]:
        tree: PrefixTree[int] = PrefixTree()
        tree.add(0, "", range(300))
        tree.add(1, "", range(200))
        tree.watch("w", "", range(290))
        return tree

    assert grown().check_integrity() is None
    tree = grown()
    tree._held[0].nodes[1].holders.clear()
    assert "not among the holders" in (tree.check_integrity() or "")
    tree = grown()
    tree._held[1].nodes[0].holders.add(9)
    assert "does not know it" in (tree.check_integrity() or "")
    tree = grown()
    tree._held[0].nodes.reverse()
    assert "does not follow" in (tree.check_integrity() or "")
    tree = grown()
    tree._held[0].tail += bytes(BLOCK_BYTES)
    assert "outside the tree" in (tree.check_integrity() or "")
    tree = grown()
    tree._blocks += 1
    assert "blocks counted" in (tree.check_integrity() or "")
    tree = grown()
    next(iter(tree._watches)).node = tree._roots[""]
    assert "does not rest" in (tree.check_integrity() or "")
    tree = grown()
    tree._watches.clear()
    assert "watches counted" in (tree.check_integrity() or "")
    tree = grown()
    tree._held[0].root = tree._held[0].nodes[0]
    assert "not its namespace's" in (tree.check_integrity() or "")
    tree = grown()
    tree._roots["other"] = type(tree._roots[""])(b"", None)
    assert "no holder" in (tree.check_integrity() or "")
