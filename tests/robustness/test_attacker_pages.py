"""Markup and script in every text that reaches a page of ours: names of models, recipes and runs, labels, errors, request ids, commands.

Every page is read by a parser: it holds only our own elements, no handler, no address of another host, one script. Where a browser is
installed (slow), it opens them, with the page's policy switched off, so that the escaping alone has to hold.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepinfer_cli.bench.engine_sweep import Point
from deepinfer_cli.bench.engine_sweep import page as engine_page
from deepinfer_cli.report.compare import compare
from deepinfer_cli.report.html import page as report_page
from deepinfer_cli.report.script import JS
from deepinfer_cli.report.stats import Summary, summarize
from deepinfer_cli.tune.choice import Choice
from deepinfer_cli.tune.measure import Measurement, Sample
from deepinfer_cli.tune.show import page as tune_page
from deepinfer_cli.tune.simulator import StepCosts
from server.docs_page import docs_page
from server.openapi import document
from tests.cli.test_report import make_run, record
from tests.server.browser import browser, chromium

EVIL = "http://127.0.0.1:9/evil"
PAYLOADS = (
    "</script><script>ran('script')</script>",
    "<!--<script>",
    "--><script>ran('comment')</script>",
    "</title></style></textarea></svg></table><script>ran('closed')</script>",
    f"<img src={EVIL} onerror=ran('img')>",
    f"\"><svg/onload=ran('svg')><use href='{EVIL}#x'/></svg>",
    "' onmouseover='ran(\"handler\")' x='",
    f"<iframe srcdoc=\"<script>parent.ran('frame')</script>\" src='{EVIL}'></iframe>",
    f"<base href='{EVIL}'><link rel=stylesheet href='{EVIL}'><meta http-equiv=refresh content='0;url={EVIL}'>",
    "<a href=\"javascript:ran('link')\">x</a>",
    f"<style>@import '{EVIL}';</style>",
    "&lt;script&gt;ran('twice')&lt;/script&gt; &#60;script&#62;ran('twice')&#60;/script&#62;",
    "]]><![CDATA[<script>ran('cdata')</script>",
    "\u2028ran('line')\u2029;//",
    "`${ran('template')}` \\u003cscript\\u003e",
    "\x00<scr\x00ipt>ran('null')</scr\x00ipt>",
)
HOSTILE = " ".join(PAYLOADS)
SOUND = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "article", "section", "script", "link"),
    *("h1", "h2", "h3", "p", "div", "span", "strong", "b", "i", "code", "pre", "dl", "dt", "dd", "ul", "li", "a"),
    *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details", "summary"),
    *("svg", "g", "path", "line", "rect", "circle", "text", "tspan", "polyline", "polygon", "desc"),
}


class Reader(HTMLParser):
    """Elements, attributes that do something, and scripts of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.scripts: list[str] = []
        self.shown = ""
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        if tag not in SOUND:
            self.problems.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on") or (name in ("src", "href", "srcdoc") and value not in ("data:,", "openapi.json")):
                self.problems.append(f"<{tag} {name}={value!r}>")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts.append(data)
        else:
            self.shown += data

    def handle_comment(self, data: str) -> None:
        self.problems.append(f"<!--{data}")

    def unknown_decl(self, data: str) -> None:
        self.problems.append(f"<![{data}")


def hostile_run(home: Path, name: str) -> Summary:
    bad = record(2, 0, 0.5, 0.2, outcome="failed") | {"error_text": HOSTILE, "error_code": HOSTILE, "request_id": HOSTILE}
    records = [record(c, t, c + t / 2, 0.1) | {"request_id": HOSTILE, "finish_reason": HOSTILE} for c in range(2) for t in range(2)]
    folder = make_run(home, name, [*records, bad])
    run = json.loads((folder / "run.json").read_text())
    texts = dict.fromkeys(("recipe", "status", "command", "id"), HOSTILE)
    run |= texts | {"labels": {HOSTILE: HOSTILE + name}, "reasons": [HOSTILE], "notes": [HOSTILE], "stamp": HOSTILE}
    run["server"] |= {"url": HOSTILE, "model": HOSTILE, "ranks": HOSTILE}
    (folder / "run.json").write_text(json.dumps(run))
    return summarize(folder)


