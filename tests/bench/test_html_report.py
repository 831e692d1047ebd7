"""The HTML report: whole in one file, escaped, readable without colour, honest about what it shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from headrace.bench.records import RequestRecord, RunInfo
from headrace.bench.report.html_report import html_report, sweep_report
from headrace.bench.report.markup import Html, table, tag, text
from headrace.bench.results.columns import build_columns
from headrace.bench.results.summary import summarise_columns
from headrace.bench.sweep.sweep import Finished, result_of
from headrace.bench.sweep.sweep_result import LaneTrial, SweepResult, SweepSettings, Trial
from tests.bench.bench_records import answered, failed, run_info, synthetic_run

EVIL = "</title></td><script>alert('x')</script><img src=https://evil.example/x onerror=alert(1)>&\"'"
VOID = {"meta", "br", "img", "path", "use", "rect"}


class _Checked(HTMLParser):
    """Collects elements, attributes and text, and insists that every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(name)
        self.attributes += [(name, key, value or "") for key, value in attrs]
        if name != "meta":
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(name)
        self.attributes += [(name, key, value or "") for key, value in attrs]

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _parse(page: str) -> _Checked:
    parsed = _Checked()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    return parsed


def _report(info: RunInfo, records: list[RequestRecord], sweep: SweepResult | None = None) -> str:
    columns = build_columns(info, records)
    return html_report(summarise_columns(columns), columns, sweep)


def _usual(**changes: Any) -> str:
    slos = {"chat": {"ttft_s": 0.5}, "docs": {"ttft_s": 1.5, "e2e_s": 3.0}}
    info, records = synthetic_run(np.random.default_rng(1), duration_s=60.0, shed_share=0.02, slos=slos, **changes)
    return _report(info, records)


def _sweep() -> SweepResult:
    trials = [Trial(rate, 60.0, {"chat": LaneTrial(good, 1000)}) for rate, good in ((4.0, 1000), (8.0, 500))]
    return result_of(trials, SweepSettings(start_rps=4.0), Finished("found"))


def test_the_page_is_well_formed_and_needs_nothing_but_itself() -> None:
    page = _usual()
    parsed = _parse(page)
    assert "script" not in parsed.elements
    assert {"link", "img", "iframe", "object", "embed"}.isdisjoint(parsed.elements)
    for name, key, value in parsed.attributes:
        assert not key.startswith("on"), (name, key)
        if key in ("href", "src", "xlink:href"):
            assert value.startswith("#"), (name, key, value)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "xlink" not in page and "<metadata" not in page and "<?xml" not in page
    # The only address in the page is the text that says which server was measured.
    assert set(re.findall(r"https?://[^\s<\"']+", page)) == {"http://127.0.0.1:8000"}


