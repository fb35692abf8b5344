"""What a written name means: a key by any honoured spelling, or an option of accelerate or torchrun.

An option that is not a key has one of three answers: it is taken (what stands in `sets` here), noted
(it changes nothing of a run here) or refused with a sentence. Standard library only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from fsdplaunch.config.schema.config import KeyPath, KeySpec, all_keys, own_sections, section_classes
from fsdplaunch.config.schema.kinds import RUNS_ON, SPLIT_LAYERS, StrategyName


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKey:
    """A name that is not a key."""

    id: str  # `unknown-key` or `misplaced-key`
    message: str  # what is wrong
    hint: str | None  # what was meant, as far as that can be guessed


def key_prefix(section: str) -> str:
    """Return what keys of one of accelerate's sections begin with, and may be written without; "" elsewhere."""
    if not section or section in own_sections():
        return ""
    full = any(spec.name.startswith(f"{section}_") for spec in all_keys())
    return f"{section}_" if full else section.removesuffix("config")


@cache
def spellings(section: str) -> dict[str, KeySpec]:
    """Return every spelling that is honoured in a section ("" is the top level), canonical names first."""
    specs = [spec for spec in all_keys() if ".".join(spec.path[:-1]) == section]
    prefix = key_prefix(section)
    table = {spec.name: spec for spec in specs}
    for spec in specs:
        for name in (spec.name, *spec.key.aliases):
            bare = name.removeprefix(prefix)
            for spelling in (name, bare, prefix + bare):
                table.setdefault(spelling, spec)
    return table


def find_key(section: str, name: str, *, guess: bool = True) -> KeySpec | UnknownKey:
    """Return the key that `name` means inside `section` ("" for the top level), or what to say of it.

    With `guess` one that is spelt nearly so is looked for, which takes milliseconds.
    """
    found = spellings(section).get(name)
    if found is not None:
        return found
    place = f"in {section}" if section else "at the top level"
    homes = [home for home in ("", *section_classes()) if name in spellings(home)]
    if homes:
        belongs = " or ".join(f"under {home}" if home else "at the top level" for home in homes)
        return UnknownKey(id="misplaced-key", message=f"has no meaning {place}", hint=f"it belongs {belongs}")
    hint, word = None, name.replace("-", "_").lower()
    for home in dict.fromkeys((section, "", *section_classes())) if guess else ():
        near = closest(word, [*spellings(home), *(() if home or section else section_classes())])
        if near:
            spec = spellings(home).get(near[0])
            where = "" if home == section else f" under {home}" if home else " at the top level"
            hint = f"did you mean {spec.name if spec else near[0]}{where}?"
            break
    return UnknownKey(id="unknown-key", message=f"is not a key {place}", hint=hint)


@cache
def former_places() -> dict[tuple[str, str], tuple[KeySpec, Any]]:
    """Return every other place of a key, by section and name there, with what a true flag there means."""
    found: dict[tuple[str, str], tuple[KeySpec, Any]] = {}
    for spec in all_keys():
        for place, means in spec.key.former.items():
            section, _, name = place.rpartition(".")
            for spelling in (name, name.removeprefix(key_prefix(section))):
                found.setdefault((section, spelling), (spec, means))
    return found


def key_named(dotted: str) -> KeySpec | UnknownKey:
    """Return the key that `section.key`, or its name alone, means, or what to say of it.

    A test sees to it that a name alone means one key only.
    """
    path = path_of(dotted)
    section, name = ".".join(path[:-1]), path[-1]
    if not section:
        exact = [spec for spec in all_keys() if spec.name == name]
        tables = [spellings(home) for home in ("", *section_classes())]
        bare = exact or [table[name] for table in tables if name in table]
        return bare[0] if bare else find_key("", name)
    if section in section_classes():
        return find_key(section, name)
    return UnknownKey(id="unknown-key", message="is not a key", hint=f"{section} is not a section")


