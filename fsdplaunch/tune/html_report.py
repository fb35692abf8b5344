"""The result as one HTML page: step time against memory, with the frontier. Pure: returns text."""

from collections.abc import Iterator, Sequence
from html import escape

from fsdplaunch.display_text import html_page, size_words
from fsdplaunch.tune.result import TuneResult, closing_lines, step_words
from fsdplaunch.tune.search import Row
from fsdplaunch.tune.trial import Outcome

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 900, 420, 80, 45, 30
_COLOURS = {"kept": "#3a9a5b", "yours": "#4363b8", "fits": "#8a8f98", "not": "#d9534f"}
_WORDS = {"kept": "the one to keep", "yours": "yours", "fits": "fits", "not": "does not fit"}


def html_report(result: TuneResult) -> str:
    """Return the page."""
    title = f"tune {result.script} with {result.config} on {result.world} workers"
    lines = list(closing_lines(result))
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(line.strip())}</p>" for line in lines),
            "<h2>Time of a step against memory</h2>",
            "<p>Better is further down and to the left. The line joins those that no other beats in both.</p>",
            *_drawing(result),
            "<h2>Candidates</h2>",
            *_table(result),
        ]
    )
    return html_page(title, body)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both, from the least of the first number on."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _measured(result: TuneResult) -> list[tuple[Row, Outcome]]:
    return [(row, row.fastest) for row in result.rows if row.fastest is not None]


def _kind(row: Row, result: TuneResult) -> str:
    if row.candidate == result.kept:
        return "kept"
    return "yours" if row.candidate.is_yours else "fits" if row.fits else "not"


def _drawing(result: TuneResult) -> Iterator[str]:
    measured = _measured(result)
    if not measured:
        yield "<p>Nothing was measured.</p>"
        return
    widest = 1.1 * max([fastest.memory for _, fastest in measured] + [result.limit or 0])
    longest = 1.1 * max(fastest.quartiles[1] for _, fastest in measured)

    def at(memory: float, seconds: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _EDGE) * memory / max(widest, 1)
        return x, _EDGE + (_HEIGHT - _BOTTOM - _EDGE) * (1 - seconds / longest)

    label = "step time against memory"
    yield f'<svg id="candidates" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
    for part in range(5):
        x, y = at(widest * part / 4, longest * part / 4)
        yield f'<text x="0" y="{y + 4:.1f}">{step_words(longest * part / 4)}</text>'
        yield f'<text x="{x - 20:.1f}" y="{_HEIGHT - 12}">{size_words(widest * part / 4)}</text>'
    line = frontier([(fastest.memory, fastest.median) for row, fastest in measured if row.fits])
    corners = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in line)
    yield f'<polyline id="frontier" points="{corners}" fill="none" stroke="currentColor" stroke-dasharray="4 4"/>'
    if result.limit:
        x, _ = at(result.limit, 0)
        bottom = _HEIGHT - _BOTTOM
        yield f'<line id="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_EDGE}" y2="{bottom}" stroke="#d9534f"/>'
    for row, fastest in measured:
        yield _point(row, fastest, result, at(fastest.memory, fastest.median), [
            at(0, seconds)[1] for seconds in fastest.quartiles
        ])  # fmt: skip
    yield "</svg>"
    yield _key(result, measured)


def _point(
    row: Row, fastest: Outcome, result: TuneResult, place: tuple[float, float], spread: Sequence[float]
) -> str:
    x, y = place
    words = escape(f"{row.candidate.label}: {step_words(fastest.median)}, {size_words(fastest.memory)}")
    colour = _COLOURS[_kind(row, result)]
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{spread[0]:.1f}" y2="{spread[1]:.1f}" stroke="{colour}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"><title>{words}</title></circle>'
    )


def _key(result: TuneResult, measured: Sequence[tuple[Row, Outcome]]) -> str:
    kinds = {_kind(row, result) for row, _ in measured}
    items = "".join(
        f'<li><i style="background:{colour}"></i>{_WORDS[kind]}</li>'
        for kind, colour in _COLOURS.items()
        if kind in kinds
    )
    line = "<li>the upright red line is the memory allowed</li>" if result.limit else ""
    return f'<ul class="key">{items}{line}</ul>'


def _table(result: TuneResult) -> Iterator[str]:
    yield '<div class="wide"><table id="rows"><tr><th>candidate</th><th>step</th><th>a quarter below</th>'
    yield "<th>a quarter above</th><th>memory</th><th>predicted</th>"
    yield '<th>launches</th><th class="text">state</th></tr>'
    for row in sorted(result.rows, key=lambda row: row.fastest.median if row.fastest else float("inf")):
        fastest = row.fastest
        numbers = ["", "", "", ""]
        if fastest is not None:
            numbers = [*map(step_words, (fastest.median, *fastest.quartiles)), size_words(fastest.memory)]
        predicted = size_words(row.predicted) if row.predicted else ""
        cells = "".join(f"<td>{cell}</td>" for cell in (*numbers, predicted, len(row.outcomes)))
        state = escape(f"{row.state}: {row.reason}" if row.reason else row.state)
        yield f'<tr><td>{escape(row.candidate.label)}</td>{cells}<td class="text">{state}</td></tr>'
    yield "</table></div>"
