"""The KV layout of a GGUF file, as the pinned libllama keeps it.

Which layers have a window or a recurrent state is partly in the metadata and partly in libllama's code, by
architecture; the second part stands here as tables. An architecture that is in none of them keeps every token in
every layer, also where its file names a window: libllama then does so too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelError
from headrace.kv.entry_types import Row
from headrace.kv.layout import Cache, KvLayout, State, attention_rows
from headrace.plan.compressed import compressed_layout
from headrace.plan.described import DescribedModel, UnknownLayout, gathered
from headrace.plan.fields import MOST_LAYERS, MOST_TOKENS, Fields
from headrace.plan.gguf_metadata import GgufMetadata, read_gguf


@dataclass(frozen=True, slots=True)
class _Windows:
    """``period`` layers make a pattern, of which one is full (the first with ``full_first``, else the last). 0: the
    file has the pattern. ``tokens``: the window where the file has none (None: then there is no window). ``fixed``: the
    file's number is not used."""

    period: int
    full_first: bool = False
    tokens: int | None = None
    fixed: bool = False


_WINDOWS: dict[str, _Windows] = {
    "afmoe": _Windows(4),
    "cohere2": _Windows(4),
    "cohere2moe": _Windows(4, full_first=True),
    "exaone-moe": _Windows(4),
    "exaone4": _Windows(4, tokens=4096),
    "gemma2": _Windows(2, tokens=4096),
    "gemma3": _Windows(6),
    "gemma3n": _Windows(5),
    "gemma4": _Windows(0),
    "gpt-oss": _Windows(2),
    "granite_swa": _Windows(0),
    "laguna": _Windows(4, full_first=True),
    "llama4": _Windows(4, tokens=8192, fixed=True),
    "maple": _Windows(0),
    "mellum": _Windows(4),
    "mimo2": _Windows(0),
    "muse-glimmer": _Windows(4),
    "olmo2": _Windows(4),
    "plamo3": _Windows(8),
    "smallthinker": _Windows(4, full_first=True),
    "spark2_5": _Windows(0),
    "step35": _Windows(0),
}
_EXAONE4_LAYERS_WITH_WINDOWS = 64  # libllama's test for the 32B model, the only one that has them
_GEMMA3N_LAYERS_WITH_KV = 20  # the others read these layers' memory

_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
_BY_MISSING_HEADS = {"jamba", "granitehybrid", "plamo2", "lfm2", "lfm2moe", "kimi-linear"}
"""A layer without KV heads is a recurrent one."""
_BY_INTERVAL = {"qwen3next", "qwen35", "qwen35moe"}
"""Every fourth layer (or as the file says) is attention, the others are recurrent."""
_NEMOTRON = {"nemotron_h", "nemotron_h_moe"}
_WITH_INDEXER = {"deepseek32", "glm-dsa"}

_UNKNOWN = {
    "bailingmoe3", "dflash", "dots3note", "eagle3", "gemma4-assistant", "glm5-next", "graniteswitch", "hy_v4",
    "kimi-k3", "minimax-01", "minimax-m3", "nanbeige", "pockettts", "qwen3tts", "qwen4exp",
}  # fmt: skip
"""libllama knows them and keeps their memory in a way of their own that is not written down here."""
_WITHOUT_KV = {
    "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "wavtokenizer-dec",
    "modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1", "clip", "t5encoder",
}  # fmt: skip
_TWO_MEMORIES = {"t5"}


def describe_gguf(path: Path) -> DescribedModel:
    """Read the file and size it. Raises ModelError; UnknownLayout for an architecture that is not known here."""
    metadata = read_gguf(path)
    reader = _Reading(metadata)
    layout = reader.layout()
    name = metadata.values.get("general.name")
    return DescribedModel(
        name=name if isinstance(name, str) and name else path.name,
        architecture=metadata.architecture,
        source=str(path),
        layers=reader.layers,
        hidden_entries=reader.fields.whole("embedding_length"),
        context_tokens=reader.context_tokens,
        parameters=metadata.parameters or None,
        layout=layout,
        notes=tuple(reader.notes),
    )


