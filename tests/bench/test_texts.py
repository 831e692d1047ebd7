"""Prompt texts, and the measure of how many tokens they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import Endpoint, TokenScale, measure_token_scale
from headrace.bench.requests.words import MAX_WORD_CHARS, WORDS
from tests.api.harness import MODEL, serving

TEXTS = PromptTexts()
SEEDS = st.integers(0, 2**53 - 1)


def test_the_words_are_1024_different_short_ones() -> None:
    assert len(set(WORDS)) == 1024
    assert all(word.isascii() and word.islower() and len(word) <= MAX_WORD_CHARS for word in WORDS)


@given(SEEDS, st.integers(1, 3000))
def test_a_text_has_the_wanted_number_of_known_words(seed: int, words: int) -> None:
    text = TEXTS.own(seed, words)
    assert len(text.split(" ")) == words
    assert set(text.split(" ")) <= set(WORDS)


@given(SEEDS, st.integers(1, 200), st.integers(1, 200))
def test_a_seed_gives_one_text_and_a_shorter_one_begins_it(seed: int, first: int, second: int) -> None:
    shorter, longer = sorted((first, second))
    assert TEXTS.own(seed, longer).split()[:shorter] == TEXTS.own(seed, shorter).split()


def test_texts_of_different_seeds_have_no_beginning_in_common() -> None:
    # 4,000 texts are 8.0e6 pairs; two random texts begin with the same 4 words once in 1024**4 = 1.1e12 pairs.
    beginnings = {TEXTS.own(seed, 4) for seed in range(4000)}
    assert len(beginnings) == 4000


def test_every_word_is_used_about_equally_often() -> None:
    text = TEXTS.own(1, 1024 * 400).split()
    counts = [text.count(word) for word in WORDS[::64]]
    # Each is Poisson with mean 400: 16 of them lie within 5 standard deviations but for a chance of 1e-5.
    assert all(abs(count - 400) < 100 for count in counts)


def test_a_shared_key_gives_the_same_bytes_and_another_key_others() -> None:
    assert TEXTS.shared("bank/3", 800) == PromptTexts().shared("bank/3", 800)
    assert TEXTS.shared("bank/3", 800).startswith(TEXTS.shared("bank/3", 100) + " ")
    assert TEXTS.shared("bank/3", 8) != TEXTS.shared("bank/4", 8)
    assert TEXTS.shared("bank/3", 8) != TEXTS.own(3, 8)


def test_another_salt_changes_every_text() -> None:
    other = PromptTexts(salt=1)
    assert other.own(7, 8) != TEXTS.own(7, 8)
    assert other.shared("a", 8) != TEXTS.shared("a", 8)
    assert other.blocks([1], 8, 7, 8) != TEXTS.blocks([1], 8, 7, 8)
    with pytest.raises(ValueError, match="negative"):
        PromptTexts(salt=-1)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_prompts_share_exactly_as_many_blocks_as_their_ids_share(
    first: list[int], second: list[int], block: int
) -> None:
    one = TEXTS.blocks(first, block, 1, block * len(first)).split()
    two = TEXTS.blocks(second, block, 2, block * len(second)).split()
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    assert one[: shared * block] == two[: shared * block]
    if shared < min(len(first), len(second)) and block >= 4:
        # Two different blocks of 4 words are the same once in 1.1e12.
        following = slice(shared * block, (shared + 1) * block)
        assert one[following] != two[following]


def test_a_prompt_ends_inside_its_last_block_or_goes_on_beyond_it_with_text_of_its_own() -> None:
    whole = TEXTS.blocks([5, 6], 10, 1, 20).split()
    assert TEXTS.blocks([5, 6], 10, 1, 13).split() == whole[:13]
    longer, other = TEXTS.blocks([5, 6], 10, 1, 26).split(), TEXTS.blocks([5, 6], 10, 2, 26).split()
    assert longer[:20] == other[:20] == whole
    assert longer[20:] != other[20:]
    assert len(longer) == 26


# -- the scale --------------------------------------------------------------------------------------------

TEMPLATE, PER_MESSAGE, PER_SYSTEM = 11, 4, -3


def tokens_of(content: str) -> int:
    """A tokenizer to which a word with an e in it is two tokens."""
    return sum(1 + ("e" in word) for word in content.split())


ALL_WORDS = tokens_of(" ".join(WORDS)) / 1024
EVERY_FOURTH = tokens_of(" ".join(WORDS[::4])) / 256


def counted(messages: list[dict[str, str]]) -> int:
    """A template with a default system message, which one's own replaces."""
    total = TEMPLATE + sum(tokens_of(message["content"]) for message in messages) + PER_MESSAGE * (len(messages) - 1)
    return total + (PER_SYSTEM - PER_MESSAGE if messages[0]["role"] == "system" else 0)


Answer = Callable[[str, dict[str, object]], object]


