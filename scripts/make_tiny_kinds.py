"""Writes a synthetic tiny GGUF of every kind of attention (random weights: for sizing and tests, not models)."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.errors import ModelError
from headrace.models.tiny_kinds import kinds, make_tiny_kind


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--kind", "wanted", multiple=True, type=click.Choice(kinds()), help="Only these [all].")
@click.option("--seed", default=0)
def main(folder: Path, wanted: tuple[str, ...], seed: int) -> None:
    """Write FOLDER/KIND.gguf for every kind: random weights with a fixed seed."""
    for kind in wanted or kinds():
        try:
            path = make_tiny_kind(kind, folder / f"{kind}.gguf", seed=seed)
        except ModelError as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
