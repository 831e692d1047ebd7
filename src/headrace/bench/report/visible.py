"""Foreign text made fit to print: names, addresses and errors come from servers and files.

A terminal obeys what it is sent. An answer's error text with an escape sequence in it could clear the screen,
retitle the window or paint a verdict of its own; a line break could add a row to a table.
"""

from __future__ import annotations

import unicodedata

_INVISIBLE = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode categories: control characters (C0, DEL, C1), lone surrogates, line and paragraph separators."""
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They turn the order of what stands around them."""


def visible(text: str, *, keep: str = "") -> str:
    r"""``text`` with every character that acts instead of being seen written as its escape: ``\x1b``, ``\n``,
    ``\u202e``. ``keep``: characters that are wanted as they are (the line breaks of a text of our own making)."""
    if text.isprintable() and _BIDI.isdisjoint(text):
        return text
    return "".join([_escape(one) if one not in keep and _acts(one) else one for one in text])


def _acts(character: str) -> bool:
    return unicodedata.category(character) in _INVISIBLE or character in _BIDI


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
