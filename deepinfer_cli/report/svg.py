"""Hand-built figures as inline SVG. Colours are CSS variables of the page, so one figure serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 270
WIDE = 1140  # a time line goes over the whole page
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
SERIES_COLORS = 6
FEW_POINTS = 60  # up to here a distribution shows every request as a dot


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(max(value, self.low)) if self.log else value
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    def plain(self) -> str:
        """For the script of the page: ends in values, ends in pixels, and whether it is logarithmic."""
        return f"{self.low:.6g},{self.high:.6g},{self.start:g},{self.end:g},{int(self.log)}"

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers inside [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; only the powers when the range is wide; round numbers when it is narrow."""
    factors = (1, 2, 5) if high / low < 200 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [f * 10.0**p for p in powers for f in factors if low * (1 - 1e-9) <= f * 10.0**p <= high * (1 + 1e-9)]
    return ticks if len(ticks) >= 3 else linear_ticks(low, high)


def label(value: float) -> str:
    """A tick's text: thousands separated, no trailing zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line or cloud. `texts`: what a pointer on a point shows."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    texts: Sequence[str] = field(default_factory=tuple)
    color: int = 0
    dashed: bool = False


class Canvas:
    """Collects the parts of one figure."""

    def __init__(self, title: str, width: int = WIDTH, height: int = HEIGHT) -> None:
        self.title, self.width, self.height = title, width, height
        self._parts: list[str] = []
        self._x: Scale | None = None
        self._x_name = ""

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "tick", turn: bool = False) -> None:
        turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        self.add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def x_axis(self, scale: Scale, y: float, top: float, name: str, *, grid: bool = True, ticks: Sequence[float] | None = None) -> None:
        self._x, self._x_name = scale, name
        for tick in scale.ticks() if ticks is None else ticks:
            at = scale(tick)
            if grid:
                self.line(at, top, at, y, "grid")
            self.text(at, y + 16, label(tick))
        self.line(scale.start, y, scale.end, y, "axis")
        if name:
            self.text((scale.start + scale.end) / 2, y + 34, name, kind="name")

    def y_axis(self, scale: Scale, x: float, right: float, name: str, ticks: Sequence[float] | None = None, percent: bool = False) -> None:
        for tick in scale.ticks() if ticks is None else ticks:
            at = scale(tick)
            self.line(x, at, right, at, "grid")
            self.text(x - 6, at + 4, f"{tick:.0%}" if percent else label(tick), anchor="end")
        if name:
            self.text(14, (scale.start + scale.end) / 2, name, kind="name", turn=True)

    def path(
        self,
        points: Sequence[tuple[float, float]],
        color: int,
        kind: str = "stroke",
        *,
        name: str = "",
        y: Scale | None = None,
        form: str = "",
    ) -> None:
        """A line. With its name and scale the page's script can say the value under the pointer; `form` "%" shows shares."""
        if points:
            steps = " ".join(f"{'M' if i == 0 else 'L'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
            told = f' data-n="{escape(name)}" data-y="{y.plain()}" data-f="{form}"' if y is not None else ""
            self.add(f'<path class="{kind} s{color % SERIES_COLORS}" d="{steps}"{told}/>')

    def dot(self, x: float, y: float, color: int, text: str) -> None:
        self.add(f'<circle class="dot s{color % SERIES_COLORS}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(text)}</title></circle>')

    def bar(self, x: float, y: float, width: float, height: float, color: int, text: str, *, rounded: bool = True) -> None:
        least = 0.5 if rounded else 0.0
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, least):.1f}" rx="{2 if rounded else 0}"'
        self.add(f'<rect class="bar s{color % SERIES_COLORS}" {box}><title>{escape(text)}</title></rect>')

    def svg(self) -> str:
        x = f' data-x="{self._x.plain()}" data-xn="{escape(self._x_name)}"' if self._x is not None else ""
        size = f'viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg {size}{x} role="img" aria-label="{escape(self.title)}" xmlns="http://www.w3.org/2000/svg">'
        return head + "".join(self._parts) + "</svg>"


