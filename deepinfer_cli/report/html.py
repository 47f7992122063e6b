"""The report as one self-contained page: no network, opens from disk, light and dark, a table under every figure."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from html import escape

from deepinfer_cli.report.compare import Result
from deepinfer_cli.report.plots import Figure, figures
from deepinfer_cli.report.script import JS
from deepinfer_cli.report.stats import Summary
from deepinfer_cli.report.style import CSS
from deepinfer_cli.report.tables import Grid, grids, show_share
from deepinfer_cli.report.verdicts import comparison_grid
from deepinfer_cli.units import show_duration, show_number

# Names and error texts come from elsewhere. They are escaped; this is the second fence: no other script runs, nothing is loaded or sent.
SCRIPT_HASH = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{SCRIPT_HASH}'; base-uri 'none'; form-action 'none'"
)
VERDICT_KINDS = {"better": "good", "same": "good", "worse": "bad", "cannot tell": "warn"}


def page(summaries: Sequence[Summary], result: Result | None = None) -> str:
    """The whole document for one run or several."""
    shown = list(summaries)
    title = f"dix report · {', '.join(dict.fromkeys(str(s.run.get('recipe')) for s in shown))}"
    stamps = sorted({s.stamp for s in shown if s.stamp})
    parts = [banner(stamp) for stamp in stamps]
    if result is not None:
        parts.append(_comparison(result))
    parts += [_run(summary) for summary in shown]
    parts.append(figures_html(figures(shown)))
    parts += [_tables(summary, named=len(shown) > 1) for summary in shown]
    return document(title, parts)


def figures_html(made: Sequence[Figure]) -> str:
    """Side by side where the page is wide; a time line over all of it."""
    return f'<div class="figures">{"".join(figure_html(figure) for figure in made)}</div>'


def _tables(summary: Summary, *, named: bool) -> str:
    head = f"<h2>Numbers{f' of {escape(summary.title)}' if named else ''}</h2>"
    sections = "".join(f"<section><h3>{escape(g.title)}</h3>{table(g)}</section>" for g in grids(summary))
    return f"<article>{head}{sections}</article>"


def document(title: str, parts: Sequence[str]) -> str:
    """A page around its parts."""
    made = time.strftime("%Y-%m-%d %H:%M %Z")
    head = f"<header><h1>{escape(title)}</h1><p class='quiet'>made {escape(made)}</p></header>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{head}{''.join(parts)}</main><script>{JS}</script></body></html>\n"
    )


def banner(stamp: str) -> str:
    text = f"{stamp[0].upper() + stamp[1:]}: measured on the embedded toy model. The numbers show that everything works."
    return f'<p class="banner">{escape(text)}</p>'


def _run(summary: Summary) -> str:
    run = summary.run
    server = run.get("server", {})
    valid = run.get("valid")
    mark = f'<span class="mark-{"good" if valid else "bad"}">{"valid" if valid else "not valid"}</span>'
    facts = {
        "Model": server.get("model"),
        "Server": server.get("url"),
        "Ranks": server.get("ranks") or "unknown",
        "Window": show_duration(run.get("window_s") or 0.0),
        "Requests": f"{summary.value('requests', 'ok') or 0:,.0f} of {len(summary.requests):,} ok",
        "Status": run.get("status"),
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items())
    again = f'<p class="quiet">Repeat with <code>{escape(str(run.get("command")))}</code></p>'
    problems = [f"Not valid: {r}" for r in run.get("reasons") or []] + [f"{count} × {text}" for text, count in summary.errors[:3]]
    trouble = "".join(f'<p class="trouble">{escape(text)}</p>' for text in problems)
    notes = "".join(f'<p class="quiet">Note: {escape(text)}</p>' for text in run.get("notes") or [])
    return f"<article><h2>{escape(summary.title)} {mark}</h2>{_tiles(summary)}<dl>{listed}</dl>{again}{trouble}{notes}</article>"


def _tiles(summary: Summary) -> str:
    """The few numbers that people look at first. A median of too few requests gives way to the mean."""
    tiles = []
    for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        row = summary.row(metric, "p50")
        stat = "p50" if row is not None and row.value is not None else "mean"
        tiles.append((f"{name} {stat}", show_number(summary.value(metric, stat)), "ms"))
    tiles += [
        ("Output", show_number(summary.value("output_rate")), "tok/s"),
        ("Hit rate", show_share(summary.value("hit_rate_client")), "of prompt tokens"),
        ("Failed", show_share(summary.value("failed_share")), "of requests"),
    ]
    inner = "".join(
        f'<div class="tile"><span>{escape(n)}</span><strong>{escape(v)}</strong><span>{escape(u)}</span></div>' for n, v, u in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _comparison(result: Result) -> str:
    banner = f'<p class="banner">{escape(result.banner)}</p>' if result.banner else ""
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in result.notes)
    grid = comparison_grid(result)
    return f"<article><h2>{escape(grid.title)}</h2>{banner}{table(grid)}{notes}</article>"


def figure_html(figure: Figure) -> str:
    keys = "".join(f'<li><i class="s{color % 6}"></i>{escape(name)}</li>' for color, name in figure.legend)
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    head = f"<h3>{escape(figure.title)}</h3><figcaption>{escape(figure.caption)}</figcaption>"
    data = f"<details><summary>Data</summary>{table(figure.grid)}</details>"
    return f"<figure{' class=wide' if figure.wide else ''}>{head}{figure.svg}{legend}{data}</figure>"


def table(grid: Grid) -> str:
    def cell(index: int, text: str | None, tag: str) -> str:
        shown = "–" if text is None else text
        kind = VERDICT_KINDS.get(shown)
        word = f'<span class="mark-{kind}">{escape(shown)}</span>' if kind and tag == "td" else escape(shown)
        side = ' class="left"' if index in grid.left else ""
        return f"<{tag}{side}>{word}</{tag}>"

    head = "".join(cell(i, text, "th") for i, text in enumerate(grid.heads))
    body = "".join(f"<tr>{''.join(cell(i, text, 'td') for i, text in enumerate(row))}</tr>" for row in grid.rows)
    note = f'<p class="quiet">{escape(grid.note)}</p>' if grid.note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'
