"""Drawings as inline SVG: a plot of series, the lineage of a run, a histogram. Their colors are
classes of the style sheet. Texts that are passed are HTML already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from math import ceil, floor, isfinite, log10
from sys import float_info

from limpet.format.names import Version
from limpet.report.data import Series
from limpet.run.overview import ListResult

STAR = "m0-6 1.8 4h4.2l-3.4 2.7 1.3 4.3-3.9-2.6-3.9 2.6 1.3-4.3-3.4-2.7h4.2z"
CROSS = "m-4-4 8 8m0-8-8 8"
_WIDTH, _HEIGHT, _BELOW = 360, 190, 30
_CHARACTER = 7.0  # the width of a character of a label, at most
_MAX_POINTS, _ROW, _DOT = 400, 26, 6.5  # points of one series, in a plot of up to four

Scale = Callable[[float], float]


def find_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers at equal distances, between which all values are."""
    pad, most = (abs(low) / 4 or 1.0) * (low == high), float_info.max
    low, high = max(low - pad, -most), min(high + pad, most)
    half = max(high / 2 - low / 2, 1e-300)  # the whole may overflow
    power = 10.0 ** floor(log10(half / count * 2))
    step = next(m * power for m in (1, 2, 5, 10, 20) if m * power >= half / count * 1.999)
    ends = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    last = max(ends[1], ends[0] + 1)
    return [i * step for i in range(ends[0], last + 1) if isfinite(i * step)]


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Return labels with as many digits as tell the ticks apart: ``0.25``, ``15k``, ``1e300``."""
    largest, labels = max(map(abs, ticks), default=0.0), list[str]()
    power = int(log10(largest) // 3) if 1e4 <= largest < 1e15 else 0
    for digits in range(4, 18):
        labels = [f"{t / 1000**power:.{digits}g}".replace("e+", "e") for t in ticks]
        if len(set(labels)) == len(ticks):
            break
    return [label + " kMGT"[power].strip() * (label != "0") for label in labels]


def _scale(low: float, high: float, start: float, stop: float) -> Scale:
    """Return the function from values to places."""
    return lambda v: start + (stop - start) * ((v / 2 - low / 2) / (high / 2 - low / 2))


def _thin(points: Sequence[tuple[int, float]], most: int) -> Sequence[tuple[int, float]]:
    """Return the points; if over ``most``, the lowest and the highest one of each interval,
    and the last one."""
    if len(points) <= most:
        return points
    finite = [p for p in points if isfinite(p[1])]
    size = 2 * ceil(len(finite) / most) or 1
    groups = (sorted(finite[i : i + size], key=lambda p: p[1]) for i in range(0, len(finite), size))
    return [*(p for group in groups for p in sorted({group[0], group[-1]})), *finite[-1:]]


def draw_plot(series: Sequence[Series], title: str, text: str, *, from_zero: bool = False) -> str:
    """Return a plot of series over steps, of which some value is finite."""
    most = max(min(_MAX_POINTS, 4 * _MAX_POINTS // len(series)), 16)
    lines = [(s, _thin(s.points, most)) for s in series]
    values = [v for _, points in lines for _, v in points if isfinite(v)]
    ticks = find_ticks(min(0, *values) if from_zero else min(values), max(values))
    labels, bottom = format_ticks(ticks), _HEIGHT - _BELOW
    left = max(map(len, labels)) * _CHARACTER + 8
    x, drawn = _draw_steps([n for _, points in lines for n, _ in points], left, _WIDTH, bottom)
    y = _scale(min(ticks[0], *values), max(ticks[-1], *values), bottom, 8)
    for t, label in zip(ticks, labels, strict=True):
        drawn += f'<path class="grid" d="M{left:.1f} {y(t):.1f}H{_WIDTH}"/>'
        drawn += f'<text class="end" x="{left - 5:.1f}" y="{y(t) + 4:.1f}">{label}</text>'
    for one, points in lines:
        line, dots, pen = "", "", "M"
        for step, value in points:
            if isfinite(value):
                place = f"{x(step):.1f} {y(value):.1f}"
                line, dots = f"{line}{pen}{place}{'h0' * (pen == 'M')}", f"{dots}M{place}h0"
            pen = "L" if isfinite(value) else "M"  # a value that is not finite is a gap
        spread = x(points[-1][0]) - x(points[0][0])
        color, dots = f"s{one.run % 6} {one.kind}", dots * (len(one.points) < 2 + spread / _DOT)
        drawn += f'<path class="line {color}" d="{line}"/><path class="dots {color}" d="{dots}"/>'
        drawn += f'<path class="hole" d="{dots}"/>' * (one.kind == "dashed")
    return _wrap(drawn, _WIDTH, _HEIGHT, title, text)


def draw_lineage(result: ListResult, best: Collection[Version], width: int, most: int) -> str:
    """Return at most ``most`` branches of a run with versions, as rows of versions: those of the
    current lineage, and the newest. Of equal versions at one place, the first one is drawn."""
    newest = sorted({(e.on_lineage, e.version.branch) for e in result.entries}, reverse=True)
    numbers = sorted([*dict.fromkeys(number for _, number in newest)][:most])
    rows = {number: _ROW * i + 14 for i, number in enumerate(numbers)}
    steps = [e.version.step for e in result.entries if e.version.branch in rows]
    height, left = _ROW * len(rows) + 4, len(f"branch {numbers[-1]}") * _CHARACTER + 8
    x, drawn = _draw_steps(steps, left, width, height)
    for number, y in rows.items():
        drawn += f'<text class="start" x="0" y="{y + 4}">branch {number}</text>'
    for is_current, chain in result.chains():
        places = [
            (x(e.version.step), rows[e.version.branch]) for e in chain if e.version.branch in rows
        ]
        ends = [[*row][-1] for _, row in groupby(places, key=lambda place: place[1])]
        line = "".join(f"V{y}H{at:.1f}" for at, y in ends)
        kind = "solid" if is_current else "abandoned"
        if places and chain[-1].version.branch in rows:
            drawn += f'<path class="line s0 {kind}" d="M{places[0][0]:.1f} {places[0][1]}{line}"/>'
    marks: dict[tuple[object, ...], str] = {}
    for e in result.entries:
        kind = "bad" if e.problem is not None else "solid" if e.on_lineage else "abandoned"
        is_best, branch = e.version in best, e.version.branch
        key = int(x(e.version.step) / 5), branch, kind, e.pinned, is_best
        if branch in rows and key not in marks:
            place = f"M{x(e.version.step):.1f} {rows[branch]}"
            shape = CROSS if kind == "bad" else STAR if is_best else "h0"
            ring = f'<path class="ring" d="{place}h0"/><path class="hole ring" d="{place}h0"/>'
            marks[key] = (
                f'{ring * e.pinned}<path class="{"dots" if shape == "h0" else "mark"} s0 {kind}" d='
                f'"{place}{shape}"><title>{e.version}: {e.describe(is_best)}</title></path>'
            )
    text = "versions by step and branch"
    return _wrap(drawn + "".join(marks.values()), width, height + _BELOW, "lineage", text)


def draw_histogram(counts: Sequence[int], text: str) -> str:
    """Return bars, as high as their counts."""
    bars = "".join(f"M{3 * i} 20v-{20 * n / max(counts):.1f}h2.5V20" for i, n in enumerate(counts))
    return _wrap(f'<path class="bars" d="{bars}"/>', 3 * len(counts), 20, "histogram", text)


def _draw_steps(steps: Sequence[int], left: float, width: int, y: float) -> tuple[Scale, str]:
    """Return the function from steps to places, and the axis."""
    low, high = min(steps), max(steps)
    ends = (low - 1, high + 1) if low == high else (low, high)
    x, drawn = (
        _scale(*ends, left + 6, width - 10),
        f'<path class="axis" d="M{left} {y}H{width}"/>',
    )
    ticks = [t for t in find_ticks(*ends, width // 80) if t == int(t) and low <= t <= high]
    for t, label in zip(ticks, format_ticks(ticks), strict=True):
        half = len(label) * _CHARACTER / 2
        middle = min(max(x(t), half), width - half)
        drawn += f'<path class="axis" d="M{x(t):.1f} {y}v4"/>'
        drawn += f'<text x="{middle:.1f}" y="{y + 16}">{label}</text>'
    return x, drawn + f'<text class="end" x="{width}" y="{y + 28}">step</text>'


def _wrap(drawn: str, width: int, height: float, title: str, text: str) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f'<svg {size} role="img"><title>{title}</title><desc>{text}</desc>{drawn}</svg>'
