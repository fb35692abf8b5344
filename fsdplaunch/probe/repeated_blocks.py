"""Find a model's repeated blocks in its parameter names: `model.layers.0.`, `model.layers.1.` and so on."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FEWEST = 2
_MOST_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlocks:
    """One run of repeated blocks.

    Attributes:
        prefix: Name of the list, without the number: `model.layers`.
        count: How many there are.
        parameters_each: Parameters of the largest.
        parameters: Parameters of all.
    """

    prefix: str
    count: int
    parameters_each: int
    parameters: int


def find_blocks(counts: Mapping[str, int]) -> tuple[RepeatedBlocks, ...]:
    """Return the outermost lists whose members are mostly alike, largest share of the parameters first.

    A list counts when its numbers run from 0 and at least half of its members hold the same names. A list of
    unlike stages (a convolution network's) is looked into instead.

    Args:
        counts: Parameters per tensor, by the tensor's full name.
    """
    found = _search(dict(counts), "")
    return tuple(sorted(found, key=lambda group: (-group.parameters, group.prefix)))


def _search(counts: dict[str, int], prefix: str) -> Iterator[RepeatedBlocks]:
    lists: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for name, count in counts.items():
        parts = name.split(".")
        numbers = (place for place, part in enumerate(parts[:-1]) if part.isdecimal() and len(part) < _MOST_DIGITS)
        at = next(numbers, None)
        if at is not None:
            lists[".".join(parts[:at])][int(parts[at])][".".join(parts[at + 1 :])] = count
    for place, members in lists.items():
        full = f"{prefix}{place}" if place else prefix.rstrip(".")
        if _repeats(members):
            sizes = [sum(member.values()) for member in members.values()]
            yield RepeatedBlocks(prefix=full, count=len(sizes), parameters_each=max(sizes), parameters=sum(sizes))
        else:
            for number, member in members.items():
                yield from _search(member, f"{full}.{number}.")


def _repeats(members: Mapping[int, Mapping[str, int]]) -> bool:
    if len(members) < _FEWEST or set(members) != set(range(len(members))):
        return False
    alike = Counter(frozenset(member) for member in members.values()).most_common(1)[0][1]
    return 2 * alike >= len(members) and alike >= _FEWEST
