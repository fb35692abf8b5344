"""Shares of a merge that are written by themselves: files for machines, runs of tensors for processes."""

from collections.abc import Sequence
from dataclasses import replace

from fsdplaunch.checkpoint.merge.plan import PlannedFile, PlannedTensor


def files_of_part(files: Sequence[PlannedFile], number: int, count: int) -> tuple[PlannedFile, ...]:
    """Return the files that part `number` of `count` writes; everyone who knows the plan finds the same.

    Each file, the largest first, goes to the part that has the fewest bytes until then. With more parts than files
    some write none.

    Args:
        files: Those of the plan.
        number: From 1 on.
        count: How many parts there are.
    """
    loads = [0] * count
    chosen = set()
    for file in sorted(files, key=lambda each: (-each.nbytes, each.name)):
        part = loads.index(min(loads))
        loads[part] += file.nbytes
        if part == number - 1:
            chosen.add(file.name)
    return tuple(file for file in files if file.name in chosen)


def split_by_tensors(files: Sequence[PlannedFile], count: int) -> list[tuple[PlannedFile, ...]]:
    """Return up to `count` shares of the tensors, of about as many bytes each; a file may be in several."""
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    shares: list[dict[str, list[PlannedTensor]]] = [{} for _ in range(count)]
    done = 0
    for file in files:
        for tensor in file.tensors:
            middle = done + tensor.nbytes / 2
            share = shares[min(count - 1, int(middle * count / total)) if total else 0]
            share.setdefault(file.name, []).append(tensor)
            done += tensor.nbytes
    by_name = {file.name: file for file in files}
    return [
        tuple(replace(by_name[name], tensors=tuple(tensors)) for name, tensors in share.items())
        for share in shares
        if share
    ]
