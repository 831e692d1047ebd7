"""Step times from a data sheet: each matrix and each attention takes what its arithmetic or its bytes take, whichever
is longer (S. Williams, A. Waterman, D. Patterson, Roofline, 2009), and the collectives between them take their own.

Parallelism as vLLM has it: ``tensor`` ranks share heads and the inner width of feed-forward layers and sum twice a
layer; ``data`` ranks have sequences of their own; with ``expert`` routed experts lie whole on all ranks of both, and
tokens travel to them and back. Not modelled: pipelines of layers, overlap of communication and arithmetic, tiles and
waves of kernels.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from headrace.errors import ConfigError
from headrace.plan.architectures import Architecture
from headrace.plan.config_layout import describe_fields
from headrace.simulate.hardware.attention import Attended, attended_of
from headrace.simulate.hardware.efficiency import Efficiency
from headrace.simulate.hardware.kernels import Kernels
from headrace.simulate.hardware.links import all_reduce_s, all_to_all_s
from headrace.simulate.hardware.matrices import Experts, Matrix, matrices_of
from headrace.simulate.hardware.precision import ACTIVATION_BYTES, WEIGHT_BYTES, Precision, WeightType, arithmetic
from headrace.simulate.hardware.profiles import Hardware
from headrace.simulate.hardware.work import Chunk, Work


class Parallel(Struct, frozen=True):
    """``tensor`` x ``data`` ranks, one accelerator each."""

    tensor: int = 1
    data: int = 1
    expert: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.data


_ONE_RANK: Final = Parallel()
_PLAIN: Final = Precision()
_DEFAULT: Final = Efficiency()


class Roofline:
    """``scheduling.step.StepTimes`` of one replica: ``architecture`` on ``parallel.ranks`` of ``hardware``.

    ``kernels``: measured ones, used where they reach. ``source`` says what it was made of. Raises ModelError for an
    architecture whose arithmetic is not known, ConfigError for a parallelism that it does not divide into, or more
    ranks than a node has.
    """

    def __init__(
        self,
        hardware: Hardware,
        architecture: Architecture,
        *,
        parallel: Parallel = _ONE_RANK,
        precision: Precision = _PLAIN,
        efficiency: Efficiency = _DEFAULT,
        kernels: Kernels | None = None,
    ) -> None:
        where = f"{architecture.name} on {hardware.name}"
        described = describe_fields(
            architecture.config, name=architecture.name, source=architecture.source, parameters=architecture.parameters
        )
        self.hardware, self.parallel, self.precision, self.efficiency = hardware, parallel, precision, efficiency
        self.layout = described.layout
        self.matrices = matrices_of(architecture.config, architecture.source)
        self.attended = attended_of(architecture.config, described.layout, precision.cache, architecture.source)
        self._hidden = described.hidden_entries
        self._layers = described.layers
        heads = max([term.heads for term in self.attended], default=1)
        if min(parallel.tensor, parallel.data) < 1 or heads % parallel.tensor:
            raise ConfigError(f"{where}: {heads} heads do not divide among {parallel.tensor} ranks")
        if parallel.ranks > hardware.per_node:
            raise ConfigError(f"{where}: {parallel.ranks} ranks, and a node has {hardware.per_node}")
        if parallel.expert and self.matrices.experts is None:
            raise ConfigError(f"{where}: the model has no experts to lay out in parallel")
        self.source = (
            f"roofline of {architecture.name} ({precision.weights}) on {parallel.ranks} x {hardware.label}, "
            f"calibration: {efficiency.source}"
        )
        self._kernels = kernels
        self._heads_measured = None if kernels is None else _plain_heads(architecture, self.attended, parallel.tensor)
        if kernels is not None:
            self.source += f", {kernels.source}"
        self._memory_bytes_per_s = hardware.memory_bytes_per_s * efficiency.memory
        self._attention_flops_per_s = hardware.flops_per_s["f16"] * efficiency.compute
        self._rows_s: dict[int, float] = {}
        self._sampled_s: dict[int, float] = {}

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass of which only the sums are known (``Work.of_call`` says what is assumed)."""
        if not pairs:
            return self._pass_s(rows, rows, rows, rows, context_tokens, ())
        work = Work.of_call(rows, context_tokens, pairs)
        return self.pass_s(work)

    def pass_s(self, work: Work) -> float:
        """One forward pass."""
        return self._pass_s(work.rows, work.sampled, work.sequences, work.decodes, work.context_tokens, work.chunks)

    def move_s(self, tokens: int, band: int) -> float:
        """Copying a sequence's KV within the memory: read and written."""
        return 2 * self.layout.sequence_bytes(tokens, self.precision.cache) / self._memory_bytes_per_s

    @property
    def weight_bytes(self) -> float:
        """Weights that each rank holds."""
        tensor, experts = self.parallel.tensor, self.matrices.experts
        size = self.matrices.embedding_weights * ACTIVATION_BYTES / tensor
        for matrix in self.matrices.dense:
            size += matrix.layers * matrix.weights * self._bytes_of(matrix) / (1 if matrix.replicated else tensor)
        if experts is not None:
            ranks = self.parallel.ranks if self.parallel.expert else tensor
            weights = experts.layers * experts.count * experts.weights
            size += weights * WEIGHT_BYTES[self.precision.expert_weights] / ranks
        return size

    def kv_bytes_per_token(self) -> float:
        """Of each rank that has the sequence, for sequences beyond every window."""
        tensor, total = self.parallel.tensor, 0.0
        for term, cache in zip(self.attended, self.layout.caches, strict=True):
            if cache.window_tokens is None:
                total += term.layers * term.row_bytes / term.every / min(tensor, term.row_parts)
        return total

    def kv_tokens(self, utilisation: float = 0.9, reserve_bytes: float = 2e9) -> int:
        """Tokens of KV that the replica has room for: what ``utilisation`` of the memory leaves beside weights and
        ``reserve_bytes`` of work memory, on all data ranks together. 0 where the weights do not fit."""
        left = self.hardware.memory_bytes * utilisation - self.weight_bytes - reserve_bytes
        return max(0, int(left / self.kv_bytes_per_token())) * self.parallel.data

    def _pass_s(
        self, rows: int, sampled: int, sequences: int, decodes: int, context_tokens: int, chunks: tuple[Chunk, ...]
    ) -> float:
        if rows <= 0:
            return 0.0
        data = self.parallel.data
        share = -(-rows // data)
        rows_s = self._rows_s.get(rows)
        if rows_s is None:
            rows_s = self._rows_s[rows] = self._matrices_s(share, rows) + self._collectives_s(share)
        busiest = -(-sampled // data)
        sampled_s = self._sampled_s.get(busiest)
        if sampled_s is None:
            sampled_s = self._sampled_s[busiest] = self._head_s(busiest)
        attention_s = self._decode_s(decodes, context_tokens) if decodes else 0.0
        for chunk in chunks:
            attention_s += self._chunk_s(chunk)
        own = self.efficiency
        total_s = rows_s + sampled_s + attention_s / data + own.step_s + own.sequence_s * sequences
        return max(total_s, own.eager_s) if chunks else total_s

    def _decode_s(self, decodes: int, context_tokens: int) -> float:
        mean = context_tokens / decodes + 1
        if self._kernels is not None and self._heads_measured is not None:
            measured_s = self._kernels.decode_attention_s(*self._heads_measured, self.precision.kv, decodes, mean)
            if measured_s is not None:
                return self._layers * measured_s
        total_s = 0.0
        for term in self.attended:
            attended = decodes * term.rows(mean)
            total_s += term.layers * self._attended_s(term, attended * term.decode_flops, attended * term.row_bytes)
        return total_s

    def _chunk_s(self, chunk: Chunk) -> float:
        if self._kernels is not None and self._heads_measured is not None:
            alike = math.sqrt(2 * chunk.pairs)  # a prompt from its beginning with as many pairs
            measured_s = self._kernels.prompt_attention_s(*self._heads_measured, self.precision.kv, alike)
            if measured_s is not None:
                return self._layers * measured_s
        total_s = 0.0
        for term in self.attended:
            flops = term.pairs(chunk.done, chunk.tokens) * term.prefill_flops
            read_bytes = term.rows_read(chunk.done, chunk.tokens) * term.row_bytes
            total_s += term.layers * self._attended_s(term, flops, read_bytes)
        return total_s

    def _attended_s(self, term: Attended, flops: float, read_bytes: float) -> float:
        tensor = self.parallel.tensor
        compute_s = flops / min(tensor, term.heads) / self._attention_flops_per_s
        memory_s = read_bytes / min(tensor, term.row_parts) / self._memory_bytes_per_s
        return max(compute_s, memory_s) + self.efficiency.kernel_s

    def _matrices_s(self, share: int, rows: int) -> float:
        """All matrices of all layers but the vocabulary's; ``share`` rows are this rank's, ``rows`` all ranks'."""
        total_s = 0.0
        for matrix in self.matrices.dense:
            if matrix.part != "head":
                total_s += matrix.layers * self._matrix_s(matrix, share)
        if self.matrices.experts is not None:
            total_s += self.matrices.experts.layers * self._experts_s(self.matrices.experts, share, rows)
        return total_s

    def _head_s(self, sampled: int) -> float:
        return sum([self._matrix_s(matrix, sampled) for matrix in self.matrices.dense if matrix.part == "head"])

    def _matrix_s(self, matrix: Matrix, rows: int) -> float:
        parts = 1 if matrix.replicated else self.parallel.tensor
        if self._kernels is not None:
            outputs = matrix.outputs if _divided_inputs(matrix) else matrix.outputs // parts
            inputs = matrix.inputs // parts if _divided_inputs(matrix) else matrix.inputs
            measured_s = self._kernels.matrix_s(self._stored(matrix), rows, inputs, outputs)
            if measured_s is not None:
                return measured_s
        return self._product_s(
            2.0 * rows * matrix.weights / parts,
            matrix.weights * self._bytes_of(matrix) / parts,
            rows * (matrix.inputs + matrix.outputs / parts) * ACTIVATION_BYTES,
            self._stored(matrix),
        )

    def _experts_s(self, experts: Experts, share: int, rows: int) -> float:
        """One layer's routed experts, on the busiest rank."""
        parallel = self.parallel
        if parallel.expert:
            here, parts, seen = experts.count / parallel.ranks, 1, rows
        else:
            here, parts, seen = float(experts.count), parallel.tensor, share
        hit = here * (1 - (1 - experts.chosen / experts.count) ** seen)
        tokens = seen * experts.chosen * here / experts.count * (self.efficiency.expert_imbalance if here > 1 else 1)
        stored = self.precision.expert_weights
        total_s = 0.0
        for matrix in experts.matrices:
            total_s += self._product_s(
                2.0 * tokens * matrix.weights / parts,
                hit * matrix.weights * WEIGHT_BYTES[stored] / parts,
                tokens * (matrix.inputs + matrix.outputs / parts) * ACTIVATION_BYTES,
                stored,
            )
        return total_s

    def _product_s(self, flops: float, weight_bytes: float, moved_bytes: float, stored: WeightType) -> float:
        kind = arithmetic(self.hardware, stored)
        compute_s = flops / (self.hardware.flops_per_s[kind] * self.efficiency.of_arithmetic(kind))
        return max(compute_s, (weight_bytes + moved_bytes) / self._memory_bytes_per_s) + self.efficiency.kernel_s

    def _collectives_s(self, share: int) -> float:
        parallel, hardware, efficiency = self.parallel, self.hardware, self.efficiency
        message_bytes = share * self._hidden * ACTIVATION_BYTES
        sum_s = None if self._kernels is None else self._kernels.all_reduce_s(message_bytes, parallel.tensor)
        if sum_s is None:
            sum_s = all_reduce_s(hardware, efficiency, message_bytes, parallel.tensor)
        total_s = 2 * self._layers * sum_s
        experts = self.matrices.experts
        if parallel.expert and parallel.data > 1 and experts is not None:
            sent_bytes = message_bytes * experts.chosen
            total_s += 2 * experts.layers * all_to_all_s(hardware, efficiency, sent_bytes, parallel.ranks)
        return total_s

    def _stored(self, matrix: Matrix) -> WeightType:
        """The vocabulary's matrix stays 16-bit."""
        return "f16" if matrix.part == "head" else self.precision.weights

    def _bytes_of(self, matrix: Matrix) -> float:
        return WEIGHT_BYTES[self._stored(matrix)]


def _divided_inputs(matrix: Matrix) -> bool:
    """Whether ranks share its inputs (what comes out of heads and inner widths) instead of its outputs."""
    return matrix.name in ("attention output", "down")


def _plain_heads(
    architecture: Architecture, attended: tuple[Attended, ...], tensor: int
) -> tuple[int, int, int] | None:
    """Heads, KV heads and their width on each rank, where all layers attend to all tokens alike; else None."""
    if len(attended) != 1 or attended[0].most != math.inf or "kv_lora_rank" in architecture.config:
        return None
    term = attended[0]
    head = round(term.decode_flops / 4 / term.heads)
    return term.heads // tensor, max(1, term.row_parts // tensor), head
