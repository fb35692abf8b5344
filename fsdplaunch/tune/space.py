"""Which candidates there are: every value that the schema declares tunable, where it makes another run. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.key import Tunable
from fsdplaunch.config.schema.walk import KeySpec, Path, all_keys, keys_by_path, value_at
from fsdplaunch.config.world_size import mesh_sizes
from fsdplaunch.errors import LaunchError
from fsdplaunch.tune.candidate import Candidate, candidate_of

_STRATEGY = ("fsdp_config", "fsdp_sharding_strategy")
_MESH = tuple(("parallelism_config", f"parallelism_config_dp_{axis}_size") for axis in ("replicate", "shard"))
_WRAP = (("fsdp_config", "fsdp_auto_wrap_policy"), ("fsdp_config", "fsdp_min_num_params"))
Reader = Callable[[Sequence[str]], Config]
"""Returns the resolved configuration that some `KEY=VALUE` texts make of the user's; raises ConfigError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be tried.

    Attributes:
        read: Makes a candidate's configuration.
        world: Workers.
        on_gpu: Whether they compute on GPUs.
        allowed: Of `Tunable.when`, beside `always`.
        tries: Values to try, by key; where there are any, nothing else is tried.
    """

    read: Reader
    world: int
    on_gpu: bool
    allowed: frozenset[str] = frozenset()
    tries: Mapping[Path, Sequence[Any]] = field(default_factory=dict)

    def config(self, candidate: Candidate) -> Config | None:
        """Return a candidate's configuration; None where the rules refuse it or the mesh does not fit."""
        try:
            config = self.read(candidate.overrides)
            mesh_sizes(config, self.world)
        except LaunchError:
            return None
        return config

    def singles(self) -> list[Candidate]:
        """Return the candidates that change one key, with what it needs; each run once, without the user's."""
        base = self.read([])
        found = {identity(base, self.world): Candidate()}
        for spec in all_keys():
            for value in self._values(spec, base):
                candidate = candidate_of({**_needed(spec, base), spec.path: value})
                config = self.config(candidate)
                if config is not None:
                    found.setdefault(identity(config, self.world), candidate)
        return [candidate for candidate in found.values() if not candidate.is_yours]

    def last_resorts(self) -> list[Candidate]:
        """Return the changes that are only tried where nothing fits."""
        wider = Space(
            read=self.read, world=self.world, on_gpu=self.on_gpu, allowed=self.allowed | {"last"}, tries=self.tries
        )
        usual = set(self.singles())
        return [candidate for candidate in wider.singles() if candidate not in usual]

    def _values(self, spec: KeySpec, base: Config) -> Iterator[Any]:
        if self.tries:
            yield from self.tries.get(spec.path, ())
            return
        tunable = spec.key.tunable
        if tunable is None or base.fsdp_config.fsdp_version not in tunable.versions:
            return
        if tunable.when not in ("always", *self.allowed) or (tunable.gpu and not self.on_gpu):
            return
        yield from tunable.values
        yield from divisors(self.world, tunable.divisors)


def divisors(world: int, which: str) -> list[int]:
    """Return the numbers from 2 that divide the workers; `below` leaves out their number itself, "" is none."""
    most = {"": 1, "below": world - 1, "through": world}[which]
    return [number for number in range(2, most + 1) if world % number == 0]


def _needed(spec: KeySpec, base: Config) -> dict[Path, Any]:
    """Return what has to be set with a key for it to change anything."""
    needs = spec.key.tunable.needs if spec.key.tunable else {}
    paths = {tuple(name.split(".")): values for name, values in needs.items()}
    return {path: values[0] for path, values in paths.items() if value_at(base, path) not in values}


def identity(config: Config, world: int, units: Any = None) -> tuple[Any, ...]:
    """Return what tells runs apart: equal for two configurations that mean the same run.

    Args:
        config: Resolved.
        world: Workers; the mesh must fit them.
        units: What the wrap policy makes of the model, where that is known; else the keys count.
    """
    mesh = mesh_sizes(config, world)
    values: list[Any] = [mesh, units]
    for spec in all_keys():
        if spec.path in _MESH or (spec.path == _STRATEGY and config.fsdp_config.fsdp_version != 1):
            continue  # the mesh and fsdp_reshard_after_forward say it
        if units is not None and spec.path in _WRAP:
            continue
        idle = spec.key.tunable is not None and _is_idle(spec.key.tunable, config, mesh.shards * mesh.context)
        values.append(spec.default if idle else value_at(config, spec.path))
    return tuple(repr(value) for value in values)


def _is_idle(tunable: Tunable, config: Config, shards: int) -> bool:
    """Return whether a key changes nothing of this run."""
    if tunable.sharded and shards == 1:
        return True
    if any(_value(config, name) in values for name, values in tunable.idle.items()):
        return True
    return any(_value(config, name) not in values for name, values in tunable.needs.items())


def _value(config: Config, dotted: str) -> Any:
    return value_at(config, keys_by_path()[tuple(dotted.split("."))].path)