class Server:
    """Answers POSTs and counts them. An answer of None is a 404."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.paths: list[str] = []

    async def post(self, path: str, body: dict[str, object]) -> tuple[int, object]:
        self.paths.append(path)
        answer = self.answer(path, body)
        return (404, {"error": {}}) if answer is None else (200, answer)


def like_vllm(path: str, body: dict[str, object]) -> object:
    if path != "/tokenize":
        return None
    if "messages" in body:
        return {"count": counted(body["messages"])}  # type: ignore[arg-type]
    return {"count": tokens_of(str(body["prompt"])) + 1}


def like_llama_server(path: str, body: dict[str, object]) -> object:
    if path == "/apply-template":
        return {"prompt": msgspec.json.encode(body["messages"]).decode()}
    if path != "/tokenize":
        return None
    content = str(body.get("content", ""))
    rendered = content.startswith("[")
    return {"tokens": [0] * (counted(msgspec.json.decode(content)) if rendered else tokens_of(content))}


def like_a_hosted_one(path: str, body: dict[str, object]) -> object:
    if not path.startswith("/v1/"):
        return None
    assert body["max_tokens"] == 1
    count = counted(body["messages"]) if "messages" in body else tokens_of(str(body["prompt"]))  # type: ignore[arg-type]
    return {"usage": {"prompt_tokens": count, "completion_tokens": 1}}


@pytest.mark.parametrize(
    ("answer", "source", "per_word"),
    [
        (like_vllm, "tokenize", ALL_WORDS),
        (like_llama_server, "tokenize", ALL_WORDS),
        (like_a_hosted_one, "usage", EVERY_FOURTH),
    ],
)
async def test_the_scale_of_a_chat_is_measured_whatever_the_server_offers(
    answer: Answer, source: str, per_word: float
) -> None:
    server = Server(answer)
    scale = await measure_token_scale(server.post, model="m")
    assert (scale.source, scale.system_role) == (source, True)
    assert scale.tokens_per_word == per_word
    assert len(server.paths) <= 10
    # Each message of the measuring prompts has 16 words. What they are off the mean rate cannot be told from what
    # the template adds.
    off = tokens_of(" ".join(WORDS[:16])) - 16 * per_word
    assert scale.template_tokens == pytest.approx(TEMPLATE + off)
    assert scale.message_tokens == pytest.approx(PER_MESSAGE + off)
    assert scale.system_tokens == pytest.approx(PER_SYSTEM + off)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_without_any_count_a_word_is_taken_for_a_token_and_the_scale_says_so(endpoint: Endpoint) -> None:
    server = Server(lambda path, body: None)
    assert await measure_token_scale(server.post, model="m", endpoint=endpoint) == TokenScale(source="assumed")


async def test_a_text_completion_is_measured_without_messages() -> None:
    scale = await measure_token_scale(Server(like_vllm).post, model="m", endpoint="completions")
    assert (scale.tokens_per_word, scale.source, scale.message_tokens) == (ALL_WORDS, "tokenize", 0.0)
    assert scale.template_tokens == pytest.approx(max(0, 1 + tokens_of(" ".join(WORDS[:16])) - 16 * ALL_WORDS))


async def test_a_template_that_refuses_a_system_message_is_found_out() -> None:
    def answer(path: str, body: dict[str, object]) -> object:
        messages = body.get("messages", [])
        assert isinstance(messages, list)
        return None if messages and messages[0]["role"] == "system" else like_vllm(path, body)

    scale = await measure_token_scale(Server(answer).post, model="m")
    assert (scale.system_role, scale.system_tokens) == (False, 0.0)


@pytest.mark.parametrize(
    "count", [0, -1, True, "12", None, 5.0, 7], ids=["0", "-1", "true", "text", "null", "float", "always 7"]
)
async def test_a_count_that_is_none_is_not_believed(count: object) -> None:
    server = Server(lambda path, body: {"count": count, "tokens": count, "usage": {"prompt_tokens": count}})
    assert (await measure_token_scale(server.post, model="m")).source == "assumed"


@given(st.floats(0, 1e6), st.floats(0.25, 8))
def test_words_for_tokens_are_off_by_half_a_word_at_most(tokens: float, per_word: float) -> None:
    scale = TokenScale(tokens_per_word=per_word)
    assert abs(scale.words(tokens) - tokens / per_word) <= 0.5
    assert scale.words(-tokens) == 0


async def test_headrace_itself_is_measured_through_its_tokenize(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:

        async def post(path: str, body: dict[str, object]) -> tuple[int, object]:
            answer = await served.client.post(path, json=body)
            return answer.status_code, answer.json()

        scale = await measure_token_scale(post, model=MODEL)
    # Its scripted tokenizer has a token a byte; a word comes with a space before it.
    assert scale.source == "tokenize"
    assert scale.tokens_per_word == sum(len(word) + 1 for word in WORDS) / len(WORDS)
