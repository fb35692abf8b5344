"""What torch's functions and methods do with shards outside of passes, by one rule. Rule 3.

`DTensor.__torch_function__` sees every call of torch that is given a shard, above autograd. It is computed on the
shards where each element needs those at its place only, which a call with tensors that have no values finds out;
and otherwise with the full tensors: what was written into these is cut and written into the shards, what is a view
of them stays one, and what was computed is plain. In a model's own passes parameters are plain.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.probe.torch_version import parse
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.full_values import (
    FullView,
    Gathered,
    as_views,
    fetch,
    fetcher_for_rank0_alone,
    full_value,
    gathered,
    placed_like,
    plain,
    view_of,
)
from fsdplaunch.runtime.auto.model.parameters import refuse_exchange
from fsdplaunch.runtime.auto.rank0.position import counting_one_change
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import original_of
from fsdplaunch.runtime.state_dict.gather import split_like
from fsdplaunch.runtime.torch_internals.distributed import (
    is_elementwise,
    is_random,
    local_tensor,
    placements_of,
    with_local_tensor,
    written_arguments,
)
from fsdplaunch.runtime.torch_internals.fsdp import param_groups, put_shard
from fsdplaunch.runtime.torch_internals.tensors import (
    TorchDispatchMode,
    exchanges,
    note_changes,
    operator_name,
    storage_identity,
    tree_leaves,
    tree_map,
)


class Kind(Enum):
    """What a call needs of the shards that it is given."""

    ASIDE = "nothing of their values: it asks for a size, a dtype, a flag"
    LOCAL = "of each element the elements at its place, so that every rank computes its own"
    UPDATES = "the same, and it writes into shards"
    DRAWS = "the full tensors, with random numbers that are the same on all ranks"
    FULL = "the full tensors"


_KEEPING = frozenset(
    {
        *("detach", "alias", "lift_fresh", "clone", "_to_copy", "copy_", "copy", "fill_", "fill", "zero_", "zero"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "_foreach_copy_", "_foreach_zero_"),
    }
)
"""Operators that go by element, which torch does not tag so."""
_CASTS = frozenset({"to", "cpu", "cuda", "pin_memory"})
"""Methods that move to a device, which tensors without values cannot do."""
_MOST = 4096  # calls of which the kind is remembered

_known: dict[Any, Kind] = {}


class Operators(TorchDispatchMode):
    """Records how many operators run in it, whether all go by element, or one draws, and what they write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.by_element, self.draws = 0, True, False
        self.written: set[int] = set()  # storages, by identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        name = operator_name(func)
        self.by_element = self.by_element and (name in _KEEPING or is_elementwise(func))
        self.draws = self.draws or is_random(func)
        result = func(*args, **kwargs)
        for each in tree_leaves(written_arguments(func, args, kwargs)):
            if isinstance(each, torch.Tensor):
                self.written.add(storage_identity(each))
        return result


def kind_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Kind:
    """Return what a call needs of the shards among its arguments; remembered for calls that are alike."""
    if getattr(func, "__name__", "") in _CASTS:
        return Kind.LOCAL
    try:
        key = func, _key(args), _key(kwargs)
        known = _known.get(key)
    except TypeError:  # an argument that has no hash
        return _find_out(func, args, kwargs)
    if known is None:
        if len(_known) > _MOST:
            _known.clear()
        known = _known[key] = _find_out(func, args, kwargs)
    return known


