"""``headrace plan``: sizes, computed before anything runs.

Exit codes: 0 done, 1 the model cannot be sized or a value is wrong (one line on stderr), 2 the command line is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.bench.load.lengths import LENGTH_FORMS
from headrace.cli.bench_streams import StreamGroup, open_console, printing
from headrace.cli.bench_values import Number
from headrace.cli.plan_values import PARAMETERS, SEQUENCES, SIZE, TOKENS
from headrace.cli.shared_options import add_options
from headrace.errors import ConfigError
from headrace.kv.entry_types import INDEX_TYPE_NAMES, KV_TYPE_NAMES

if TYPE_CHECKING:
    from headrace.kv.layout import CacheType
    from headrace.plan.described import DescribedModel

_FORMS = "\b\nLengths (tokens):\n{lengths}".format(
    lengths="\n".join(f"  {form.signature:<44} {form.example}" for form in LENGTH_FORMS)
)

_MODEL_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--model",
        required=True,
        metavar="FILE|NAME",
        help="A GGUF file, a config.json or its folder, or a name that 'headrace plan models' lists.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(KV_TYPE_NAMES),
        default="f16",
        show_default=True,
        help="What keys and values are stored in (fp8: GPU servers, not libllama).",
    ),
    click.option(
        "--index-dtype",
        type=click.Choice(INDEX_TYPE_NAMES),
        help="What the keys of a sparse-attention indexer are stored in [as --dtype].",
    ),
    click.option("--context", type=TOKENS, metavar="TOKENS", help="Longest sequence [the model's context]."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
)


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return add_options(command, _MODEL_OPTIONS)


@click.group(cls=StreamGroup)
def plan() -> None:
    """Size KV memory before anything runs.

    Sizes come from the model's real layout: per-head keys and values, latents, windows, recurrent states, compressed
    layers. No weights are read and nothing is fetched.
    """


@plan.command()
@_model_options
@click.option(
    "--sequences",
    type=SEQUENCES,
    default=1,
    show_default=True,
    help="Sequences of that length, for the totals and for libllama's allocation.",
)
def kv(model: str, dtype: str, index_dtype: str | None, context: int | None, as_json: bool, sequences: int) -> None:
    """KV memory of a model: bytes per token and per sequence, part by part.

    The last table is what libllama allocates for a context of --sequences streams, as headrace creates it.
    """
    from headrace.cli.plan_kv_tables import print_kv, write_kv_json
    from headrace.plan.kv_plan import plan_kv

    described, types = _described(model), _types(dtype, index_dtype)
    made = plan_kv(described, types, _context(described, context), sequences)
    with printing():
        if as_json:
            click.echo(write_kv_json(made))
        else:
            print_kv(made, open_console())


@plan.command(epilog=_FORMS)
@_model_options
@click.option("--memory", type=SIZE, required=True, metavar="SIZE", help="Memory in all, e.g. 80GiB.")
@click.option("--reserve", type=SIZE, default=0, metavar="SIZE", help="Of it for weights and work, not for KV [0B].")
@click.option("--input-length", metavar="FORM", help="Prompt tokens.")
@click.option("--output-length", metavar="FORM", help="Answer tokens.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Both lengths from a trace that 'headrace bench' reads, request by request.",
)
@click.option(
    "--overflow",
    type=Number(least=1e-9, most=0.5),
    default=0.001,
    show_default=True,
    help="Accepted probability that the sequences need more than the memory.",
)
@click.option(
    "--at",
    type=click.Choice(["end", "running"]),
    default="end",
    show_default=True,
    help="How long sequences are: at their end (prompt and whole answer), or at a random moment while they generate.",
)
@click.option(
    "--parameters", type=PARAMETERS, metavar="COUNT", help="Weights of the model, for the second formula [if known]."
)
@click.option(
    "--precision",
    type=Number(above=0, most=16),
    default=2.0,
    show_default=True,
    metavar="BYTES",
    help="Bytes per weight, for the second formula.",
)
def seqs(
    model: str,
    dtype: str,
    index_dtype: str | None,
    context: int | None,
    as_json: bool,
    memory: int,
    reserve: int,
    input_length: str | None,
    output_length: str | None,
    trace: Path | None,
    overflow: float,
    at: str,
    parameters: int | None,
    precision: float,
) -> None:
    """How many sequences fit a memory at a stated probability of overflow.

    Sequences have independent lengths of the given distribution and take whole blocks of 128 tokens. The probability
    is computed exactly (a convolution, no sampling). Beside it stand two formulas in circulation, with the
    probability that their answers overflow.
    """
    from headrace.cli.plan_seqs_tables import print_seqs, write_seqs_json
    from headrace.plan.seqs_plan import SeqsQuestion, lengths_of, plan_seqs

    described = _described(model)
    question = SeqsQuestion(
        model=described,
        types=_types(dtype, index_dtype),
        context_tokens=_context(described, context),
        memory_bytes=memory,
        reserve_bytes=reserve,
        overflow=overflow,
        parameters=parameters if parameters is not None else described.parameters,
        bytes_per_parameter=precision,
    )
    lengths = lengths_of(
        question.context_tokens, inputs=input_length, outputs=output_length, trace=trace, running=at == "running"
    )
    made = plan_seqs(question, lengths)
    with printing():
        if as_json:
            click.echo(write_seqs_json(made))
        else:
            print_seqs(made, open_console())


@plan.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(as_json: bool) -> None:
    """Architectures that are known by name, with the origin of their facts."""
    from headrace.cli.plan_kv_tables import print_models, write_models_json
    from headrace.plan.architectures import architectures

    known = list(architectures().values())
    with printing():
        if as_json:
            click.echo(write_models_json(known))
        else:
            print_models(known, open_console())


def _described(model: str) -> DescribedModel:
    from headrace.plan.find import describe

    return describe(model)


def _types(dtype: str, index_dtype: str | None) -> CacheType:
    from headrace.kv.layout import CacheType

    return CacheType.named(dtype, index_dtype)


def _context(described: DescribedModel, given: int | None) -> int:
    context = given if given is not None else described.context_tokens
    if context is None:
        raise ConfigError("the model does not say how long its context is; give it", where="--context")
    return context