def distribution_chart(title: str, series: Sequence[Series], x_name: str) -> str:
    """Share of requests at or below a value, logarithmic in x. `series.x`: sorted values; y is ignored."""
    values = [v for s in series for v in s.x if v > 0]
    if not values:
        return ""
    low, high = min(values), max(values)
    x = Scale(low * 0.9, high * 1.1, LEFT, WIDTH - RIGHT, log=True)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.y_axis(y, LEFT, WIDTH - RIGHT, "share of requests", [0, 0.25, 0.5, 0.75, 0.9, 1.0], percent=True)
    canvas.x_axis(x, HEIGHT - BOTTOM, TOP, x_name)
    for s in series:
        points, n = [(x(s.x[0]), y(0.0))] if len(s.x) else [], len(s.x)
        for i, value in enumerate(s.x):
            points += [(x(value), y(i / n)), (x(value), y((i + 1) / n))]
        canvas.path(points, s.color, name=s.name, y=y, form="%")
        for i, value in enumerate(s.x if n <= FEW_POINTS else []):
            canvas.dot(x(value), y((i + 1) / n), s.color, f"{s.name}: {(i + 1) / n:.0%} of requests at or below {value:,.1f}")
    return canvas.svg()


def bar_chart(title: str, categories: Sequence[str], series: Sequence[Series], y_name: str, *, percent: bool = False) -> str:
    """Grouped bars: one group per category, one bar per series. `series.y` by category; NaN leaves a gap."""
    values = [v for s in series for v in s.y if not math.isnan(v)]
    if not values:
        return ""
    y = Scale(0.0, 1.0 if percent else max(values) * 1.1 or 1.0, HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.y_axis(y, LEFT, WIDTH - RIGHT, y_name, [0, 0.25, 0.5, 0.75, 1.0] if percent else None, percent=percent)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(categories))
    width = min(46.0, slot * 0.7 / max(1, len(series)))
    for i, category in enumerate(categories):
        middle = LEFT + slot * (i + 0.5)
        canvas.text(middle, HEIGHT - BOTTOM + 16, category)
        for j, s in enumerate(series):
            if math.isnan(s.y[i]):
                continue
            x = middle + (j - len(series) / 2) * width
            shown = f"{s.y[i]:.1%}" if percent else f"{s.y[i]:,.1f}"
            canvas.bar(x + 1, y(s.y[i]), width - 2, y(0.0) - y(s.y[i]), s.color, f"{s.name} · {category}: {shown}")
            if width >= 30:
                canvas.text(x + width / 2, y(s.y[i]) - 4, shown, kind="value")
    canvas.line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis")
    return canvas.svg()


