"""Which of a checkpoint's entries are weights of the model, which ones a user asks for, and under which names."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, NamePath, StoredTensor
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError, UsageError

_MAX_NAME = 4096
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_OUTER = "module"
_MODEL_KEYS = ("model", "model_state_dict")
_OPTIMIZER_KEYS = {"optimizer", "optim", "optimizers", "optimizer_state_dict", "optim_state_dict"}
_OPTIMIZER_TABLES = {"state", "param_groups"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What goes into the merged file."""

    root: NamePath  # the keys under which the weights were found, for example `("model",)`
    tensors: tuple[tuple[str, StoredTensor], ...]  # final name and stored tensor of each weight
    plain: tuple[str, ...]  # the weights' names without wrappers, before they were renamed
    skipped: tuple[str, ...]  # full names of everything that is not a weight of the model
    excluded: tuple[str, ...] = ()  # full names of the weights that were left out on request

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Return stored and final name of the weights that lost a wrapper's name or were renamed."""
        depth = len(self.root)
        pairs = ((".".join(map(str, tensor.path[depth:])), name) for name, tensor in self.tensors)
        return tuple((stored, name) for stored, name in pairs if stored != name)


def select_weights(
    index: CheckpointIndex,
    *,
    where: str,  # the checkpoint, for messages
    only: Sequence[str] = (),  # patterns of the names to merge; none means all
    exclude: Sequence[str] = (),  # patterns of the names to leave out
    renames: Sequence[tuple[str, str]] = (),  # OLD and NEW leading parts of names, applied last
) -> Selection:
    """Find the model's weights in `index` and name them as the unwrapped model does.

    Raises:
        CheckpointError: When this is an optimizer's checkpoint, when there is no weight, when two names meet.
        UsageError: When a pattern fits nothing.
    """
    root = _find_root([tensor.path for tensor in index.tensors], where)
    depth = len(root)
    tensors = [tensor for tensor in index.tensors if len(tensor.path) > depth and tensor.path[:depth] == root]
    if any(len(tensor.path) > depth + 1 and tensor.path[depth] in _OPTIMIZER_KEYS for tensor in tensors):
        # torchtitan: the weights stand beside the optimizer and the state of the training, each below a key.
        tensors = [tensor for tensor in tensors if len(tensor.path) == depth + 1]
    if not tensors:
        msg = f"{where} holds no tensor"
        raise CheckpointError(msg, hint="give the folder of the model's own checkpoint")
    names = final_names([tensor.path[depth:] for tensor in tensors])
    wanted = _pick(names, only, exclude)
    plain = [name for name, keep in zip(names, wanted, strict=True) if keep]
    kept = [tensor for tensor, keep in zip(tensors, wanted, strict=True) if keep]
    named: dict[str, StoredTensor] = {}
    for name, tensor in zip(_rename(plain, renames), kept, strict=True):
        if not name or name == "__metadata__" or len(name) > _MAX_NAME or not name.isprintable():
            msg = f"{where}: {short(name)} cannot be the name of a tensor"
            hint = "the checkpoint is damaged, or a module has a name that files cannot hold"
            raise CheckpointError(msg, hint=hint)
        if name in named:
            both = f"{short(named[name].name)} and {short(tensor.name)}"
            msg = f"{where}: {both} would both be called {short(name)}"
            hint = "rename to names that no other weight has" if renames else "save the model without its wrappers"
            raise CheckpointError(msg, hint=hint)
        named[name] = tensor
    chosen = {tensor.name for tensor in tensors}
    return Selection(
        root=root,
        tensors=tuple(named.items()),
        plain=tuple(plain),
        skipped=tuple(entry.name for entry in index.entries if entry.name not in chosen),
        excluded=tuple(tensor.name for tensor, keep in zip(tensors, wanted, strict=True) if not keep),
    )