class _Reading:
    """One file's metadata on the way to a layout."""

    def __init__(self, metadata: GgufMetadata) -> None:
        self._metadata = metadata
        self._arch = metadata.architecture
        self.fields = Fields(str(metadata.path), metadata.values, f"{self._arch}.")
        self.notes: list[str] = []
        self.all_layers = self.fields.whole("block_count", most=MOST_LAYERS)
        drafting = self.fields.whole("nextn_predict_layers", least=0, most=MOST_LAYERS, default=0)
        self.layers = self.all_layers - drafting if drafting < self.all_layers else self.all_layers
        has_context = self.fields.has("context_length")
        self.context_tokens = self.fields.whole("context_length", most=MOST_TOKENS) if has_context else None

    def layout(self) -> KvLayout:
        arch = self._arch
        if arch in _WITHOUT_KV:
            raise UnknownLayout(f"{self.fields.source}: {arch} has no KV memory: it does not generate token by token")
        if arch in _UNKNOWN or arch in _TWO_MEMORIES:
            raise UnknownLayout(
                f"{self.fields.source}: how libllama keeps KV memory of {arch} is not known to headrace"
            )
        if arch == "deepseek4":
            return self._deepseek4()
        if arch in _RECURRENT:
            return gathered([], self._states(self.layers))
        if arch in _BY_MISSING_HEADS | _BY_INTERVAL | _NEMOTRON | {"falcon-h1"}:
            return self._hybrid()
        caches = self._attention(range(self.layers))
        if arch in _WITH_INDEXER:
            caches += self._indexer()
        return gathered(caches)

    # -- attention -----------------------------------------------------------------------------------------

    def _attention(self, layers: range | list[int]) -> list[Cache]:
        """A cache for each of these layers; the window of each is libllama's."""
        window_tokens, windowed = self._windows()
        kv_heads = self._heads("attention.head_count_kv", self._heads("attention.head_count", None))
        holders = self._layers_with_kv()
        caches = []
        for layer in layers:
            if layer >= holders or kv_heads[layer] == 0:
                continue
            inside = windowed[layer] if window_tokens else False
            rows = self._rows(kv_heads[layer], inside)
            name = f"window of {window_tokens} tokens" if inside else "every token"
            caches.append(Cache(name, 1, rows, window_tokens=window_tokens if inside else None))
        return caches

    def _rows(self, kv_heads: int, inside_window: bool) -> tuple[Row, ...]:
        suffix = "_swa" if inside_window else ""
        key = self._head_length("key", suffix)
        if self._is_mla():
            if self._arch in _WITH_INDEXER:
                rope = self.fields.whole("rope.dimension_count", least=0, most=key, default=0)
                return (Row(kv_heads * key, key, "sparse_mla", rope),)
            return (Row(kv_heads * key, key),)
        return attention_rows(kv_heads, key, self._head_length("value", suffix))

    def _is_mla(self) -> bool:
        """Whether the latent is stored (one row for key and value). Old files of MLA models have keys and values
        written out instead, and say so by having no such length."""
        return self.fields.whole("attention.key_length_mla", least=0, default=0) > 0

    def _head_length(self, what: str, suffix: str) -> int:
        fields = self.fields
        heads = max(1, self._heads("attention.head_count", None)[0])
        default = fields.whole("embedding_length") // heads
        plain = fields.whole(f"attention.{what}_length", default=max(1, default))
        return fields.whole(f"attention.{what}_length{suffix}", default=plain)

    def _heads(self, key: str, default: tuple[int, ...] | None) -> tuple[int, ...]:
        if default is not None and not self.fields.has(key):
            return default
        return self.fields.wholes(key, self.layers)

    def _layers_with_kv(self) -> int:
        if self._arch == "gemma3n":
            return min(self.layers, _GEMMA3N_LAYERS_WITH_KV)
        if self._arch == "gemma4":
            shared = self.fields.whole("attention.shared_kv_layers", least=0, most=self.layers, default=0)
            return self.all_layers - shared
        return self.layers

    def _windows(self) -> tuple[int, list[bool]]:
        """The window in tokens (0: none), and for every layer whether it has it."""
        rule, fields = _WINDOWS.get(self._arch), self.fields
        told = fields.whole("attention.sliding_window", least=0, most=MOST_TOKENS, default=0)
        if self._arch in ("lfm2", "lfm2moe"):
            return told, [True] * self.layers
        if rule is None or (self._arch == "exaone4" and self.layers != _EXAONE4_LAYERS_WITH_WINDOWS):
            if told:
                self.notes.append(
                    f"the file names a window of {told} tokens, but libllama keeps all tokens of {self._arch}"
                )
            return 0, []
        if self._arch == "llama4" and fields.has("attention.sliding_window") and told == 0:
            return 0, []
        tokens = rule.tokens or 0 if rule.fixed else told or (rule.tokens or 0)
        if self._arch == "smallthinker" and told:
            tokens = 4096
        elif self._arch == "smallthinker":
            tokens = 0
        return tokens, self._pattern(rule)

    def _pattern(self, rule: _Windows) -> list[bool]:
        key, period = "attention.sliding_window_pattern", rule.period
        if isinstance(self.fields.raw(key), tuple):
            return [bool(item) for item in self.fields.wholes(key, self.layers)]
        if self.fields.has(key):
            period = self.fields.whole(key, least=0, most=MOST_LAYERS)
        elif period == 0:
            raise ModelError(f"{self.fields.source}: {self._arch}.{key} is missing")
        full = 0 if rule.full_first else period - 1
        return [period == 0 or layer % period != full for layer in range(self.layers)]

    def _indexer(self) -> list[Cache]:
        """The keys of the sparse attention's indexer, one head in each layer that has one."""
        entries = self.fields.whole("attention.indexer.key_length")
        count = self.layers
        if self._arch == "glm-dsa" and self.fields.has("attention.indexer.types"):
            count = sum(map(bool, self.fields.wholes("attention.indexer.types", self.layers)))
        return [Cache("indexer keys", count, (Row(entries, entries, "index"),))]

    # -- states --------------------------------------------------------------------------------------------

    def _hybrid(self) -> KvLayout:
        recurrent, attending = self._kinds()
        return gathered(self._attention(attending), self._states(len(recurrent)))

    def _kinds(self) -> tuple[list[int], list[int]]:
        """The recurrent layers and the attending ones."""
        every = list(range(self.layers))
        if self._arch == "falcon-h1":
            return every, every
        if self._arch in _BY_INTERVAL:
            if isinstance(self.fields.raw("attention.recurrent_layers"), tuple):
                marked = [bool(item) for item in self.fields.wholes("attention.recurrent_layers", self.layers)]
            else:
                interval = self.fields.whole("full_attention_interval", most=MOST_LAYERS, default=4)
                marked = [(layer + 1) % interval != 0 for layer in every]
            return [i for i in every if marked[i]], [i for i in every if not marked[i]]
        kv_heads = self.fields.wholes("attention.head_count_kv", self.layers)
        if self._arch in _NEMOTRON:
            mixing = [ff == 0 for ff in self.fields.wholes("feed_forward_length", self.layers)]
            return (
                [i for i in every if mixing[i] and kv_heads[i] == 0],
                [i for i in every if mixing[i] and kv_heads[i] > 0],
            )
        return [i for i in every if kv_heads[i] == 0], [i for i in every if kv_heads[i] > 0]

    def _states(self, layers: int) -> list[State]:
        """What a recurrent layer keeps: the last inputs of its convolution (or token shift) and its state."""
        fields, width = self.fields, self.fields.whole("embedding_length")
        if fields.has("wkv.head_size"):
            shifts = fields.whole("token_shift_count", default=2)
            return [
                State("token shift", layers, shifts * width),
                State("recurrent state", layers, width * fields.whole("wkv.head_size")),
            ]
        if fields.has("shortconv.l_cache"):
            return [State("convolution", layers, width * (fields.whole("shortconv.l_cache") - 1))]
        kernel = fields.whole("ssm.conv_kernel", least=0, default=0)
        if fields.has("kda.head_dim"):
            head, heads = fields.whole("kda.head_dim"), self._heads("attention.head_count", None)[0]
            return [
                State("convolution", layers, 3 * (kernel - 1 if kernel else 3) * heads * head),
                State("recurrent state", layers, head * head * heads),
            ]
        inner, state = fields.whole("ssm.inner_size"), fields.whole("ssm.state_size")
        groups = fields.whole("ssm.group_count", least=0, default=0)
        return [
            State("convolution", layers, max(0, kernel - 1) * (inner + 2 * groups * state)),
            State("recurrent state", layers, state * inner),
        ]

    # -- DeepSeek-V4 ---------------------------------------------------------------------------------------

    def _deepseek4(self) -> KvLayout:
        fields = self.fields
        if f"blk.{self.layers}.nextn.eh_proj.weight" not in self._metadata.tensors:
            self.layers = self.all_layers  # as libllama does: without its tensors there is no drafting layer
        ratios = fields.wholes("attention.compress_ratios", self.all_layers, most=MOST_TOKENS)
        return compressed_layout(
            ratios=ratios[: self.layers],
            drafting_layers=self.all_layers - self.layers,
            window_tokens=fields.whole("attention.sliding_window", most=MOST_TOKENS),
            head_entries=self._head_length("key", ""),
            rope_entries=fields.whole("rope.dimension_count", least=0, default=0),
            index_entries=fields.whole("attention.indexer.key_length"),
            source=fields.source,
        )
