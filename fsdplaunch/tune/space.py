"""Candidates: the user's configuration with some keys changed; which keys and values a search tries."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplaunch.config.layers import read_assignments
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.resolve import mesh_sizes
from fsdplaunch.config.schema import Tunable
from fsdplaunch.config.schema.config import Config, KeyPath, KeySpec, all_keys, keys_by_path, value_at
from fsdplaunch.config.schema.kinds import write
from fsdplaunch.errors import LaunchError, UsageError

_PREFIX = re.compile("^(fsdp_|parallelism_config_|dynamo_)")  # what accelerate puts before the names of a section


@dataclass(frozen=True, slots=True)
class Candidate:
    """Some changes to the user's configuration; none for that itself."""

    changes: tuple[tuple[KeyPath, Any], ...] = ()  # keys and their canonical values, in the schema's order

    @property
    def is_yours(self) -> bool:
        """Return whether nothing is changed."""
        return not self.changes

    @property
    def label(self) -> str:
        """Return a short name, without what another key implies: `forward_prefetch=true, checkpoint_every=2`."""
        specs = [keys_by_path()[path] for path, _ in self.changes]
        implied = {name for spec in specs if spec.key.tunable for name in spec.key.tunable.needs}
        shown = [(path, value) for path, value in self.changes if ".".join(path) not in implied]
        words = [f"{_PREFIX.sub('', path[-1])}={write(value)}" for path, value in shown]
        return ", ".join(words) or "yours"

    @property
    def overrides(self) -> list[str]:
        """Return the changes as `KEY=VALUE` texts; what says the same in other words is taken back before."""
        specs = [(keys_by_path()[path], value) for path, value in self.changes]
        follow = [name for spec, _ in specs if spec.key.tunable for name in spec.key.tunable.follow]
        return [
            *(f"{name}=" for name in follow),
            *(f"{spec.dotted}={spec.key.kind.write(value)}" for spec, value in specs),
        ]

    def with_changes(self, other: "Candidate") -> "Candidate":
        """Return the changes of both; of a key that both change, the other's."""
        return candidate_of({**dict(self.changes), **dict(other.changes)})

    def to_dict(self) -> dict[str, Any]:
        """Return the changes as plain data, by dotted key."""
        return {".".join(path): value for path, value in self.changes}


def candidate_of(changes: Mapping[KeyPath, Any]) -> Candidate:
    """Return the candidate with these changes."""
    return Candidate(tuple((spec.path, changes[spec.path]) for spec in all_keys() if spec.path in changes))


_STRATEGY = ("fsdp_config", "fsdp_sharding_strategy")
_MESH = tuple(("parallelism_config", f"parallelism_config_dp_{axis}_size") for axis in ("replicate", "shard"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be tried."""

    # returns the resolved configuration that `KEY=VALUE` texts make of the user's; raises ConfigError
    read: Callable[[Sequence[str]], Config]
    world: int  # workers
    on_gpu: bool  # whether they compute on GPUs
    allowed: frozenset[str] = frozenset()  # of `Tunable.when`, beside `always`
    # values to try, by key; where there are any, nothing else is tried
    tries: Mapping[KeyPath, Sequence[Any]] = field(default_factory=dict)

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
        usual = set(self.singles())
        return [each for each in replace(self, allowed=self.allowed | {"last"}).singles() if each not in usual]

    def _values(self, spec: KeySpec, base: Config) -> Iterator[Any]:
        tunable = spec.key.tunable
        if self.tries:
            yield from self.tries.get(spec.path, ())
        elif (
            tunable is not None
            and base.fsdp_config.fsdp_version in tunable.versions
            and tunable.when in ("always", *self.allowed)
            and (self.on_gpu or not tunable.gpu)
        ):
            yield from tunable.values
            # `below` leaves out the workers' own number
            most = {"": 1, "below": self.world - 1, "through": self.world}[tunable.divisors]
            yield from (number for number in range(2, most + 1) if self.world % number == 0)


def _needed(spec: KeySpec, base: Config) -> dict[KeyPath, Any]:
    """Return what has to be set with a key for it to change anything."""
    needs = spec.key.tunable.needs if spec.key.tunable else {}
    paths = {tuple(name.split(".")): values for name, values in needs.items()}
    return {path: values[0] for path, values in paths.items() if value_at(base, path) not in values}


def identity(config: Config, world: int) -> tuple[Any, ...]:
    """Return what tells runs apart: equal for configurations that mean the same run on `world` workers."""
    mesh = mesh_sizes(config, world)
    shards = mesh.shards * mesh.context

    def is_idle(tunable: Tunable) -> bool:
        """Return whether a key changes nothing of this run."""
        idle = any(value_at(config, tuple(name.split("."))) in values for name, values in tunable.idle.items())
        lacks = any(
            value_at(config, tuple(name.split("."))) not in values for name, values in tunable.needs.items()
        )
        return idle or lacks or (tunable.sharded and shards == 1)

    values: list[Any] = [mesh]
    for spec in all_keys():
        if spec.path in _MESH or (spec.path == _STRATEGY and config.fsdp_config.fsdp_version != 1):
            continue  # the mesh and fsdp_reshard_after_forward say it
        idle = spec.key.tunable is not None and is_idle(spec.key.tunable)
        values.append(spec.default if idle else value_at(config, spec.path))
    return tuple(repr(value) for value in values)


_OF_A_STEP = (
    *("fsdp_config", "sharding", "parallelism_config", "precision", "fp8_config", "dynamo_config"),
    "mixed_precision",
)
"""Sections, and a key at the top level, that decide how a step is computed; others say how runs are started."""


def read_tries(texts: Sequence[str]) -> dict[KeyPath, list[Any]]:
    """Return the values to try by key, each once, of `KEY=V1,V2` texts: keys dotted or bare, values as in YAML.

    One UsageError says everything that is wrong.
    """
    found: dict[KeyPath, list[Any]] = {}
    wrong: list[str] = []
    pairs = [text.partition("=") for text in texts]
    for one in [f"{key}{equals}{value}" for key, equals, values in pairs for value in values.split(",")]:
        try:
            [(spec, value)] = read_assignments([one])
        except ConfigError as error:
            wrong += [f"{problem.key} {problem.message}".strip() for problem in error.problems]
            continue
        if value is None:
            wrong.append(f"{spec.dotted} has no value")
        elif spec.path[0] not in _OF_A_STEP:
            wrong.append(f"{spec.dotted} does not decide how a step is computed")
        elif value not in found.setdefault(spec.path, []):
            found[spec.path].append(value)
    if wrong:
        msg = f"--try: {'; '.join(dict.fromkeys(wrong))}"
        raise UsageError(msg, hint="write it as --try fsdp_reshard_after_forward=true,false")
    return found