def _find_root(paths: Sequence[NamePath], where: str) -> NamePath:
    """Return the keys above the model's weights: `model`, a sole outer key, or the one beside an optimizer."""
    root: NamePath = ()
    while True:
        inner = [path[len(root) :] for path in paths if path[: len(root)] == root]
        nested = {path[0]: None for path in inner if len(path) > 1}
        own = root[-1:]
        if {*own} & _OPTIMIZER_KEYS or (
            nested and (nested.keys() <= _OPTIMIZER_TABLES or nested.keys() <= _OPTIMIZER_KEYS)
        ):
            msg = f"{where} is an optimizer's checkpoint, which safetensors cannot hold"
            hint = "give the model's folder (pytorch_model_fsdp_0), or merge this one with --format torch"
            raise CheckpointError(msg, hint=hint)
        model = next((key for key in _MODEL_KEYS if key in nested), None)
        others = [key for key in nested if key not in _OPTIMIZER_KEYS]
        if any(key in _MODEL_KEYS for key in own) or (
            model is None and (any(len(path) == 1 for path in inner) or not nested)
        ):
            return root
        if model is not None:
            root = (*root, model)
        elif len(others) == 1 and (not root or len(others) < len(nested)):
            root = (*root, others[0])
        elif len(others) < len(nested):
            msg = f"{where} holds an optimizer besides {', '.join(short(str(key)) for key in others[:5])}"
            raise CheckpointError(msg, hint="save the model alone, or under the key 'model'")
        else:
            return root


def final_names(paths: Sequence[NamePath]) -> list[str]:
    """Return each weight's name without the wrappers that training puts around modules.

    A leading `module.` goes only when every weight has it: DDP and FSDP put it in front of all.
    """
    parts = [[part for key in path for part in str(key).split(".") if part not in _WRAPPERS] for path in paths]
    while parts and all(len(name) > 1 and name[0] == _OUTER for name in parts):
        parts = [name[1:] for name in parts]
    return [".".join(name) for name in parts]


def _starts_with(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(prefix.removesuffix(".") + ".")


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if set("*?[") & set(pattern) else _starts_with(name, pattern)


def _pick(names: Sequence[str], only: Sequence[str], exclude: Sequence[str]) -> list[bool]:
    """Say of each of `names` whether it is merged: those of `only` (all when it is empty) without `exclude`."""
    for option, patterns in (("--only", only), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(_fits(name, pattern) for name in names):
                _fits_none(f"{option} {pattern!r}", names)
    wanted = [
        (not only or any(_fits(name, pattern) for pattern in only))
        and not any(_fits(name, pattern) for pattern in exclude)
        for name in names
    ]
    if not any(wanted):
        msg = f"--only and --exclude select none of the {len(names)} weights"
        raise UsageError(msg, hint="exclude less")
    return wanted


def _rename(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return `names` with the leading parts OLD replaced by NEW; the first pair that fits a name counts.

    An empty OLD puts NEW in front of every name, an empty NEW takes OLD away.
    """
    used, result = set[tuple[str, str]](), []
    for name in names:
        pair = next(((old, new) for old, new in pairs if not old or _starts_with(name, old)), None)
        if pair is not None:
            old, new = pair
            used.add(pair)
            rest = name[len(old.removesuffix(".")) :].removeprefix(".") if old else name
            changed = ".".join(filter(None, (new.removesuffix("."), rest)))
            if not changed:
                msg = f"--rename {old}={new} would make the name {short(name)} empty"
                raise UsageError(msg, hint="give a NEW that is not empty")
            result.append(changed)
        else:
            result.append(name)
    for old, new in pairs:
        if (old, new) not in used:
            _fits_none(f"--rename {old}={new}", names)
    return result


def _fits_none(option: str, names: Sequence[str]) -> NoReturn:
    shown = ", ".join(short(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")  # noqa: PLR2004
    msg = f"{option} matches none of the {len(names)} weights"
    raise UsageError(msg, hint=f"names are {shown}; a pattern without * matches the start of a name")
