"""What the documentation says is so: its commands run, its YAML loads, its links and paths exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.load import build
from headrace.config.schema import Config
from tests.docs.markdown import FILES, ROOT, Block, anchors, blocks, links

BLOCKS = blocks()
DOCUMENTED_BASE = "http://127.0.0.1:8000"


def marked(mark: str) -> list[Block]:
    return [block for block in BLOCKS if mark in block.marks]


def run_block(block: Block, text: str, folder: Path) -> str:
    """Run a block as its language says, in ``folder``; its output. Fails the test when it fails."""
    programs = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    # Nothing of the person who runs the tests may count, and nothing may be left behind.
    env["XDG_CONFIG_HOME"] = env["HOME"] = str(folder)
    done = subprocess.run(
        [*programs[block.language], text], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{block.id} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", marked("run"), ids=lambda block: block.id)
def test_a_block_marked_run_runs(block: Block, tmp_path: Path) -> None:
    assert run_block(block, block.text, tmp_path)


@pytest.mark.parametrize("block", marked("server"), ids=lambda block: block.id)
def test_a_block_marked_server_runs_against_one(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    try:
        server = request.getfixturevalue("headrace_server")
    except pytest.FixtureLookupError:
        pytest.skip("there is no fixture headrace_server here")
    base = server.base_url.rstrip("/").removesuffix("/v1")
    assert DOCUMENTED_BASE in block.text
    output = run_block(block, block.text.replace(DOCUMENTED_BASE, base), tmp_path)
    assert output.strip()
    assert '"error"' not in output


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: block.id)
def test_a_yaml_block_is_a_right_configuration(block: Block) -> None:
    env = {name: f"sk-{name.lower()}" for name in re.findall(r"env:(\w+)", block.text)}
    config, _ = build(block.text, name=block.id, env=env, overrides={})
    assert config != Config()


def test_marks_are_known_ones() -> None:
    for block in BLOCKS:
        assert block.marks <= {"run", "server"}, block.id
        assert block.language in {"bash", "python", "yaml", "text"}, block.id


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    for target in links(file):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.is_file(), target
        assert not fragment or fragment in anchors(linked), target


def test_the_architecture_names_modules_that_exist_and_every_folder() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "headrace"
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert {name for name in named if not (package / name).is_file()} == set()
    folders = {folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file()}
    assert {folder for folder in folders if not re.search(rf"`{folder}[`/]", text)} == set()


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = {target for target in links(folder / "README.md") if not target.startswith(("..", "https://"))}
    assert listed == {file.name for file in folder.glob("0*.md")}
