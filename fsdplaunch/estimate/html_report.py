"""The estimate as one HTML page. Pure: returns text."""

from collections.abc import Iterator, Sequence
from html import escape

from fsdplaunch.display_text import GIB, html_page
from fsdplaunch.estimate.memory import MOMENTS, verdict_of
from fsdplaunch.estimate.report import Report, moment_words, shares

_COLOURS = {
    "parameters": "#4363b8", "gradients": "#e6893a", "optimizer": "#3a9a5b", "gathered": "#7fa7e0",
    "communication": "#b26fd1", "activations": "#d9534f", "temporary": "#c9a227", "context": "#8a8f98",
}  # fmt: skip
_PHASES = {"forward": "#7fa7e0", "backward": "#d9534f", "step": "#3a9a5b"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 60, 30
_STYLE = """.bar { display: flex; height: 1.6rem; position: relative; background: rgba(128,128,128,.15); }
.bar span { display: block; height: 100%; }
.limit { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 3px solid currentColor; }
.row { margin: .8rem 0; } .row p { margin: 0 0 .2rem; display: flex; justify-content: space-between; gap: 1rem; }
.yours { font-weight: 600; }
"""


def html_report(report: Report) -> str:
    """Return the page.

    Args:
        report: The estimate.
    """
    body = "\n".join(
        [
            f"<h1>{escape(report.title)}</h1>",
            f"<p>{escape(report.model)}</p>",
            *_answer(report),
            "<h2>Memory per GPU, by way to shard</h2>",
            *_bars(report),
            _key(report),
            *_table(report),
            "<h2>Memory over one step</h2>",
            *_course(report),
            *_changes(report),
            *_notes(report),
        ]
    )
    return html_page(report.title, body, style=_STYLE)


def _gib(amount: int) -> str:
    return f"{amount / GIB:.2f}"


def _answer(report: Report) -> Iterator[str]:
    if report.memory is None:
        yield '<p class="verdict">The memory of the GPUs is not known: pass --gpu-memory.</p>'
    else:
        have = f"{_gib(report.gpu)} of {_gib(report.memory)} GiB per GPU"
        yield f'<p class="verdict" id="verdict">{report.verdict}: {have}</p>'
        fewest = f"{report.fewest} ranks" if report.fewest else "no number of ranks is enough"
        batch = "unknown" if report.batch is None else str(report.batch)
        yield f"<p>Smallest world size: {fewest}. Largest batch per rank: {batch}.</p>"
    yield f"<p>The calculated peak is at {escape(moment_words(report.yours.need))}.</p>"


def _bars(report: Report) -> Iterator[str]:
    longest = report.longest
    for row in report.rows:
        spans = "".join(
            f'<span data-part="{name}" style="width:{100 * amount / longest:.3f}%;background:{_COLOURS[name]}"'
            f' title="{name}: {_gib(amount)} GiB"></span>'
            for name, amount in shares(row.need.parts, row.need.context)
        )
        limit = ""
        if report.memory:
            limit = (
                f'<span class="limit" style="left:{100 * report.memory / longest:.3f}%" title="one GPU"></span>'
            )
        words = f"{_gib(row.need.gpu)} GiB" + (f", {row.verdict}" if row.verdict != "unknown" else "")
        kind = "row yours" if row.is_yours else "row"
        label = escape(row.label)
        yield (
            f'<div class="{kind}"><p><span>{label}</span><span>{words}</span></p>'
            f'<div class="bar" role="img" aria-label="{label}: {words}">{spans}{limit}</div></div>'
        )


def _key(report: Report) -> str:
    names = [
        name
        for name in _COLOURS
        if any(dict(shares(row.need.parts, row.need.context)).get(name) for row in report.rows)
    ]
    items = "".join(f'<li><i style="background:{_COLOURS[name]}"></i>{name}</li>' for name in names)
    line = "<li>the upright line is the memory of one GPU</li>" if report.memory else ""
    return f'<ul class="key">{items}{line}</ul>'


def _table(report: Report) -> Iterator[str]:
    parts = [name for name in _COLOURS if name != "context"]
    heads = "".join(f"<th>{name}</th>" for name in parts)
    yield f'<div class="wide"><table id="strategies"><tr><th>GiB per GPU</th>{heads}'
    yield "<th>context</th><th>total</th></tr>"
    for row in report.rows:
        cells = "".join(f"<td>{_gib(row.need.parts[name])}</td>" for name in parts)
        total = f"<td>{_gib(row.need.context)}</td><td>{_gib(row.need.gpu)}</td>"
        yield f"<tr><td>{escape(row.label)}</td>{cells}{total}</tr>"
    yield "</table></div>"


def _course(report: Report) -> Iterator[str]:
    """Yield the traced course of the step, or the moments that were calculated."""
    trace = report.exact
    if trace is not None:
        where = f" of {trace.module}" if trace.module else ""
        yield (
            f"<p>Traced on rank 0: {_gib(trace.total)} GiB at the peak, in the {trace.phase}{escape(where)}. "
            "Each point is the highest of a short stretch of operations.</p>"
        )
        yield _drawing(trace.course, report.memory)
        return
    yield "<p>Four moments of the step, calculated. --exact traces the whole step.</p>"
    yield '<div class="wide"><table id="moments"><tr><th class="text">moment</th><th>GiB per GPU</th></tr>'
    for name, parts in report.yours.need.moments.items():
        total = sum(parts.values()) + report.yours.need.context
        yield f'<tr><td class="text">{escape(MOMENTS[name])}</td><td>{_gib(total)}</td></tr>'
    yield "</table></div>"


def _drawing(course: Sequence[tuple[str, int]], memory: int | None) -> str:
    top = max([amount for _, amount in course] + [1])
    shown_limit = memory if memory is not None and memory < 1.5 * top else None
    top = max(top, shown_limit or 0)
    step = (_WIDTH - _LEFT) / max(1, len(course))
    bars = "".join(
        f'<rect x="{_LEFT + number * step:.2f}" y="{_y(amount, top):.2f}" width="{step + 0.3:.2f}" '
        f'height="{_HEIGHT - _BOTTOM - _y(amount, top):.2f}" fill="{_PHASES[phase]}">'
        f"<title>{phase}: {_gib(amount)} GiB</title></rect>"
        for number, (phase, amount) in enumerate(course)
    )
    marks = "".join(
        f'<text x="0" y="{_y(part * top // 4, top) + 4:.1f}">{part * top / 4 / GIB:.1f}</text>'
        for part in range(5)
    )
    limit = ""
    if shown_limit:
        y = _y(shown_limit, top)
        limit = (
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-width="2"/>'
        )
    return (
        f'<svg id="course" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over one step">'
        f"{marks}{bars}{limit}{_phase_words(course, step)}</svg>"
    )


def _y(amount: int, top: int) -> float:
    return 10 + (_HEIGHT - _BOTTOM - 10) * (1 - amount / top)


def _phase_words(course: Sequence[tuple[str, int]], step: float) -> str:
    starts: dict[str, int] = {}
    for number, (phase, _) in enumerate(course):
        starts.setdefault(phase, number)
    return "".join(
        f'<text x="{_LEFT + number * step:.1f}" y="{_HEIGHT - 8}">{phase}</text>'
        for phase, number in starts.items()
    )


def _changes(report: Report) -> Iterator[str]:
    if not report.changes:
        return
    yield "<h2>What to change</h2>"
    yield '<div class="wide"><table id="changes"><tr><th>change</th><th>saves GiB</th><th>then</th>'
    yield '<th class="text">fits</th><th class="text">how</th><th class="text">cost</th></tr>'
    for change in report.changes:
        words = (change.option, change.cost)
        cells = "".join(f'<td class="text">{escape(word)}</td>' for word in words)
        verdict = verdict_of(change.need.gpu, report.memory)
        yield (
            f"<tr><td>{escape(change.what)}</td><td>{_gib(change.saves)}</td><td>{_gib(change.need.gpu)}</td>"
            f'<td class="text">{verdict}</td>{cells}</tr>'
        )
    yield "</table></div>"


def _notes(report: Report) -> Iterator[str]:
    if report.notes:
        yield "<h2>About these numbers</h2>"
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report.notes) + "</ul>"
