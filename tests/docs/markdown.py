"""Code blocks and links of the project's Markdown files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the marks after it (``run``, ``server``), and where it is."""

    file: Path
    line: int
    language: str
    marks: frozenset[str]
    text: str

    @property
    def id(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    """Every fenced block of every file."""
    found = []
    for file in FILES:
        content = file.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(content):
            language, *marks = match["info"].split() or [""]
            line = content.count("\n", 0, match.start()) + 1
            found.append(Block(file, line, language, frozenset(marks), match["text"]))
    return found


def links(file: Path) -> list[str]:
    """Targets of the links in a file, code blocks left out."""
    prose = _BLOCK.sub("", file.read_text(encoding="utf-8"))
    return [match["target"] for match in _LINK.finditer(prose)]


def anchors(file: Path) -> set[str]:
    """The fragments that headings of a file can be reached by."""
    prose = _BLOCK.sub("", file.read_text(encoding="utf-8"))
    headings = [match["text"].lower() for match in _HEADING.finditer(prose)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
