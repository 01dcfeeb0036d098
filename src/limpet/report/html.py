"""Pages as HTML: one file, without scripts and without references to other files.

Every text of a run passes ``text``, which makes it printable, cuts it, and escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import islice
from math import isfinite, prod
from string import Template

from limpet.errors import LimpetError
from limpet.format import tree
from limpet.format.config import compare_configs, config_entries, describe_change
from limpet.format.names import to_dotted
from limpet.report.data import MAX_BRANCHES, RunReport, Series, find_steps, find_values
from limpet.report.svg import CROSS, STAR, draw_histogram, draw_lineage, draw_plot
from limpet.run.overview import VersionEntry
from limpet.snapshot.contents import Contents
from limpet.snapshot.tree_rows import TreeRow, format_short
from limpet.text import format_metrics, format_size, format_value, to_printable, truncate
from limpet.version import __version__

_MAX_PLOTS, _MAX_VERSIONS, _MAX_LINES = 40, 300, 100


def text(value: object, limit: int = 120) -> str:
    """Return any value as HTML of at most ``limit`` characters of text."""
    return escape(truncate(to_printable(value), limit))


def wrapped(value: object, limit: int = 400) -> str:
    """Return a text as a cell of several lines; nothing if it is empty."""
    return f'<span class="wrap">{text(value, limit)}</span>' if value else ""


def note(value: object, kind: str = "dim") -> str:
    """Return a text as a paragraph: ``dim``, or ``bad`` for a problem. An empty one is nothing."""
    return f'<p class="{kind}">{text(value, 600)}</p>' if value else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Return a table of cells that are HTML, without empty columns. ``right``: the columns that are
    aligned right."""
    columns = [i for i in range(len(head)) if any(row[i] for row in rows)]
    kinds = [' class="n"' if name in right else "" for name in head]
    lines = ["".join(f"<th{kinds[i]}>{head[i]}</th>" for i in columns)] if any(head) else []
    lines += ("".join(f"<td{kinds[i]}>{row[i]}</td>" for i in columns) for row in rows)
    shown = f'<div class="scroll"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'
    return shown if columns else ""


def page(title: str, body: str) -> str:
    """Return a page. ``title`` is text, and ``body`` is HTML."""
    template = Template(files("limpet.report").joinpath("page.html").read_text())
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    return template.substitute(title=text(title), body=body, time=now, version=__version__)


def render_report(reports: Sequence[RunReport], link: str | None = None) -> str:
    """Return the page of one or several runs. ``link``: what is before the name of a version in the
    address of its page, and before ``diff``, if there are such pages."""
    urls = [report.result.run.url for report in reports]
    names = [url.rstrip("/").rpartition("/")[2] for url in urls] if len(urls) > 1 else [""]
    names = names if len(set(names)) == len(urls) else urls

    def each(title: str, render: Callable[[RunReport], str]) -> str:
        parts = zip(names, reports, strict=True)
        shown = (f"<h3>{text(name)}</h3>" * bool(name) + render(r) for name, r in parts)
        return f"<h2>{title}</h2>{''.join(shown)}"

    sections = (
        f"<h2>Summary</h2>{_summary(reports)}",
        each("Lineage", _lineage),
        f"<h2>Metrics</h2>{_metrics(reports, names)}",
        f"<h2>Bytes per save</h2>{_bytes(reports, names)}",
        each("Config", lambda r: _config(r, reports[0])),
        each("Contents of the newest version", lambda r: render_contents(r.contents)),
        each("Versions", lambda r: _versions(r, link)),
    )
    return page(f"Limpet: {', '.join(urls)}", "\n".join(sections))


def _summary(reports: Sequence[RunReport]) -> str:
    names = ("run", "state", "newest version", "versions", "stored", "goodput", "best", "contents")
    facts = zip(names, *map(_facts, reports), strict=True)
    rows = [[name, *map(wrapped, row)] for name, *row in facts]
    return table([""] * (len(reports) + 1), rows)


def _facts(report: RunReport) -> list[str]:
    result, summary = report.result, report.summary
    entries, latest = result.entries, result.latest
    left = sum(not e.on_lineage for e in entries)
    damaged = sum(e.problem is not None for e in entries)
    full = sum(e.nbytes + e.referred_bytes for e in entries)
    goodput = latest.goodput if latest else None
    best = (f"{format_metrics({name: found.metrics[name]})} ({mode}) in {found.version}"
            for name, mode, found in summary.best_versions())  # fmt: skip
    checked = "not checked; to check them: limpet verify " + result.run.url
    if report.checked is not None:
        checked = f"{format_size(report.checked)} were read and compared with their digests"
    return [
        result.run.url,
        summary.state,
        f"{latest.version}, {latest.created}" if latest else "none is intact",
        f"{len(entries):,}, of which {left:,} are abandoned and {damaged:,} damaged",
        f"{format_size(summary.nbytes)}, {summary.nbytes / (full or 1):.0%} of what full saves"
        " would store",
        "unknown" if goodput is None else f"{goodput:.1%} of the time since it began",
        "; ".join(best) or "no metric has a recorded mode",
        checked,
    ]