def _key(value: Any) -> Any:
    """Return what is equal for arguments with which a call does the same: of numbers that vary their type."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind
    if isinstance(value, torch.Tensor):
        return isinstance(value, DTensor), value.shape, value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_key, value)
    if kind is dict:
        return tuple((name, _key(each)) for name, each in value.items())
    if kind is slice:
        return kind, value.start, value.stop, value.step
    return kind, value


def _find_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Kind:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    shapes = {each.shape for each in given if isinstance(each, DTensor)}
    args, kwargs = tree_map(_on_meta, (args, kwargs))
    stand_ins = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    operators = Operators()
    try:
        with torch.no_grad(), operators:
            result = func(*args, **kwargs)
    except Exception:
        return Kind.DRAWS if operators.draws else Kind.FULL
    made = tree_leaves(result)
    if not operators.count and not any(isinstance(each, torch.Tensor) for each in made):
        return Kind.ASIDE
    if operators.draws:
        return Kind.DRAWS
    fits = all(isinstance(each, torch.Tensor) and each.shape in shapes for each in made if each is not None)
    if not (operators.by_element and fits):
        return Kind.FULL
    pairs = zip(given, stand_ins, strict=True)
    written = [
        isinstance(each, DTensor) for each, stand_in in pairs if storage_identity(stand_in) in operators.written
    ]
    if any(written):
        return Kind.UPDATES
    return Kind.FULL if written else Kind.LOCAL


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


_Tensor: Any = torch.Tensor
_NEW = ("new", "new_tensor", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
_NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm"})
_READS = frozenset({"__repr__", "__format__", "numpy", "__array__", "tolist", "item"})
"""What reads values, which tensors without values have a way for."""
_DATA, _SET_DATA = _Tensor.data.__get__, _Tensor.data.__set__


class ShardFunctions:
    """The functions of torch that a script gives shards."""

    def __init__(self, hook_context: HookContext) -> None:
        self._context = hook_context
        self._own: dict[str, Callable[[Any, Any, Any], Any]] = {
            "__set__": self._set,
            "__delete__": lambda func, args, kwargs: func(*args, **kwargs),
            "__get__": lambda func, args, _: _detached(func, args, _) if func == _DATA else NotImplemented,
            "detach": _detached,
            "__iter__": lambda _, args, kwargs: iter(self(_Tensor.unbind, args, kwargs)),
            **dict.fromkeys(("storage", "share_memory_", "__dlpack__"), _refuse_memory),
            **dict.fromkeys(_NEW, _made_new),
        }

    def __call__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute a function of which some arguments are shards or views of their full tensors."""
        name, module = getattr(func, "__name__", ""), str(getattr(func, "__module__", ""))
        collective = module.startswith("torch.distributed.")  # `collectives` has these
        if collective or torch.compiler.is_compiling() or not self._context.ownership.ours:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # what is made in it does not count its changes
            with torch.inference_mode(mode=False), torch.no_grad():
                return self(func, args, kwargs)
        own = self._own.get(name)
        result = NotImplemented if own is None else own(func, args, kwargs)
        return self._computed(func, name, args, kwargs) if result is NotImplemented else result

    def _computed(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        for each in tensors:
            if isinstance(each, FullView):
                each.gathered.refresh()
        shards: list[Any] = [each for each in tensors if isinstance(each, DTensor)]
        if not shards:
            return self._on_full(func, args, kwargs, draws=False)
        if exchanges(func):
            raise refuse_exchange()
        kind = Kind.FULL if name in _READS else kind_of(func, args, kwargs)
        if kind is Kind.ASIDE:
            return original_of(func)(*args, **kwargs)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        writes = kind is Kind.UPDATES or in_place
        alone = fetcher_for_rank0_alone(f"{name}() of a shard", shards)
        if alone is None:
            return self._by_all(func, name, kind, tensors, args, kwargs, writes=writes)
        if writes and isinstance(args[0] if args else None, DTensor):
            _write_alone(name)
        with alone.finish("read a shard"):
            args, kwargs = tree_map(
                lambda value: fetch(alone, value) if isinstance(value, DTensor) else plain(value), (args, kwargs)
            )
        return func(*args, **kwargs)

    def _by_all(
        self,
        func: Callable[..., Any],
        name: str,
        kind: Kind,
        tensors: list[Any],
        args: Any,
        kwargs: Any,
        *,
        writes: bool,
    ) -> Any:
        result: Any = NotImplemented
        if kind is Kind.LOCAL or kind is Kind.UPDATES:
            result = _on_shards(func, tensors, args, kwargs, updates=kind is Kind.UPDATES)
        elif args and _is_by_ranks(name, *args, **kwargs):
            result = gathered(func(*args, **kwargs))
        if result is not NotImplemented:
            return result
        if writes and getattr(func, "__module__", "") != "torch.nn.init":  # which writes without gradients
            # Raise what torch raises of a parameter that is written into while gradients are recorded.
            shard = args[0]
            if torch.is_grad_enabled() and isinstance(shard, DTensor) and shard.requires_grad:
                what = "a leaf Variable that requires grad is being used in an in-place operation."
                if not shard.is_leaf:
                    what = "a result computed from a shard with gradients is changed in place: change a copy"
                msg = f"{script_line()}: {what}"
                raise RuntimeError(msg)
        return self._on_full(func, args, kwargs, draws=kind is Kind.DRAWS)

    def _on_full(self, func: Callable[..., Any], args: Any, kwargs: Any, *, draws: bool) -> Any:
        """Compute with full tensors, and write into the shards what was written into these. Collective."""
        originals: dict[int, Any] = {}
        sources: list[Gathered] = []
        kept: list[Any] = []  # else the id of one may become another's

        def full(value: Any) -> Any:
            if not isinstance(value, DTensor | FullView):
                return value
            if isinstance(value, FullView):
                source, tensor = value.gathered, plain(value)
            else:
                known = next((each for each in sources if each.shard is value), None)
                source = known or Gathered(value, gathered(value if torch.is_grad_enabled() else value.detach()))
                tensor = source.full
            sources.append(source)
            originals[id(tensor)] = value
            kept.append(tensor)
            return tensor

        given, named = tree_map(full, (args, kwargs))
        operators = Operators()
        with self._context.streams.shared() if draws else nullcontext(), operators:
            result = func(*given, **named)
        for source in sources:
            if source.storage in operators.written:
                source.write_back()
        if func in (_Tensor.numpy, _Tensor.__array__):
            # Let an array not be written into if what models or optimizers hold would be.
            params = [param for model in list(self._context.models) for param in model.parameters()]
            states = [list(optimizer.state.values()) for optimizer in self._context.built_optimizers()]
            held = [*params, *(param.grad for param in params), *tree_leaves(states)]
            storages = {storage_identity(local_tensor(each)) for each in held if isinstance(each, DTensor)}
            shards: list[Any] = [source.shard for source in sources]
            if any(
                each.device.type == "cpu" and storage_identity(local_tensor(each)) in storages for each in shards
            ):
                result.flags.writeable = False
        return as_views(tree_map(lambda value: originals.get(id(value), value), result), sources)

    def _set(self, func: Any, args: Any, _kwargs: Any) -> None:
        """Set a property of a shard: values that are full are cut."""
        name, target, value = func.__self__.__name__, args[0], plain(args[1])
        if not isinstance(target, DTensor) or name not in ("data", "grad") or value is None:
            func(target, value)
        elif name == "data":
            if fetcher_for_rank0_alone("the data of a shard", [target]) is not None:
                _write_alone("data = ")
            _assign(target, value, list(self._context.models))
        else:
            func(target, placed_like(target, value))


def _refuse_memory(func: Any, _args: Any, _kwargs: Any) -> Any:
    """Refuse the memory of a full tensor, of which a rank has a shard: torch would crash."""
    msg = f"{script_line()}: {func.__name__}(): no memory holds all of a sharded tensor"
    hint = (
        "read it with .numpy() or .tolist(), write with .copy_() or an index; if a library saves this way, save"
        " model.state_dict() with torch.save or safetensors' save_file; or shard with fsdplaunch.prepare"
    )
    raise ShardingError(msg, hint=hint)


def _made_new(func: Any, args: Any, kwargs: Any) -> Any:
    like = local_tensor(args[0]).detach() if isinstance(args[0], DTensor) else plain(args[0])
    return func(like, *args[1:], **kwargs)


def _detached(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Return a shard, or a view of its full tensor, without gradients.

    A shard's changes count as its own by `.data` as well, by which is seen what is gathered of old values. A
    view's do not: torch would refuse to differentiate what is of the same full tensor.
    """
    (tensor,) = args
    if isinstance(tensor, FullView):
        tensor.gathered.refresh()
        return view_of(tensor.gathered, plain(tensor.data))
    return with_local_tensor(tensor, local_tensor(tensor).detach())


def _write_alone(name: str) -> NoReturn:
    msg = (
        f"{script_line()}: {name}() changes a sharded tensor on some ranks only: each rank has its own part of it"
    )
    raise ShardingError(msg, hint="change it on all ranks, or before the model is sharded")


def _on_shards(func: Callable[..., Any], tensors: list[Any], args: Any, kwargs: Any, *, updates: bool) -> Any:
    """Compute each rank's own elements; `NotImplemented` where there is no way.

    By plain operators, where all shards are cut alike: those of shards take ten times as long. A plain tensor of
    the full shape is cut where it is written into a shard. With another, the result is plain.
    """
    like = next(each for each in tensors if isinstance(each, DTensor))
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if recorded:  # torch refuses to write into a leaf
        return func(*args, **kwargs) if updates else _differentiably(func, like, tensors, args, kwargs)
    cut: dict[int, Any] = {}
    for each in tensors:
        if not isinstance(each, DTensor):
            if each.dim() and not (updates and each.shape == like.shape):
                return NotImplemented
            cut[id(each)] = split_like(plain(each), like) if each.dim() else plain(each)
    given, named = tree_map(lambda each: cut.get(id(each), each), (args, kwargs)) if cut else (args, kwargs)
    places = _places(given, named)
    try:
        if places is None:
            return func(*given, **named)
        local_args, local_kwargs = tree_map(_local, (given, named))
        result = func(*local_args, **local_kwargs)
    # Of an operator, or of placements (torch 2.9 asserts where lists hold shards); before anything is computed.
    except (NotImplementedError, RuntimeError, AssertionError):
        return NotImplemented
    if updates:
        written = tree_leaves(named["out"] if "out" in named else given[:1] or named)
        note_changes([each for each in written if isinstance(each, DTensor)])
    originals: dict[int, Any] = {id(None): None}
    originals |= {id(_local(each)): each for each in tree_leaves((given, named)) if isinstance(each, DTensor)}
    in_list = isinstance(result, list | tuple)
    likes = places if in_list and len(result) == len(places) else itertools.repeat(places[0])
    made = [
        originals[id(each)] if id(each) in originals else with_local_tensor(like, each)
        for each, like in zip(result if in_list else [result], likes, strict=False)
    ]
    return type(result)(made) if in_list else made[0]


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def _places(args: Any, kwargs: Any) -> list[Any] | None:
    """Return the shards that stand for all: one, or one for each place in lists; None where they are not alike."""
    found: list[Any] | None = None
    for given in (*args, *kwargs.values()):
        shards = [
            each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, DTensor)
        ]
        if not shards:
            continue
        found = found or shards
        if len(shards) != len(found) or not all(map(_are_alike, shards, found)):
            return None
    return found


def _are_alike(one: Any, other: Any) -> bool:
    placements = placements_of(one)
    is_cut_alike = placements == placements_of(other) and one.device_mesh == other.device_mesh
    return is_cut_alike and one.shape == other.shape and not any(each.is_partial() for each in placements)


def _differentiably(func: Callable[..., Any], like: Any, tensors: list[Any], args: Any, kwargs: Any) -> Any:
    """Compute by plain operators: of the backward of some of them torch has none for shards."""
    local: dict[int, Any] = {}
    place = placements_of(like), like.device_mesh, like.shape
    for each in tensors:
        if isinstance(each, DTensor):
            if (placements_of(each), each.device_mesh, each.shape) != place:
                return NotImplemented
            local[id(each)] = each.to_local()
        elif each.dim() or each.requires_grad:
            return NotImplemented
    result = func(*tree_map(lambda each: local.get(id(each), each), args), **kwargs)
    if not isinstance(result, torch.Tensor):
        return NotImplemented
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(result, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


_PLACING = (2, 13)
"""From where torch's own reductions give a shard a gradient that lies as the shard does; 2.11's is whole."""


def _is_by_ranks(name: str, shard: Any, /, *order: Any, **named: Any) -> bool:
    if not isinstance(shard, DTensor) or name not in ("sum", *_NORMS):
        return False
    if shard.requires_grad and torch.is_grad_enabled() and (parse(torch.__version__) or _PLACING) < _PLACING:
        return False
    if name == "sum":
        return not (order or named)
    exact = shard.dtype in (torch.float32, torch.float64)
    by_order = len(order) <= 1 and named.keys() <= {"p", "ord"}
    return exact and by_order and all(each in (2, None, "fro") for each in (*order, *named.values()))


def _assign(param: Any, value: Any, models: list[nn.Module]) -> None:
    """Exchange the shard of a parameter, in torch's sharding as well, which `.data = value` leaves as it was."""
    if value.shape != param.shape:
        shapes = tuple(param.shape), tuple(value.shape)
        msg = f"{script_line()}: .data of a sharded parameter of shape {shapes[0]} is given {shapes[1]}"
        hint = "give it a value of the same shape, or change the model before it is sharded"
        raise ShardingError(msg, hint=hint)
    shard = placed_like(param, value)
    local = local_tensor(shard).to(local_tensor(param).device, param.dtype).detach().contiguous()
    shared = isinstance(value, DTensor) and local.data_ptr() == local_tensor(value).data_ptr()
    units = (module for model in models for module in model.modules() if is_unit(module))
    held = (each for unit in units for group in param_groups(unit) for each in group.fsdp_params)
    holder: Any = next((each for each in held if each.sharded_param is param), None)
    if holder is None:  # it is not a parameter
        param._local_tensor = local
        return
    with counting_one_change(param):
        put_shard(holder, param, local, value if shared else None)


def show(original: Any, hook_context: HookContext, shard: Any) -> str:
    """Stand for `DTensor.__repr__`, which shows full tensors."""
    if not hook_context.ownership.ours:
        return str(original(shard))
    full = full_value(shard, call="print a shard")
    return repr(nn.Parameter(full, shard.requires_grad) if isinstance(shard, nn.Parameter) else full)
