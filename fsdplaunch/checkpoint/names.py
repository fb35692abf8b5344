"""Which of a checkpoint's entries are the model's weights, and what they are called in the merged file."""

from collections.abc import Iterable
from dataclasses import dataclass

from fsdplaunch.checkpoint.index import CheckpointIndex, NamePath, StoredTensor, StoredValue
from fsdplaunch.checkpoint.unpickle import short
from fsdplaunch.errors import CheckpointError

MAX_NAME = 4096
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_MODEL_KEYS = ("model", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizers")
_OPTIMIZER_TABLES = {"state", "param_groups"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What goes into the merged file.

    Attributes:
        root: The keys under which the weights were found, for example `("model",)`.
        tensors: Final name and stored tensor of each weight.
        values: Final name and stored value of each entry beside the weights that is not a tensor.
        others: Full names of everything outside `root`.
    """

    root: NamePath
    tensors: tuple[tuple[str, StoredTensor], ...]
    values: tuple[tuple[str, StoredValue], ...]
    others: tuple[str, ...]


def select_weights(index: CheckpointIndex, *, where: str) -> Selection:
    """Find the model's weights in `index` and name them as the unwrapped model does.

    Raises:
        CheckpointError: When this is an optimizer's checkpoint, when there is no weight, when two names meet.
    """
    entries: list[StoredTensor | StoredValue] = [*index.tensors, *index.values]
    root = find_root([entry.path for entry in entries])
    depth = len(root)
    tensors = [tensor for tensor in index.tensors if tensor.path[:depth] == root]
    values = [value for value in index.values if value.path[:depth] == root]
    _check_is_model(root, [*(tensor.path for tensor in tensors), *(value.path for value in values)], where)
    if not tensors:
        msg = f"{where} holds no tensor"
        raise CheckpointError(msg, hint="give the folder of the model's own checkpoint")
    named = tuple((final_name(tensor.path[depth:]), tensor) for tensor in tensors)
    _check_names(named, where)
    return Selection(
        root=root,
        tensors=named,
        values=tuple((final_name(value.path[depth:]), value) for value in values),
        others=tuple(entry.name for entry in entries if entry.path[:depth] != root),
    )


def find_root(paths: list[NamePath]) -> NamePath:
    """Return the keys above the model's own: a sole outer key, or `model` beside other things."""
    root: NamePath = ()
    while True:
        inner = [path[len(root) :] for path in paths if path[: len(root)] == root]
        keys = {path[0] for path in inner if path}
        if any(len(path) < 2 for path in inner):  # noqa: PLR2004  (a weight at this level)
            return root
        if len(keys) == 1 and (not root or keys & {*_MODEL_KEYS}):
            root = (*root, *keys)
        elif found := next((key for key in _MODEL_KEYS if key in keys), None):
            return (*root, found)
        else:
            return root


def final_name(path: NamePath) -> str:
    """Return the weight's name without the wrappers that training puts around modules."""
    parts = [part for key in path for part in str(key).split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _check_is_model(root: NamePath, paths: list[NamePath], where: str) -> None:
    top = root[0] if root else None
    tables = {path[len(root)] for path in paths if len(path) > len(root)}
    if top in _OPTIMIZER_KEYS or (tables and tables <= _OPTIMIZER_TABLES):
        msg = f"{where} is an optimizer's checkpoint, which safetensors cannot hold"
        raise CheckpointError(
            msg,
            hint="give the model's folder (pytorch_model_fsdp_0), or ask for the torch format to merge this",
        )


def _check_names(named: Iterable[tuple[str, StoredTensor]], where: str) -> None:
    seen: dict[str, str] = {}
    for name, tensor in named:
        if not name or name == "__metadata__" or len(name) > MAX_NAME or not name.isprintable():
            msg = f"{where}: {short(name)} cannot be the name of a tensor"
            raise CheckpointError(
                msg, hint="the checkpoint is damaged, or a module has a name that files cannot hold"
            )
        if name in seen:
            msg = f"{where}: {short(seen[name])} and {short(tensor.name)} would both be called {short(name)}"
            raise CheckpointError(msg, hint="merge with the wrapper names kept")
        seen[name] = tensor.name