def _key(label: str, kind: str, path: str = "M1 7H21") -> str:
    hole = f'<path class="hole ring" d="{path}"/>' * (kind == "ring")
    drawn = f'<svg width="22" height="14"><path class="{kind}" d="{path}"/>{hole}</svg>'
    return f"<span>{drawn}{text(label, 60)}</span>"


def _lineage(report: RunReport) -> str:
    result = report.result
    if not result.entries:
        return note("There is no version.")
    best = {found.version for _, _, found in report.summary.best_versions()}
    wide, narrow = (draw_lineage(result, best, width, MAX_BRANCHES) for width in (1200, 360))
    keys = (
        _key("current line", "line s0") + _key("abandoned", "line abandoned")
        + _key("damaged, or skipped by a resume", "mark bad", f"M11 7{CROSS}")
        + _key("pinned", "ring", "M11 7h0") + _key("best", "mark s0 solid", f"M11 7{STAR}")
    )  # fmt: skip
    lines = [
        note(f"branch {number}: {branch.brief}", "bad")
        if isinstance(branch, LimpetError)
        else note(f"branch {number} starts at {branch.from_version} ({branch.reason})")
        for number, branch in [*result.branches.items()][-MAX_BRANCHES:]
    ]
    if more := len(result.branches) - len(lines):
        lines.append(note(f"{more:,} older branches are not shown."))
    drawn = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    return f'{drawn}<p class="key">{keys}</p>{"".join(lines)}'


def _metrics(reports: Sequence[RunReport], names: Sequence[str]) -> str:
    metrics = dict[str, None]()
    for report in reports:
        steps, entries = report.steps, report.result.entries
        for found in (*(piece.curves for piece in steps), *(e.metrics for e in entries)):
            metrics |= dict.fromkeys(found)
    plots = [_draw_metric(reports, names, name) for name in islice(metrics, _MAX_PLOTS)]
    more = f"{len(metrics) - len(plots):,} more are not drawn. " * (len(metrics) > len(plots))
    if any(len(report.result.chains()) > MAX_BRANCHES + 1 for report in reports):
        more += f"Of abandoned branches, the newest {MAX_BRANCHES} are drawn. "
    where = "Values between versions are those that the training has logged."
    if not any(report.has_log for report in reports):
        where = "Metrics exist only at saved versions."
    damaged = (f"{file}: {e.brief}" for r in reports for file, e in r.damaged.items())
    problems = "".join(note(problem, "bad") for problem in islice(damaged, _MAX_LINES))
    shown = f'<div class="plots">{"".join(plots)}</div>{problems}'
    return shown + note(more + where)


def _draw_metric(reports: Sequence[RunReport], names: Sequence[str], metric: str) -> str:
    def score(e: VersionEntry) -> float | None:
        return e.evaluations.metrics().get(metric)

    scores = find_values(reports, score, "evaluated", "dashed")
    return _plot(metric, [*find_steps(reports, metric), *scores], names)


def _bytes(reports: Sequence[RunReport], names: Sequence[str]) -> str:
    entries = [e for report in reports for e in report.result.entries]
    largest = max((e.nbytes + e.referred_bytes for e in entries), default=0)
    unit = format_size(largest).split()[1]
    scale = 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)

    def full(e: VersionEntry) -> float | None:
        return (e.nbytes + e.referred_bytes) / scale if e.referred_bytes else None

    series = find_values(reports, full, "a full save", "dashed")
    stored = find_values(reports, lambda e: e.nbytes / scale, "stored")
    plot = _plot(f"{unit} per save", [*series, *stored], names, from_zero=True)
    return f'<div class="plots">{plot}</div>'


def _plot(
    title: str, series: Sequence[Series], names: Sequence[str], *, from_zero: bool = False
) -> str:
    keys, texts, odd, drawn = dict[str, str](), [], 0, note("No value is finite.")
    series = sorted(series, key=lambda s: s.kind != "abandoned")
    for s in series:
        found = [p for p in s.points if isfinite(p[1])]
        odd += len(s.points) - len(found)
        label = (
            s.label if s.kind == "abandoned" else f"{names[s.run]}: {s.label}".removeprefix(": ")
        )
        keys[label] = _key(label, f"line s{s.run % 6} {s.kind}")
        if found:
            low, high = (format_value(f(v for _, v in found)) for f in (min, max))
            first, last = (f"{format_value(v)} at step {step}" for step, v in (found[0], found[-1]))
            texts.append(f"{label}: {first} to {last}, between {low} and {high}")
    if texts:
        drawn = draw_plot(series, text(title), text("; ".join(texts), 1000), from_zero=from_zero)
    keys[""] = f"<span>NaN or infinite: {odd:,}</span>" * bool(odd)
    caption = f'{text(title, 60)}<br><span class="key">{"".join(keys.values())}</span>'
    return f"<figure><figcaption>{caption}</figcaption>{drawn}</figure>"