def is_bare_section(names: Iterable[str]) -> bool:
    """Return whether a file's top level consists of keys of fsdp_config, as transformers' own files do."""
    words = list(names)
    elsewhere = {*spellings(""), *section_classes()} - {*spellings("fsdp_config")}
    return any(word in spellings("fsdp_config") for word in words) and not any(word in elsewhere for word in words)


_SAME_WORD, _LEAST_SHARED = 0.75, 0.62
"""How like two words must be to count as one, and a name of several: in letters and in words together."""


def closest(word: str, words: list[str], *, cutoff: float = 0.75) -> list[str]:
    """Return the spellings most like `word`, best first.

    Of names of several words each word counts, and the last one, which says what it is, twice: `main_training_ip`
    is rather `main_process_ip` than `main_training_function`.
    """
    from difflib import SequenceMatcher

    def like(one: str, other: str) -> float:
        return SequenceMatcher(None, one, other).ratio()

    def words_of(name: str) -> list[str]:
        return name.strip("-").replace("-", "_").split("_")

    def score(candidate: str) -> float:
        parts = words_of(word)
        if len(parts) == 1:
            return like(word, candidate)
        weights = [*[1] * (len(parts) - 1), 2]
        found = [max(like(part, other) for other in words_of(candidate)) >= _SAME_WORD for part in parts]
        share = sum(weight for weight, has in zip(weights, found, strict=True) if has) / sum(weights)
        return (like(word, candidate) + share) / 2 + cutoff - _LEAST_SHARED

    scores = {candidate: score(candidate) for candidate in words}
    return sorted((each for each in scores if scores[each] >= cutoff), key=scores.__getitem__, reverse=True)[:3]


