"""The last steps of one node's ranks as a message to node 0, where that does not see their records, and back."""

from collections.abc import Mapping, Sequence
from math import floor, inf, isnan, log2, nan
from typing import Any

from fsdplaunch.files import matches
from fsdplaunch.step_record import RankSteps, Step

NODE_STEPS = "steps.json"
"""File of it in a node's folder on node 0."""
SEND_SECONDS = 2.0
_SENT, _WINDOW_SECONDS = 20, 10.0
"""Steps of a rank that are sent: over about so many seconds, as far as its record of single steps goes back."""
_SHORTEST = 1e-6
_TIMES, _ALL = 5, 9
"""Fields that are sent of a step, as `Step` has them: up to its waiting for others, of the last to its tokens."""


def _amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


def _is_step(value: Any) -> bool:
    known = isinstance(value, list) and len(value) in (_TIMES, _ALL) and _amount(value[0])
    return known and all(one is None or _amount(one) for one in value)


ROW = {
    **dict.fromkeys(
        ("rank", "pid", "made", "total", "memory_limit"), lambda value: type(value) is int and 0 <= value < 2**64
    ),
    **{"ended": _amount, "steps": lambda value: isinstance(value, list) and all(map(_is_step, value[:_SENT]))},
}
"""What is said of a rank; None where something is not known."""


def packed(ranks: Mapping[int, RankSteps]) -> list[dict[str, Any]]:
    """Return what to send: of short steps every second, fourth or so, by their numbers alike on all ranks."""
    rows = []
    for rank, record in ranks.items():
        timed = [step for step in record.recent if _amount(step.number) and _amount(step.seconds)]
        apart = min(len(timed), _WINDOW_SECONDS / max(timed[-1].seconds, _SHORTEST)) / _SENT if timed else 1.0
        chosen = [step for step in timed if step.number % 2 ** max(0, floor(log2(apart))) == 0][-_SENT:]
        told = [step[: _ALL if step is chosen[-1] else _TIMES] for step in chosen]
        steps = [[None if isnan(value) else round(value, 6) for value in step] for step in told]
        known = {name: getattr(record, name) for name in ("pid", "made", "ended", "total", "memory_limit")}
        rows.append({"rank": rank, **known, "steps": steps})
    return [row for row in rows if matches(row, ROW)]  # whatever a script has done to its record


def unpacked(rows: Sequence[Mapping[str, Any]]) -> dict[int, RankSteps]:
    """Return the records that rows stand for, as far as they say it."""
    found = {}
    for row in rows:
        steps = [Step(*(nan if value is None else value for value in step)) for step in row["steps"][:_SENT]]
        known = row["total"], row["memory_limit"]
        found[row["rank"]] = RankSteps(row["pid"], row["made"], row["ended"], steps, [], *known)
    return found
