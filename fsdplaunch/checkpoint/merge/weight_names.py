"""Which of a checkpoint's entries are weights of the model, which ones a user asks for, and under which names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, NamePath, StoredTensor
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError, UsageError

_WILD = set("*?[")


def matches(name: str, pattern: str) -> bool:
    """Say whether a weight's name fits a pattern."""
    if _WILD & set(pattern):
        return fnmatchcase(name, pattern)
    return starts_with(name, pattern)


def starts_with(name: str, prefix: str) -> bool:
    """Say whether `prefix` is `name` or its leading dotted parts."""
    parts = prefix.removesuffix(".")
    return name == parts or name.startswith(parts + ".")


def pick(names: Sequence[str], *, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[bool]:
    """Return which of `names` are merged: those of `only` (all when it is empty) without those of `exclude`.

    Raises:
        UsageError: When a pattern fits no name, or nothing is left.
    """
    for option, patterns in (("--only", only), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                option_text = f"{option} {pattern!r}"
                raise _no_match(option_text, names)
    wanted = [
        (not only or any(matches(name, pattern) for pattern in only))
        and not any(matches(name, pattern) for pattern in exclude)
        for name in names
    ]
    if not any(wanted):
        msg = f"--only and --exclude leave none of the {len(names)} weights"
        raise UsageError(msg, hint="exclude less")
    return wanted


def rename(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return `names` with the leading parts OLD replaced by NEW; the first pair that fits a name counts.

    An empty OLD puts NEW in front of every name, an empty NEW takes OLD away.

    Raises:
        UsageError: When an OLD fits no name, or nothing would be left of one.
    """
    used: set[int] = set()
    result = []
    for name in names:
        found = next((at for at, (old, _) in enumerate(pairs) if not old or starts_with(name, old)), None)
        if found is None:
            result.append(name)
            continue
        used.add(found)
        result.append(_replaced(name, *pairs[found]))
    for at, (old, new) in enumerate(pairs):
        if at not in used:
            option_text = f"--rename {old}={new}"
            raise _no_match(option_text, names)
    return result


def _replaced(name: str, old: str, new: str) -> str:
    rest = name[len(old.removesuffix(".")) :].removeprefix(".") if old else name
    changed = ".".join(part for part in (new.removesuffix("."), rest) if part)
    if not changed:
        msg = f"--rename {old}={new} leaves nothing of the name {short(name)}"
        raise UsageError(msg, hint="give a NEW that is not empty")
    return changed


def _no_match(option: str, names: Sequence[str]) -> UsageError:
    shown = ", ".join(short(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")  # noqa: PLR2004
    return UsageError(
        f"{option} fits none of the {len(names)} weights",
        hint=f"names are {shown}; without * it takes leading parts",
    )


MAX_NAME = 4096
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_OUTER = "module"
_MODEL_KEYS = ("model", "model_state_dict")
OPTIMIZER_KEYS = {"optimizer", "optim", "optimizers", "optimizer_state_dict", "optim_state_dict"}
OPTIMIZER_TABLES = {"state", "param_groups"}
_RENAME_HINT = "rename to names that no other weight has"
_KEEP_HINT = "merge with the names kept as they are (strip_wrappers=False)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What goes into the merged file.

    Attributes:
        root: The keys under which the weights were found, for example `("model",)`.
        tensors: Final name and stored tensor of each weight.
        plain: The weights' names without wrappers, before they were renamed.
        skipped: Full names of everything that is not a weight of the model.
        excluded: Full names of the weights that were left out on request.
    """

    root: NamePath
    tensors: tuple[tuple[str, StoredTensor], ...]
    plain: tuple[str, ...]
    skipped: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Return stored and final name of the weights that lost a wrapper's name or were renamed."""
        depth = len(self.root)
        pairs = ((".".join(map(str, tensor.path[depth:])), name) for name, tensor in self.tensors)
        return tuple((stored, name) for stored, name in pairs if stored != name)


def select_weights(
    index: CheckpointIndex,
    *,
    where: str,
    strip_wrappers: bool = True,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    renames: Sequence[tuple[str, str]] = (),
) -> Selection:
    """Find the model's weights in `index` and name them as the unwrapped model does.

    Args:
        index: The checkpoint.
        where: The checkpoint, for messages.
        strip_wrappers: Take the wrappers of training out of names.
        only: Patterns of the names to merge, see `filters.py`; none means all.
        exclude: Patterns of the names to leave out.
        renames: OLD and NEW leading parts of names, applied last.

    Raises:
        CheckpointError: When this is an optimizer's checkpoint, when there is no weight, when two names meet.
        UsageError: When a pattern fits nothing.
    """
    root = find_root([tensor.path for tensor in index.tensors], where)
    depth = len(root)
    tensors = [tensor for tensor in index.tensors if len(tensor.path) > depth and tensor.path[:depth] == root]
    if any(len(tensor.path) > depth + 1 and tensor.path[depth] in OPTIMIZER_KEYS for tensor in tensors):
        # torchtitan: the weights stand beside the optimizer and the state of the training, each below a key.
        tensors = [tensor for tensor in tensors if len(tensor.path) == depth + 1]
    if not tensors:
        msg = f"{where} holds no tensor"
        raise CheckpointError(msg, hint="give the folder of the model's own checkpoint")
    names = final_names([tensor.path[depth:] for tensor in tensors], strip_wrappers=strip_wrappers)
    wanted = pick(names, only=only, exclude=exclude)
    plain = [name for name, keep in zip(names, wanted, strict=True) if keep]
    final = rename(plain, renames)
    kept = [tensor for tensor, keep in zip(tensors, wanted, strict=True) if keep]
    named = tuple(zip(final, kept, strict=True))
    _check_names(named, where, _RENAME_HINT if renames else _KEEP_HINT)
    excluded = tuple(tensor.name for tensor, keep in zip(tensors, wanted, strict=True) if not keep)
    chosen = {tensor.name for tensor in tensors}
    skipped = tuple(entry.name for entry in index.entries if entry.name not in chosen)
    return Selection(root=root, tensors=named, plain=tuple(plain), skipped=skipped, excluded=excluded)


def find_root(paths: Sequence[NamePath], where: str) -> NamePath:
    """Return the keys above the model's weights: `model`, a sole outer key, or the one beside an optimizer.

    Args:
        paths: The paths of the checkpoint's tensors.
        where: The checkpoint, for messages.
    """
    root: NamePath = ()
    while True:
        inner = [path[len(root) :] for path in paths if path[: len(root)] == root]
        nested = {path[0]: None for path in inner if len(path) > 1}
        _check_is_model(root, nested, where)
        weights_here = any(len(path) == 1 for path in inner)
        model = next((key for key in _MODEL_KEYS if key in nested), None)
        candidates = [key for key in nested if key not in OPTIMIZER_KEYS]
        if model is not None:
            return _below((*root, model), inner, where)
        if len(candidates) == 1 and not weights_here and (not root or len(candidates) < len(nested)):
            root = (*root, candidates[0])
        elif len(candidates) < len(nested) and not weights_here:
            msg = f"{where} holds an optimizer beside {_listed(candidates)}"
            raise CheckpointError(msg, hint="save the model alone, or under the key 'model'")
        else:
            return root


def _below(root: NamePath, inner: Sequence[NamePath], where: str) -> NamePath:
    """Return `root` when what stands below is a model."""
    tables = {path[1]: None for path in inner if path[0] == root[-1] and len(path) > 2}  # noqa: PLR2004
    _check_is_model(root, tables, where)
    return root


def final_names(paths: Sequence[NamePath], *, strip_wrappers: bool = True) -> list[str]:
    """Return each weight's name without the wrappers that training puts around modules.

    A leading `module.` goes only when every weight has it: DDP and FSDP put it in front of all.
    """
    parts = [[part for key in path for part in str(key).split(".")] for path in paths]
    if strip_wrappers:
        parts = [[part for part in name if part not in _WRAPPERS] for name in parts]
        while parts and all(len(name) > 1 and name[0] == _OUTER for name in parts):
            parts = [name[1:] for name in parts]
    return [".".join(name) for name in parts]


def _check_is_model(root: NamePath, nested: Iterable[str | int], where: str) -> None:
    keys = set(nested)
    if (
        (root and root[-1] in OPTIMIZER_KEYS)
        or (keys and keys <= OPTIMIZER_TABLES)
        or (keys <= OPTIMIZER_KEYS and keys)
    ):
        msg = f"{where} is an optimizer's checkpoint, which safetensors cannot hold"
        hint = "give the model's folder (pytorch_model_fsdp_0), or merge this one with --optimizer"
        raise CheckpointError(msg, hint=hint)


def _check_names(named: Iterable[tuple[str, StoredTensor]], where: str, hint: str) -> None:
    seen: dict[str, str] = {}
    for name, tensor in named:
        if not name or name == "__metadata__" or len(name) > MAX_NAME or not name.isprintable():
            msg = f"{where}: {short(name)} cannot be the name of a tensor"
            raise CheckpointError(
                msg, hint="the checkpoint is damaged, or a module has a name that files cannot hold"
            )
        if name in seen:
            msg = f"{where}: {short(seen[name])} and {short(tensor.name)} would both be called {short(name)}"
            raise CheckpointError(msg, hint=hint)
        seen[name] = tensor.name


def _listed(keys: Sequence[str | int]) -> str:
    return ", ".join(short(str(key)) for key in keys[:5])