def stacked_chart(title: str, categories: Sequence[str], series: Sequence[Series], y_name: str) -> str:
    """One bar per category, made of a piece per series from the bottom up."""
    totals = [sum(s.y[i] for s in series) for i in range(len(categories))]
    if not totals or max(totals) <= 0:
        return ""
    y = Scale(0.0, max(totals) * 1.12, HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.y_axis(y, LEFT, WIDTH - RIGHT, y_name)
    slot = (WIDTH - LEFT - RIGHT) / len(categories)
    width = min(64.0, slot * 0.6)
    for i, category in enumerate(categories):
        middle, base = LEFT + slot * (i + 0.5), 0.0
        canvas.text(middle, HEIGHT - BOTTOM + 16, category)
        for s in series:
            share = s.y[i] / totals[i] if totals[i] else 0.0
            top = base + s.y[i]
            text = f"{s.name} · {category}: {s.y[i]:,.1f} ms, {share:.0%}"
            canvas.bar(middle - width / 2, y(top), width, y(base) - y(top), s.color, text, rounded=False)
            base = top
        canvas.text(middle, y(base) - 5, f"{base:,.0f}", kind="value")
    canvas.line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis")
    return canvas.svg()


def scatter_chart(title: str, series: Sequence[Series], x_name: str, y_name: str) -> str:
    """Points with their texts, both axes linear from zero."""
    xs, ys = [v for s in series for v in s.x], [v for s in series for v in s.y]
    if not xs:
        return ""
    x = Scale(0.0, max(xs) * 1.05 or 1.0, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, max(ys) * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.y_axis(y, LEFT, WIDTH - RIGHT, y_name)
    canvas.x_axis(x, HEIGHT - BOTTOM, TOP, x_name)
    for s in series:
        for i, (a, b) in enumerate(zip(s.x, s.y, strict=True)):
            canvas.dot(x(a), y(b), s.color, s.texts[i] if i < len(s.texts) else s.name)
    return canvas.svg()


def line_chart(title: str, series: Sequence[Series], x_name: str, y_name: str, *, log: bool = False, ticks: Sequence[float] = ()) -> str:
    """Lines through points, linear from zero in y; `log`: in x. `ticks`: where x is labelled, else round numbers."""
    xs, ys = [v for s in series for v in s.x], [v for s in series for v in s.y]
    if not xs:
        return ""
    low, high = (min(xs) * 0.9, max(xs) * 1.1) if log else (0.0, max(xs) * 1.05 or 1.0)
    x = Scale(low, high, LEFT, WIDTH - RIGHT, log=log)
    y = Scale(0.0, max(ys) * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.y_axis(y, LEFT, WIDTH - RIGHT, y_name)
    canvas.x_axis(x, HEIGHT - BOTTOM, TOP, x_name, ticks=ticks or None)
    for s in series:
        points = [(x(a), y(b)) for a, b in zip(s.x, s.y, strict=True)]
        canvas.path(points, s.color, "stroke dashed" if s.dashed else "stroke", name=s.name, y=y)
        for i, (a, b) in enumerate(points):
            canvas.dot(a, b, s.color, s.texts[i] if i < len(s.texts) else f"{s.name}: {s.y[i]:,.1f} at {label(s.x[i])}")
    return canvas.svg()


@dataclass(frozen=True, slots=True)
class Strip:
    """One band of a time line. kind: line, steps or dots."""

    name: str
    series: Series
    kind: str = "line"


def timeline_chart(title: str, strips: Sequence[Strip], end_s: float, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Bands on one time axis; `marks` (time, text) are failures, drawn as ticks through all bands."""
    strips = [s for s in strips if len(s.series.x)]
    if not strips:
        return ""
    band, gap = 74, 22
    height = TOP + len(strips) * (band + gap) + BOTTOM
    canvas = Canvas(title, WIDE, height)
    x = Scale(0.0, end_s or 1.0, LEFT, WIDE - RIGHT)
    for i, strip in enumerate(strips):
        top = TOP + 8 + i * (band + gap)
        highest = max(strip.series.y)
        y = Scale(0.0, highest or 1.0, top + band, top + 12)
        canvas.text(LEFT + 4, top + 4, strip.name, anchor="start", kind="strip")
        canvas.y_axis(y, LEFT, WIDE - RIGHT, "", [0.0, highest] if highest else [0.0])
        if strip.kind == "dots":
            for j, (a, b) in enumerate(zip(strip.series.x, strip.series.y, strict=True)):
                canvas.dot(x(a), y(b), strip.series.color, strip.series.texts[j])
        else:
            canvas.path(_steps(strip, x, y), strip.series.color, name=strip.name, y=y)
    bottom = TOP + 8 + len(strips) * (band + gap) - gap
    canvas.x_axis(x, bottom, TOP, "seconds since the first request", grid=False)
    for at, text in marks:
        canvas.add(f'<line class="mark" x1="{x(at):.1f}" y1="{TOP}" x2="{x(at):.1f}" y2="{bottom}"><title>{escape(text)}</title></line>')
    return canvas.svg()


def _steps(strip: Strip, x: Scale, y: Scale) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for a, b in zip(strip.series.x, strip.series.y, strict=True):
        if strip.kind == "steps" and points:
            points.append((x(a), points[-1][1]))
        points.append((x(a), y(b)))
    return points
