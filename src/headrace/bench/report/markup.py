"""HTML from Python, with one rule: a plain string is text and is escaped, only ``Html`` is markup.

Text is also made ``visible``: a control character has no place in a page either, and some are not HTML at all.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from headrace.bench.report.visible import visible


class Html(str):
    """Markup. Made by ``tag`` and ``join``, or by hand from a constant."""

    __slots__ = ()


def text(value: str) -> Html:
    """``value`` escaped; markup stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(visible(value, keep="\n"), quote=True))


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other."""
    return Html("".join([text(part) for part in parts]))


def tag(name: str, *children: str, **attributes: str | None) -> Html:
    """An element. ``class_`` stands for ``class``; an underscore in an attribute's name is a hyphen; None leaves
    the attribute out."""
    shown = [
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Html(f"<{name}{''.join(shown)}>{join(children)}</{name}>")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1, caption: str = "") -> Html:
    """A table whose first ``text_columns`` columns are text and whose others are numbers, in a frame of its own
    that scrolls sideways where the page is narrow."""

    def cells(name: str, values: Sequence[str]) -> Html:
        return join(tag(name, value, class_=None if i < text_columns else "n") for i, value in enumerate(values))

    head = tag("thead", tag("tr", cells("th", headings)))
    body = tag("tbody", join(tag("tr", cells("td", row)) for row in rows))
    title = tag("caption", caption) if caption else Html("")
    return tag("div", tag("table", title, head, body), class_="scroll")