def _config(report: RunReport, first: RunReport) -> str:
    latest, other = report.result.latest, first.result.latest
    entries = [*config_entries(latest.config)] if latest else []
    rows = [
        (text(to_dotted(key)), text(format_short(tree.decode(node, key, tree.reject_leaf))))
        for key, node in entries[:_MAX_LINES]
    ]
    changes = [(str(version), found) for version, found in report.result.config_changes()]
    if latest and other and first is not report:
        found = [*compare_configs(other.config, latest.config)]
        changes.append((f"compared with {first.result.run.url}", found))
    shown = changes[-_MAX_LINES:]
    lines = (f"{where}: {', '.join(map(describe_change, found))}" for where, found in shown)
    items = "".join(f"<li>{text(line, 400)}</li>" for line in lines)
    cut, older = len(entries) - len(rows), len(changes) - len(shown)
    return "".join((
        table(("name", "value"), rows) or note("There is none."),
        note(f"{cut:,} more: limpet show {report.result.run.url}" * bool(cut)),
        f"<h3>Changes</h3>{f'<ul>{items}</ul>' if items else note('There are none.')}",
        note(f"{older:,} older changes are not shown." * bool(older)),
    ))  # fmt: skip


def render_contents(contents: Contents | LimpetError | None) -> str:
    """Return the tree of a version, with the statistics of its tensors."""
    if not isinstance(contents, Contents):
        return note(contents.brief, "bad") if contents else note("There is no intact version.")
    numbers = ("size", "mean", "deviation", "range", "not finite", "read", "change")
    head = ("key", "content", *numbers[:4], "histogram", *numbers[4:])
    rows = [_tree_cells(contents, *row) for row in contents.rows]
    problem, more = contents.problem, contents.row_count - len(rows)
    earlier = contents.earlier.version if contents.earlier else "the version before"
    return "".join((
        table(head, rows, numbers),
        note(f"{more:,} more rows: limpet show {contents.snapshot.url}" * bool(more)),
        note(problem and problem.brief, "bad"),
        note(f"Tensors read: {len(contents.statistics):,} (see --stats-bytes). A change is the norm"
             f" of the difference from {earlier}, relative to the norm there."),
    ))  # fmt: skip


def _tree_cells(contents: Contents, row: TreeRow, content: str, nbytes: int | None) -> list[str]:
    name = f'<span style="padding-left:{row.depth}em">{text(row.key.rpartition("/")[2], 60)}</span>'
    cells = [name, text(content, 44), "" if nbytes is None else format_size(nbytes)]
    if (found := contents.statistics.get(row.key)) is None:
        return [*cells, *[""] * 7]
    texts = found.describe(prod(row.shape or ()))
    drawn = draw_histogram(found.histogram, texts[2]) if found.histogram else ""
    odd = texts[3] if texts[3] == "0" else f'<span class="bad">{texts[3]}</span>'
    return [*cells, *texts[:3], drawn, odd, *texts[4:]]


def _versions(report: RunReport, link: str | None) -> str:
    entries, rows = report.result.entries, list[list[str]]()
    best = {found.version for _, _, found in report.summary.best_versions()}
    for e in entries[: -_MAX_VERSIONS - 1 : -1]:
        name = str(e.version) if link is None else f'<a href="{link}{e.version}">{e.version}</a>'
        metrics, remark = format_metrics(e.metrics), format_metrics(e.note) or e.note or ""
        rows.append([
            name if e.on_lineage else f'<span class="dim">{name}</span>',
            text(e.created[:19].replace("T", " ")),
            format_size(e.nbytes),
            format_size(e.referred_bytes) if e.referred_bytes else "",
            text(e.describe(e.version in best)) + note(e.problem and e.problem.brief, "wrap bad"),
            text(e.reason or "", 60),
            wrapped(metrics, 300),
            wrapped(remark, 200),
        ])  # fmt: skip
    head = ("version", "created", "own", "referred", "state", "reason", "metrics", "note")
    older = f"{len(entries) - len(rows):,} older ones: limpet ls {report.result.run.url}"
    shown = table(head, rows, ("own", "referred")) + note(older * (len(entries) > len(rows)))
    form = f'<form action="{link}diff">Compare <input name="a"> with <input name="b"> <button>show'
    return shown if link is None else f"{form}</button></form>{shown}"
