"""Writes the synthetic tiny GGUF (random weights: for load tests, not a model)."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.errors import ModelError
from headrace.models.tiny import NAME, make_tiny_gguf


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--context", default=131_072, help="Trained context, tokens.")
@click.option("--layers", default=2)
@click.option("--embedding", default=128, help="Width of the residual stream.")
@click.option("--heads", default=4)
@click.option("--kv-heads", default=2)
@click.option("--feed-forward", default=256)
@click.option("--vocab", default=512, help="Number of tokens, at least 259.")
@click.option("--seed", default=0)
def main(path: Path, **sizes: int) -> None:
    """Write a synthetic GGUF to PATH: random weights with a fixed seed, for load tests."""
    try:
        make_tiny_gguf(path, **sizes)
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{path}: {NAME}, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
