"""What to read from where: decided by the first rank before anything of the model changes, then carried out."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdplaunch.checkpoint.model_weights import StoredWeight, WeightFiles, check_index, find_weight_files
from fsdplaunch.display_text import listed, size_words
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import clean_name, unwrapped
from fsdplaunch.runtime.loading.broadcast import broadcast_all, describe_pickled, open_pickled
from fsdplaunch.runtime.loading.read_shards import LocalShard, ShardReader, source_dtype

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTensor:
    """One tensor of the model that files may hold."""

    names: tuple[str, ...]  # all its clean names; tied parameters have several
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype  # the dtype it is kept in
    saved: bool = True  # whether a state dict holds it; False for non-persistent buffers


@dataclass(slots=True, kw_only=True)
class NameMatch:
    """The result."""

    # what to read, by the first name of the model's tensor; tied names that files hold twice give two
    found: dict[str, tuple[StoredWeight, ...]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # names of the model's tensors that no file holds
    unexpected: list[str] = field(default_factory=list)  # names in the files that the model does not have
    passed: list[str] = field(default_factory=list)  # names in the files that are left out without complaint
    prefix: str | None = None  # how the files' names were changed, in words, or None


def match_weights(
    model: nn.Module,
    wanted: Sequence[RequestedTensor],
    weights: Mapping[str, StoredWeight],
    *,
    strict: bool,
    where: str,
) -> NameMatch:
    """Find each of the model's tensors in the files.

    Wrappers' names are taken out of the files' names. A name that the model does not have is tried with the
    model's `base_model_prefix`, in front and taken off, or, when no name fits at all, with the one prefix that all
    have. What torch's `load_state_dict` would not load either, other shapes, or names under `strict`, is an error.
    """
    owner = {name: each for each in wanted for name in each.names}
    names = {stored: clean_name(stored) for stored in weights}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {stored: name.removeprefix("module.") for stored, name in names.items()}
    bare = unwrapped(model)
    prefix = _prefix(bare, owner, names.values())
    result = NameMatch()
    taken: dict[str, str] = {}
    prefixed: set[str] = set()
    for stored, name in names.items():
        tried = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if prefix else (name,)
        target = next((each for each in tried if each in owner), None)
        if target is None:
            result.unexpected.append(stored)
        elif not owner[target].saved:
            result.passed.append(stored)  # old files have it, maybe in a coarser dtype than the model makes it in
        elif taken.setdefault(target, stored) != stored:
            msg = f"{taken[target]} and {stored} in {where} both stand for {target} of {type(model).__name__}"
            raise CheckpointError(msg, hint="remove one of the two from the files")
        else:
            prefixed |= {"in front" if len(target) > len(name) else "taken off"} if target != name else set()
            first = owner[target].names[0]
            result.found[first] = (*result.found.get(first, ()), weights[stored])
    result.prefix = f"{prefix}. {' and '.join(sorted(prefixed))}" if prefixed else None
    may_lack = _patterns(model, "_keys_to_ignore_on_load_missing")
    result.missing = [
        each.names[0]
        for each in wanted
        if each.saved and each.names[0] not in result.found and not any(map(may_lack, each.names))
    ]
    # A buffer that is not saved any more may still be in old files: it is known by the last two parts of its name.
    buffers = {tuple(name.split(".")[-2:]) for each in wanted if not each.saved for name in each.names}
    may_exceed = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    known = {name for name in result.unexpected if may_exceed(name) or tuple(name.split(".")[-2:]) in buffers}
    result.passed += [name for name in result.unexpected if name in known]
    result.unexpected = [name for name in result.unexpected if name not in known]
    _check(bare, wanted, result, strict=strict, where=where)
    return result


def _prefix(model: nn.Module, owner: Mapping[str, RequestedTensor], names: Iterable[str]) -> str:
    own = getattr(model, "base_model_prefix", "")
    if isinstance(own, str) and own:
        return own
    if any(name in owner for name in names):
        return ""
    theirs, ours = ({name.partition(".")[0] for name in side} for side in (names, owner))
    return next((heads.pop() for heads in (theirs, ours) if len(heads) == 1), "")


def _patterns(model: nn.Module, attribute: str) -> Callable[[str], bool]:
    """Return whether a name fits one of the expressions that a model of transformers, or a part of it, lists."""
    listed = [pattern for module in model.modules() for pattern in getattr(module, attribute, None) or ()]
    fitting = [re.compile(pattern) for pattern in listed]
    return lambda name: any(pattern.search(name) for pattern in fitting)


def _check(
    model: nn.Module, wanted: Sequence[RequestedTensor], result: NameMatch, *, strict: bool, where: str
) -> None:
    """Raise what torch's `load_state_dict` would say."""
    faults = []
    for kind, names in (("unexpected", result.unexpected), ("missing", result.missing)):
        if strict and names:
            quoted = [f'"{name}"' for name in names]
            faults.append(f"{kind} key(s) in the files: {listed(quoted, _SHOWN)}")
    mismatched = [
        f"size mismatch for {each.names[0]}: {list(stored.shape)} in the files, {list(each.shape)} in the model"
        for each in wanted
        for stored in result.found.get(each.names[0], ())
        if stored.shape != each.shape
    ]
    if faults := faults + mismatched:
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        msg = f"{where} does not fit {type(model).__name__}:\n  " + "\n  ".join(faults[:_SHOWN]) + more
        raise CheckpointError(msg, hint=_MISMATCHED if mismatched else _STRICT)


