"""One band's libllama context: streams of KV memory and the batch that is decoded over them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engines.llama.convert_state import GGML_TYPES
from headrace.engines.llama.interrupt import Interrupt
from headrace.engines.llama.library import Library
from headrace.engines.llama.sampling import Logits, logits_at
from headrace.engines.llama.weights import Weights
from headrace.errors import EngineError
from headrace.kv.band_layout import micro_batch_tokens
from headrace.scheduling.bands import Band

PROMPT_OUTPUT_CHUNK_TOKENS = 64
"""Chunk limit of a sequence that wants logits at every prompt position (echo with logprobs): the logits
buffer grows to the largest step and is never given back."""
_MAX_VIEWS = 4096
_CUT = 2
"""``llama_decode``'s code for a pass that the abort callback ended."""
_PADDING_TOKEN = 0


class Batch:
    """Tokens for one decode call, written into arrays that libllama reads.

    Entries must be added in ascending stream order: libllama puts only consecutive streams into one
    micro-batch.
    """

    def __init__(self, api: Any, capacity: int) -> None:
        self._tokens: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._positions: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._streams: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._outputs: npt.NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._one: npt.NDArray[np.int32] = np.ones(capacity, np.int32)
        base = self._streams.ctypes.data
        self._stream_pointers: npt.NDArray[np.uint64] = np.arange(capacity, dtype=np.uint64) * np.uint64(4) + np.uint64(
            base
        )
        self.native = api.llama_batch()

        def pointer(name: str, array: npt.NDArray[Any]) -> None:
            field_type = dict(api.llama_batch._fields_)[name]
            setattr(self.native, name, ctypes.cast(array.ctypes.data, field_type))

        pointer("token", self._tokens)
        pointer("pos", self._positions)
        pointer("n_seq_id", self._one)
        pointer("seq_id", self._stream_pointers)
        pointer("logits", self._outputs)
        self.size = 0

    def clear(self) -> None:
        """Forget all entries."""
        self.size = 0

    def add_one(self, token: int, position: int, stream: int) -> int:
        """Add a token whose logits are wanted; returns its index for ``Context.logits``."""
        index = self.size
        self._tokens[index] = token
        self._positions[index] = position
        self._streams[index] = stream
        self._outputs[index] = 1
        self.size = index + 1
        return index

    def add_padding(self, position: int, stream: int) -> None:
        """Add a row whose result nobody wants, so that streams are consecutive."""
        self._outputs[self.add_one(_PADDING_TOKEN, position, stream)] = 0

    def add_chunk(self, tokens: list[int], position: int, stream: int, *, last_output: bool, all_outputs: bool) -> int:
        """Add consecutive tokens of one stream; logits of the last one or of all if asked. Returns the index
        of the chunk's last token."""
        start, end = self.size, self.size + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self._streams[start:end] = stream
        self._outputs[start:end] = 1 if all_outputs else 0
        if last_output:
            self._outputs[end - 1] = 1
        self.size = end
        return end - 1

    def finish(self) -> Any:
        """The libllama batch over everything added."""
        self.native.n_tokens = self.size
        return self.native