def a_report(home: Path) -> str:
    runs = [hostile_run(home, f"2026010{i}-000000-smoke-{'ab'[i % 2] * 6}") for i in (1, 2)]
    return report_page(runs, compare(runs[:1], runs[1:], force=True))


def an_engine_sweep(_home: Path) -> str:
    points = [Point("engine.prefill", {"prompt": n}, [5.0 * n], 1e6 / n, notes=[HOSTILE]) for n in (8, 64)]
    points += [Point("engine.decode", {"context": 8, "batch": n}, [5.0], 2e5 * n, 2e5, 1.0, [HOSTILE]) for n in (1, 2)]
    return engine_page(points, f"dix bench engine · {HOSTILE}", HOSTILE)


def a_tuning(_home: Path) -> str:
    measured = [Measurement(n, [Sample(ttft_p90_ms=5.0 * n, wait_steps=1.0)], Sample(wait_steps=1.0), [HOSTILE]) for n in (1, 2)]
    return tune_page(measured, Choice(1, HOSTILE, [HOSTILE, HOSTILE]), StepCosts(1, 1, 1, 1, 1), f"{HOSTILE} · 2 ranks", HOSTILE)


def the_interface(_home: Path) -> str:
    return docs_page(document(HOSTILE, 100, 10, [HOSTILE], render=True, faults=True))


PAGES: dict[str, Callable[[Path], str]] = {"report": a_report, "engine": an_engine_sweep, "tune": a_tuning, "docs": the_interface}


@pytest.mark.parametrize("name", PAGES)
def test_no_text_of_others_becomes_an_element_a_handler_or_a_script(name: str, tmp_path: Path) -> None:
    page = PAGES[name](tmp_path)
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.problems == []
    assert reader.scripts == ([] if name == "docs" else [JS])
    assert "<script>ran('closed')</script>" in reader.shown, "it is shown, as text"


def test_the_reader_sees_what_is_not_escaped(tmp_path: Path) -> None:
    planted = ("<img src=x onerror=ran()>", "</p><script>ran()</script>", "<!-- x -->", "<a href='javascript:ran()'>", "<b onclick=ran()>")
    for payload in planted:
        reader = Reader()
        reader.feed(an_engine_sweep(tmp_path).replace("<main>", f"<main>{payload}"))
        reader.close()
        assert reader.problems or reader.scripts != [JS], payload


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", PAGES)
async def test_in_a_browser_nothing_runs_asks_or_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.html"
    path.write_text(PAGES[name](tmp_path), encoding="utf-8")
    async with browser() as tab:
        await tab.send("Page.enable")
        await tab.send("Page.setBypassCSP", enabled=True)
        await tab.send("Page.addScriptToEvaluateOnNewDocument", source="window.seen=[];window.ran=what=>{seen.push(what);alert(what)}")
        await tab.open(path.as_uri())
        await tab.evaluate(HOVER)
        assert await tab.evaluate("window.seen") == []
        assert await tab.evaluate("document.title.includes(\"ran('closed')\") || document.body.textContent.includes(\"ran('closed')\")")
        assert (tab.dialogs, tab.problems) == ([], [])
        assert [url for url in tab.requested if url != path.as_uri() and not url.startswith("data:")] == []


# Everything that reacts to a pointer is touched; what the page's script says about it is text as well.
HOVER = """
(() => {
  for (const svg of document.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect();
    for (const e of [svg, ...svg.querySelectorAll('*')])
      e.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2}));
  }
  document.querySelectorAll('details').forEach(e => { e.open = true });
})()
"""


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
async def test_the_policy_of_a_report_alone_stops_a_script(tmp_path: Path) -> None:
    called: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.append(await reader.readline())
        writer.close()

    listener = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/evil"
    planted = f"<main><script>window.seen=1;fetch('{address}')</script><img src='{address}' onerror='window.seen=2'>"
    path = tmp_path / "planted.html"
    path.write_text(an_engine_sweep(tmp_path).replace("<main>", planted), encoding="utf-8")
    async with listener, browser() as tab:
        await tab.open(path.as_uri())
        await tab.until("document.getElementById('tip') !== null")  # our own script runs
        assert await tab.evaluate("window.seen === undefined")
        assert called == []
        await tab.send("Page.setBypassCSP", enabled=True)
        await tab.open(path.as_uri())
        await tab.until("window.seen !== undefined")  # the very same page, without its policy
