"""A page of one run: what it was, and each rank's steps over time, drawn; without scripts, and all in one file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import isfinite

from fsdplaunch.display_text import GIB, one_line
from fsdplaunch.step_record import Step
from fsdplaunch.watch import Snapshot
from fsdplaunch.watch.view import rank_cells

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 860, 190, 56, 24, 22
_MOST_LINES = 64
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#882255", "#999933", "#6a51a3")
_SLOW = "#d55e00"
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"><style>
:root { color-scheme: light dark; --ink: #1a1a1a; --dim: #666; --paper: #fff; --grid: #ddd }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --dim: #999; --paper: #161616; --grid: #383838 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 900px; padding: 0 1em; overflow-wrap: anywhere } table { border-collapse: collapse; margin: 1em 0 }
td { padding: .15em 1.2em .15em 0; vertical-align: top }
.names td:first-child { color: var(--dim); white-space: nowrap } .ranks td { text-align: right }
.ranks tr:first-child { color: var(--dim) } h2 { font-size: 1.1em; margin: 1.6em 0 .3em } svg { width: 100% }
svg text { fill: var(--dim); font-size: 12px } line { stroke: var(--grid) }
polyline { fill: none; stroke-width: 1.5 } </style>"""


def page(look: Snapshot, facts: Mapping[str, str], keys: Sequence[tuple[str, str, str]]) -> str:
    """Return the text of a page: what is said of the run, its steps, and its configuration."""
    title = _text(f"{look.run.script} {look.run.id}")
    parts = [f"{_HEAD}<title>{title}</title><h1>{title}</h1>", _table(list(facts.items()), "names")]
    parts += [*_charts(look), _table(rank_cells(look, look.summary.ranks), "ranks")]
    parts += ["<h2>Configuration, where it is not the default</h2>", _table(keys, "names")] if keys else []
    return "\n".join([*parts, "</html>\n"])


def _text(text: str) -> str:
    return escape(one_line(text))


def _table(rows: Sequence[Sequence[str]], kind: str) -> str:
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f'<table class="{kind}">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


def _charts(look: Snapshot) -> Iterator[str]:
    slow = look.summary.slowest.rank if look.summary.slowest is not None else None
    ranks = sorted(sorted(look.ranks, key=lambda rank: rank != slow)[:_MOST_LINES])
    is_few = len(ranks) <= len(_COLOURS)
    colours = {rank: _COLOURS[place] if is_few else _COLOURS[0] for place, rank in enumerate(ranks)}
    colours |= {slow: _SLOW} if slow is not None else {}
    names = [f'<span style="color:{colours[rank]}">&#9632; rank {rank}</span>' for rank in ranks]
    legend = " ".join(names if is_few else [f"{len(ranks)} of {len(look.ranks)} ranks, a slow one in orange"])
    yield f"<p>Over the run's optimizer steps: {legend}</p>"
    measures: dict[str, Callable[[Step], float]] = {
        "Time of a step, ms": lambda step: 1000 * step.seconds,
        "Waiting for data, % of a step": lambda step: 100 * step.data_seconds / step.seconds,
        "Waiting for others, % of a step": lambda step: 100 * step.peer_seconds / step.seconds,
        "Memory, GiB": lambda step: step.memory_bytes / GIB,
    }
    for title, measure in measures.items():
        parts = {rank: [step for step in look.ranks[rank].history if step.seconds > 0] for rank in ranks}
        lines = {rank: [(step.number, measure(step)) for step in steps] for rank, steps in parts.items()}
        lines = {rank: [point for point in line if isfinite(sum(point))] for rank, line in lines.items()}
        if values := [value for line in lines.values() for _, value in line]:
            top = 100.0 if "%" in title else max(values) or 1.0
            yield f"<h2>{title}</h2>{_chart(lines, colours, top, opacity=1.0 if is_few else 0.4)}"


def _chart(
    lines: Mapping[int, Sequence[tuple[float, float]]], colours: Mapping[int, str], top: float, *, opacity: float
) -> str:
    across = (_WIDTH - _LEFT - _RIGHT) / (right := max(x for line in lines.values() for x, _ in line))
    up, floor_y, made = (_HEIGHT - _BELOW - 8) / top, _HEIGHT - _BELOW, list[str]()
    for value in (0, top / 2, top):
        y = floor_y - value * up
        made.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        made.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    places = ((value, _LEFT + value * across) for value in (0, right // 2, right))
    made += [f'<text x="{x:.1f}" y="{_HEIGHT - 4}" text-anchor="middle">{value:.4g}</text>' for value, x in places]
    for rank in sorted(lines, key=lambda rank: colours[rank] == _SLOW):  # which is drawn over the others
        path = " ".join(f"{_LEFT + x * across:.1f},{floor_y - min(y, top) * up:.1f}" for x, y in lines[rank])
        look = f'stroke="{colours[rank]}" opacity="{1 if colours[rank] == _SLOW else opacity}"'
        made.append(f'<polyline points="{path}" {look}><title>rank {rank}</title></polyline>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(made)}</svg>'