class Context:
    """A libllama context with ``band.max_sequences`` streams of ``band.max_context_tokens`` cells each, or one pool of
    as many cells for all of them (a paged band). A pool cannot run out while every stream keeps to its length."""

    def __init__(self, library: Library, weights: Weights, band: Band, *, step_tokens: int, threads: int) -> None:
        """Raises EngineError when libllama cannot allocate the memory."""
        self._api = library.api
        self._vocab_size = weights.vocab_size
        self._library = library
        params = self._api.llama_context_default_params()
        params.n_ctx = band.max_context_tokens * band.max_sequences
        params.n_seq_max = band.max_sequences
        params.n_batch = max(step_tokens, band.max_sequences)
        params.n_ubatch = min(micro_batch_tokens(band.layout), params.n_batch)
        params.n_threads = threads
        params.n_threads_batch = threads
        params.kv_unified = band.pooled
        params.type_k = params.type_v = GGML_TYPES[band.kv_dtype]
        if band.kv_dtype != "f16":
            # Quantised V is only read by flash attention. Asked for by name, libllama refuses where it has none,
            # instead of deciding by itself.
            params.flash_attn_type = self._api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        self.handle: Any = self._api.llama_init_from_model(weights.handle, params)
        if not self.handle:
            raise EngineError(
                f"libllama cannot create a context of {band.max_sequences} x {band.max_context_tokens} tokens "
                f"at {band.kv_dtype}: "
                f"{library.recent_log() or 'no reason given'}"
            )
        self._logits_address = library.address_of_logits()
        self._views: dict[int, Logits] = {}
        self._memory = self._api.llama_get_memory(self.handle)
        self._threads = threads
        self.batch = Batch(self._api, params.n_batch)
        self._interrupt = Interrupt(self._api)
        self._scratch = memoryview(bytearray())
        self.capacity_tokens = int(params.n_batch)
        self.micro_batch_tokens = int(params.n_ubatch)
        self.band = band
        stateful = self._api.llama_model_is_recurrent(weights.handle) or self._api.llama_model_is_hybrid(weights.handle)
        self.can_remove_last = not stateful
        """Whether a stream's last positions can be taken back. A recurrent state cannot be unrolled."""

    def close(self) -> None:
        if self.handle:
            self._api.llama_free(self.handle)
            self.handle = None

    @property
    def threads(self) -> int:
        """Threads that the next call computes with."""
        return self._threads

    def set_threads(self, threads: int) -> None:
        """Compute with ``threads`` threads from the next call on."""
        if threads != self._threads:
            self._api.llama_set_n_threads(self.handle, threads, threads)
            self._threads = threads

    def decode(self, cut: Callable[[], bool] | None = None) -> bool:
        """Run one forward pass over the batch. Raises EngineError with libllama's code and log.

        ``cut`` is asked about every 2 ms; when it says True, the pass ends without results, its streams are as
        before, and the answer is False. Never asked where streams could not be restored (``can_remove_last``).
        """
        batch = self.batch.finish()
        if cut is None or not self.can_remove_last:
            code = self._api.llama_decode(self.handle, batch)
        else:
            with self._interrupt.watching(self.handle, cut):
                code = self._api.llama_decode(self.handle, batch)
            if code == _CUT:
                return False
        if code != 0:
            raise EngineError(
                f"llama_decode returned {code} for {self.batch.size} tokens: "
                f"{self._library.recent_log() or 'no reason given'}"
            )
        self._api.llama_synchronize(self.handle)  # accelerators compute in the background: times are to be true
        return True

    def logits(self, index: int) -> Logits:
        """Logits of batch entry ``index`` of the last call: a view of shape (vocab_size,), valid until the
        next call."""
        address = self._logits_address(self.handle, index)
        if not address:
            raise EngineError(f"libllama has no logits for batch entry {index}")
        view = self._views.get(address)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()  # libllama moved its buffer: the old rows are of no use
            view = self._views[address] = logits_at(address, self._vocab_size)
        return view

    def clear_stream(self, stream: int) -> None:
        """Forget everything a stream holds."""
        self._api.llama_memory_seq_rm(self._memory, stream, -1, -1)

    def take_back(self, stream: int, position: int) -> bool:
        """Forget what a stream holds from ``position`` on. False when libllama cannot; the stream then holds something
        undefined and must be cleared."""
        return bool(self._api.llama_memory_seq_rm(self._memory, stream, position, -1))

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let an empty stream of a pool hold the first ``tokens`` cells of another one: nothing is copied. Only in a
        paged band."""
        self._api.llama_memory_seq_cp(self._memory, source, target, 0, tokens)

    def begins_at_0(self, stream: int) -> bool:
        """Whether a stream still has its first position. Memory with a sliding window gives cells outside of it to
        others: what is then left after ``take_back`` may lack cells inside the window of the new end."""
        return int(self._api.llama_memory_seq_pos_min(self._memory, stream)) == 0

    def stream_tokens(self, stream: int) -> int:
        """How many positions libllama itself says a stream holds."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, stream)) + 1

    def save_stream(self, stream: int, *, reuse: bool = False, into: memoryview | None = None) -> memoryview:
        """A stream's state as libllama writes it; with ``reuse`` in a buffer that the next such call overwrites (new
        memory costs more than the copy), or ``into`` the caller's, if it is large enough. Raises EngineError."""
        size = int(self._api.llama_state_seq_get_size(self.handle, stream))
        # Not a bytearray: that would be filled with zeros first, at the cost of the copy itself.
        if into is not None and len(into) >= size:
            data = into[:size]
        else:
            data = self.scratch(size) if reuse else np.empty(size, np.uint8).data
        target = (ctypes.c_uint8 * size).from_buffer(data)
        written = self._api.llama_state_seq_get_data(self.handle, target, size, stream)
        if written != size:
            raise EngineError(f"libllama wrote {written} of {size} bytes of stream {stream}'s state")
        return data

    def scratch(self, size: int) -> memoryview:
        """A buffer of ``size`` bytes that the next caller overwrites."""
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.uint8).data
        return self._scratch[:size]

    def load_stream(self, stream: int, data: bytearray | memoryview) -> bool:
        """Fill a stream from the bytes of ``save_stream``; False when libllama refuses them, in which case the
        stream must be cleared."""
        source = (ctypes.c_uint8 * len(data)).from_buffer(data)
        return bool(self._api.llama_state_seq_set_data(self.handle, source, len(data), stream))