def test_references_inside_the_page_lead_somewhere_and_ids_are_unique() -> None:
    parsed = _parse(_report_with_sweep())
    ids = [value for _, key, value in parsed.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    pointed = {value[1:] for _, key, value in parsed.attributes if key == "href"}
    pointed |= {found for _, _, value in parsed.attributes for found in re.findall(r"url\(#([^)]+)\)", value)}
    assert pointed and pointed <= set(ids)


def _report_with_sweep() -> str:
    info, records = synthetic_run(np.random.default_rng(1), duration_s=30.0, shed_share=0.02)
    return _report(info, records, _sweep())


def test_whatever_comes_from_outside_is_escaped() -> None:
    info = run_info(target=EVIL, model=EVIL, label=EVIL, source={EVIL: EVIL}, machine={"cpu": EVIL}, started_at=EVIL)
    records = [answered(i, i * 10, ttft_ms=i + 1, class_name=EVIL, lane=EVIL + "lane") for i in range(10)]
    records.append(failed(99, 500, "error", error=EVIL, status=500, class_name=EVIL))
    parsed = _parse(_report(info, records))
    assert "script" not in parsed.elements and "img" not in parsed.elements
    shown = "".join(parsed.texts)
    assert shown.count("<script>alert('x')</script>") >= 8
    labels = [value for _, key, value in parsed.attributes if key == "aria-label"]
    assert any(EVIL in label for label in labels)


@pytest.mark.filterwarnings("error")
def test_names_that_the_plots_font_does_not_have_or_that_look_like_formulas_are_drawn_as_they_are() -> None:
    names = ["$x_1^{$", "対話 🙂", "a\\1b", "--><b>", "W" * 300]
    records = [answered(i, i * 10, ttft_ms=i + 1, class_name=name) for i in range(8) for name in names]
    page = _report(run_info(), records)
    drawn = re.findall(r'<g id="share-lane-\d+">.*?<text[^>]*>([^<]*)<', page, flags=re.DOTALL)
    assert sorted(drawn) == sorted([*[text(name) for name in names[:-1]], "W" * 39 + "…"])


def test_control_characters_are_shown_and_not_obeyed() -> None:
    control = "".join([chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if code != 0x0A])
    evil = f"evil{control}\u202e"
    info = run_info(target=evil, model=evil, label=evil, source={evil: evil}, machine={"cpu": evil}, started_at=evil)
    records = [answered(i, i * 10, ttft_ms=i + 1, class_name=evil) for i in range(10)]
    records.append(failed(99, 500, "error", error=evil, status=500, class_name=evil))
    page = _report(info, records)
    assert not set(page) & set(control + "\u202e")
    assert page.count("\\x1b") >= 5 and page.count("\\x9b") >= 5


def test_a_run_without_an_answer_says_so_first() -> None:
    texts = "".join(_parse(_report(run_info(), [failed(i, i * 100, "refused") for i in range(5)])).texts)
    assert "Nothing was answered. Of 5 offered requests not one." in texts


def test_a_sound_run_has_no_banner_of_alarm() -> None:
    shown = "".join(_parse(_usual()).texts)
    assert "This run is invalid." not in shown
    assert "This run is simulated." not in shown


def test_an_invalid_run_says_so_first() -> None:
    records = [answered(i, i * 10, ttft_ms=10, lag_ms=50) for i in range(50)]
    texts = _parse(_report(run_info(), records)).texts
    shown = "".join(texts)
    assert "This run is invalid." in shown and "the generator sent late: send lag p99 50 ms" in shown
    assert shown.index("This run is invalid.") < shown.index("attainment")


def test_a_simulated_run_says_so() -> None:
    assert "This run is simulated." in "".join(_parse(_usual(simulated=True)).texts)


def test_plots_are_there_coloured_by_the_page_and_labelled() -> None:
    page = _usual()
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(svgs) == 3
    for svg in svgs:
        assert re.match(r'<svg viewBox="[^"]+" role="img" aria-label="[^"]{20,}">', svg)
        assert not re.search(r"#0[0-9a-f]{5}\b", svg), "a colour that the page does not know"
        assert "var(--ink)" in svg
        assert "<text" in svg, "text stays text"


def test_a_report_with_a_sweep_plots_attainment_against_rate() -> None:
    page = _report_with_sweep()
    assert "Attainment against rate." in page and "The highest rate that holds" in page
    alone = "".join(_parse(sweep_report(_sweep())).texts)
    assert "4 requests/s is the highest rate found that holds 99 %" in alone


def test_the_same_run_gives_the_same_bytes() -> None:
    assert _usual() == _usual()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "records",
    [
        [],
        [answered(0, 0, ttft_ms=1, output_tokens=-3)],  # matplotlib was given a scale without a length
        [failed(i, i * 100, "refused") for i in range(5)],
        [answered(0, 0, ttft_ms=0)],
        [answered(i, i, ttft_ms=0, gaps_ms=(0, 0)) for i in range(500)],
        [failed(0, 0, "ok")],
        [failed(0, 0, "cancelled", sent_ns=None, end_ns=None)],
        [failed(0, 0, "rejected", malformed="no_body", status=500)],
        [answered(i, i, ttft_ms=5, class_name=f"class {i % 12}") for i in range(48)],
    ],
)
def test_odd_runs_have_reports_too(records: list[RequestRecord]) -> None:
    _parse(_report(run_info(), records))


def test_every_figure_shown_is_the_summarys() -> None:
    records = [answered(i, i * 20, ttft_ms=i + 1) for i in range(400)]
    shown = " ".join(_parse(_report(run_info(slos={"chat": {"ttft_s": 0.35}}), records)).texts)
    # 350 of 400 are good; TTFT p50 200 ms, p99 396 ms; no p99.9.
    for figure in ("87.5 %", "396 ms", "200 ms", "SLO TTFT 350 ms", "35 /s", "–"):
        assert figure in shown


def test_markup_escapes_text_and_only_text() -> None:
    assert tag("b", "<x>", title='"', class_=None) == '<b title="&quot;">&lt;x&gt;</b>'
    assert tag("b", tag("i", "&")) == "<b><i>&amp;</i></b>"
    assert text(Html("<b>")) == "<b>"
    assert tag("p", "a", aria_label="l", class_="c") == '<p aria-label="l" class="c">a</p>'
    page = table(("name", "n"), [("<a>", "1")], caption="c")
    assert '<td>&lt;a&gt;</td><td class="n">1</td>' in page