_MISMATCHED = "build the model with the config.json of these weights"
_STRICT = (
    "build the model these weights belong to; with checkpoint.weights_strict: false (or strict=False) the model "
    "initialises what is missing and ignores what is left over; where transformers converts names or shapes "
    "while it loads, build the model with from_pretrained instead"
)


@dataclass(slots=True, kw_only=True)
class LoadPlan:
    """How one model gets its weights."""

    files: WeightFiles  # the weight files; what they hold is in `match` as far as it is wanted
    match: NameMatch  # which tensor of the files belongs to which of the model
    # the tensors of pickled files by the model's names, on the first rank; else empty
    full: dict[str, torch.Tensor]
    tensors: int = 0  # how many came from the files, once it has been carried out
    nbytes: int = 0  # how many bytes this rank read for it
    seconds: float = 0.0  # how long it took

    def stored(self, names: Sequence[str]) -> str | None:
        """Return the one of a tensor's names under which its source is noted; None if no file holds it."""
        return next((name for name in names if name in self.match.found), None)


def make_plan(
    ranks: RankGroup,
    model: nn.Module,
    wanted: Sequence[RequestedTensor],
    where: Path | Mapping[str, Any],
    *,
    strict: bool,
) -> LoadPlan:
    """Decide on the first rank what is read from where, and send it to all; nothing is read but headers.

    Pickled files, and a state dict in their place, are opened on the first rank only. Files that are damaged or of
    another model are a CheckpointError on every rank.
    """
    made: tuple[WeightFiles, NameMatch] | None = None
    full: dict[str, torch.Tensor] = {}
    with ranks.raise_on_all(f"load weights into {type(model).__name__}"):
        if ranks.is_first:
            if isinstance(where, Path):
                files = find_weight_files(where)
                opened = open_pickled(files.paths) if files.pickled else {}
            else:
                files = WeightFiles(Path("the state dict"), (), (), pickled=True)
                opened = {name: (0, each) for name, each in where.items() if isinstance(each, torch.Tensor)}
            if files.pickled:
                files = replace(files, weights=describe_pickled(opened))
                check_index(files)
            match = match_weights(model, wanted, files.weights, strict=strict, where=str(files.where))
            for each in wanted:
                for stored in match.found.get(each.names[0], ()):
                    source_dtype(stored, each.dtype)
            full = {name: opened[stored[0].name][1] for name, stored in match.found.items()} if opened else {}
            made = replace(files, weights={}, index=None), match  # the list of all they hold can be long
    files, match = ranks.from_first(made)
    return LoadPlan(files=files, match=match, full=full)


_NAMES_SHOWN = 5


def execute_plan(ranks: RankGroup, plan: LoadPlan, held: Sequence[LocalShard]) -> None:
    """Read this rank's shards, in one order on all ranks, of everything the plan found; every rank calls this."""
    begun = time.perf_counter()
    due = [(shard, name) for shard in held if (name := plan.stored(shard.names)) is not None]
    plan.tensors = len(due)
    with torch.no_grad(), ranks.raise_on_all(f"load weights from {plan.files.where}"):
        if len({name for _, name in due}) != len(plan.match.found):
            missed = sorted(set(plan.match.found) - {name for _, name in due})
            msg = f"{missed[0]} is nowhere in the sharded model"
            hint = "this is a defect in loading this model; build it with from_pretrained"
            raise CheckpointError(msg, hint=hint)
        if not plan.files.pickled:
            found = plan.match.found
            with closing(ShardReader(plan.files)) as reader:
                # In the order of the files, so that disks read on and on.
                for shard, name in sorted(due, key=lambda one: (found[one[1]][0].file, found[one[1]][0].start)):
                    reader.fill(shard, *found[name])
                plan.nbytes = reader.bytes_read
    if plan.files.pickled:
        typed = [(shard, name, source_dtype(plan.match.found[name][0], shard.local.dtype)) for shard, name in due]
        with torch.no_grad():
            broadcast_all(ranks, plan.full, typed)
        plan.full.clear()
    plan.seconds = time.perf_counter() - begun


def report_loaded(plan: LoadPlan, *, name: str, made: Sequence[str] = ()) -> None:
    """Print on rank 0 what was loaded, and what does not go without saying: what was `made`, not loaded."""
    amount = "sent by rank 0" if plan.files.pickled else f"{size_words(plan.nbytes)} read by rank 0"
    words = [f"{name}: {plan.tensors} tensors from {plan.files.where}, {amount} in {plan.seconds:.1f} s"]
    if plan.match.prefix:
        words.append(f"names with {plan.match.prefix}")
    left_over = [*plan.match.unexpected, *plan.match.passed]
    if left_over:
        words.append(f"in the files but not in the model: {listed(left_over, _NAMES_SHOWN)}")
    if made:
        words.append(f"in the model but not in the files: {listed(made, _NAMES_SHOWN)}")
    messages.say("; ".join(words))