def path_of(dotted: str) -> KeyPath:
    """Split `section.key` into its parts, dashes as underscores."""
    return tuple(dotted.strip().replace("-", "_").split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """An option of accelerate's or torchrun's command line that is not a key."""

    answer: Literal["taken", "noted", "refused"]  # what becomes of it
    text: str  # what it comes to; for noted and refused ones the sentence that is printed
    sets: str = ""  # what it sets, `KEY=VALUE`; `{}` stands for its value
    # What each word of its value sets, where they are words; "": nothing.
    words: Mapping[str, str] = field(default_factory=dict)
    has_value: bool = False  # whether the next word belongs to it
    hint: str = ""  # what serves instead of a refused one


def _taken(text: str, **more: Any) -> ForeignOption:
    return ForeignOption(answer="taken", text=text, **more)


def _sets(assignment: str) -> ForeignOption:
    return _taken(f"sets {assignment}", sets=assignment)


def _noted(text: str, *, has_value: bool = True) -> ForeignOption:
    return ForeignOption(answer="noted", text=text, has_value=has_value)


def _refused(text: str, hint: str, *, has_value: bool = False) -> ForeignOption:
    return ForeignOption(answer="refused", text=text, hint=hint, has_value=has_value)


def _read_by(what: str) -> str:
    return f"is read by {what} only, and this run does not use it"


_ALWAYS = "is always on"
_TPU = "says how accelerate finds a TPU pod; here the same command runs on each of its hosts"
_SAGEMAKER = "is read for SageMaker only, and this run does not use it"
_NO_MEANING = "is torchrun's, and has no meaning here"
_SEARCH = "search the ranks' files: grep WORD runs/latest/ranks/*/"
_FSDP_WORDS: Mapping[str, str] = {
    **{name.lower(): f"fsdp_config.fsdp_sharding_strategy={name}" for name in get_args(StrategyName)},
    "offload": "fsdp_config.fsdp_offload_params=true",
    "auto_wrap": "fsdp_config.fsdp_auto_wrap_policy=",  # the default: units by blocks, or under xla by size
}
"""Words of transformers' `--fsdp "full_shard auto_wrap"`, and the key each one sets."""
_START_METHODS = {"spawn": "launch.preload=none", "fork": "", "forkserver": ""}

FOREIGN_OPTIONS: Mapping[str, ForeignOption] = {
    "use_fsdp": _sets("distributed_type=FSDP"),
    "multi_gpu": _sets("distributed_type=MULTI_GPU"),
    "cpu": _sets("use_cpu=true"),
    "fp16": _sets("mixed_precision=fp16"),  # accelerate to 0.15
    "bf16": _sets("mixed_precision=bf16"),
    "tpu": _sets("distributed_type=XLA"),
    "standalone": _sets("num_machines=1"),
    "no_preload": _sets("launch.preload=none"),
    "num_cpu_threads_per_process": _taken(
        "sets OMP_NUM_THREADS in launch.env", sets="launch.env.OMP_NUM_THREADS={}", has_value=True
    ),
    "fsdp": _taken("sets one key for each of its words", words=_FSDP_WORDS, has_value=True),
    "start_method": _taken(
        "spawn sets launch.preload=none; fork and forkserver fork workers from a preloaded interpreter, as always",
        words=_START_METHODS,
        has_value=True,
    ),
    "quiet": _taken(f"{_ALWAYS}: a failure is reported in a few lines"),
    "run_path": _taken(f"{_ALWAYS}: a script runs inside its worker's interpreter"),
    "use_parallelism_config": _taken("the sizes of parallelism_config apply wherever they are set"),
    "use_xpu": _noted("is ignored by accelerate as well", has_value=False),
    "ipex": _noted(_read_by("Intel's extension of torch"), has_value=False),
    "tpu_cluster": _noted(_TPU, has_value=False),
    "no_tpu_cluster": _noted(_TPU, has_value=False),
    "vm": _noted(_TPU),
    "aws_access_key_id": _noted(_SAGEMAKER),
    "aws_secret_access_key": _noted(_SAGEMAKER),
    "mpirun_ccl": _noted(_read_by("mpirun")),
    "use_deepspeed": _refused(
        "DeepSpeed needs accelerate launch",
        "leave it out: FSDP's FULL_SHARD shards what ZeRO-3 shards, SHARD_GRAD_OP what ZeRO-2 shards",
    ),
    "use_megatron_lm": _refused("Megatron-LM needs accelerate launch", "leave it out to train with FSDP"),
    "mpirun_hostfile": _refused(
        "mpirun needs accelerate launch",
        "--hostfile names nodes that fsdplaunch starts workers on over ssh",
        has_value=True,
    ),
    "use_tp": _refused(  # accelerate 1.4 to 1.6
        f"is not supported: {SPLIT_LAYERS}", "use --use_fsdp --parallelism_config_tp_size N"
    ),
    "use_mps_device": _refused(  # accelerate to 0.15
        f"is not supported: {RUNS_ON}", "leave it out to run on the CPU"
    ),
    "logs_specs": _refused(
        _NO_MEANING,
        "every rank's output is in the run's folder, in ranks/RANK/; --show-ranks and --tee show it",
        has_value=True,
    ),
    "duplicate_stdout_filters": _refused(_NO_MEANING, f"{_SEARCH}stdout.log", has_value=True),
    "duplicate_stderr_filters": _refused(_NO_MEANING, f"{_SEARCH}stderr.log", has_value=True),
}
"""Such options by their names without dashes, underscored."""
FOREIGN_PREFIXES: Mapping[str, ForeignOption] = {
    **dict.fromkeys(
        (
            *("deepspeed_", "gradient_accumulation_steps", "gradient_clipping"),
            *("offload_optimizer_", "offload_param_", "zero3_", "zero_stage"),
        ),
        _noted(_read_by("DeepSpeed")),
    ),
    "megatron_lm_": _noted(_read_by("Megatron-LM")),
}
"""What such options of another engine begin with."""


def foreign_option(name: str) -> ForeignOption | None:
    """Return what is known of an option that is not a key, by its name without dashes, underscored."""
    engine = next((one for prefix, one in FOREIGN_PREFIXES.items() if name.startswith(prefix)), None)
    return FOREIGN_OPTIONS.get(name, engine)


LETTERS: Mapping[str, str] = {"-r": "redirects", "-t": "tee", "-q": "quiet"}
"""Options of one letter, and the name each stands for."""
