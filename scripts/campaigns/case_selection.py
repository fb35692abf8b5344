"""Which cases of a campaign are run: all, those that the command line names, or one part of several."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """What the command line chose.

    Attributes:
        words: Parts of names; empty for all.
        part: Which part of the cases, from 1.
        parts: How many parts there are.
    """

    words: Sequence[str]
    part: int
    parts: int

    def of(self, names: Sequence[str]) -> list[str]:
        """Return the chosen names. Every n-th one makes a part, so that parts take about the same time."""
        named = [name for name in names if not self.words or any(word in name for word in self.words)]
        return named[self.part - 1 :: self.parts]


def read_selection(purpose: str) -> Selection:
    """Return what the command line chose; end with 2 where it cannot be understood.

    Args:
        purpose: The campaign's own description.
    """
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the cases")
    options = parser.parse_args()
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part {options.part}: write it as 1/4, which is the first of four")
    return Selection(options.only, int(part), int(parts))
