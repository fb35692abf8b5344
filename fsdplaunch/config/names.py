"""What a written name means: a key by any honoured spelling, or an option of accelerate or torchrun.

An option that is not a key has one of three answers: it is taken (what stands in `sets` here), noted
(it changes nothing of a run here) or refused with a sentence. Standard library only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from fsdplaunch.config.schema.config import KeyPath, KeySpec, all_keys, own_sections, section_classes
from fsdplaunch.config.schema.key import FormerPlace
from fsdplaunch.config.schema.kinds import RUNS_ON, SPLIT_LAYERS

AUTO_WRAP = "auto_wrap"
"""The word of transformers' `--fsdp "full_shard auto_wrap"`: units, by layers or by size."""
_CLOSE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKey:
    """A name that is not a key.

    Attributes:
        id: `unknown-key` or `misplaced-key`.
        message: What is wrong.
        hint: What was meant, as far as that can be guessed.
        meant: The key of this name in another section, or None.
    """

    id: str
    message: str
    hint: str | None
    meant: KeySpec | None = None


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

    Args:
        section: Dotted.
        name: As written.
        guess: Look for one that is spelt nearly so, which takes milliseconds.
    """
    found = spellings(section).get(name)
    if found is not None:
        return found
    place = f"in {section}" if section else "at the top level"
    homes = [(home, spec) for home in ("", *section_classes()) if (spec := spellings(home).get(name)) is not None]
    if homes:
        belongs = " or ".join(f"under {home}" if home else "at the top level" for home, _ in homes)
        meant = homes[0][1] if len(homes) == 1 else None
        return UnknownKey(
            id="misplaced-key", message=f"has no meaning {place}", hint=f"it belongs {belongs}", meant=meant
        )
    hint = _guess(section, name) if guess else None
    return UnknownKey(id="unknown-key", message=f"is not a key {place}", hint=hint)


@cache
def former_places() -> dict[tuple[str, str], tuple[KeySpec, FormerPlace]]:
    """Return every other place where files say a key, by section and name there."""
    found = {}
    for spec in all_keys():
        for former in spec.key.former:
            section, name = ".".join(former.path[:-1]), former.path[-1]
            for spelling in dict.fromkeys((name, name.removeprefix(key_prefix(section)))):
                found[section, spelling] = (spec, former)
    return found


def find_former(section: str, name: str) -> tuple[KeySpec, FormerPlace] | None:
    """Return the key that older files say as `name` in this section, and how, or None."""
    return former_places().get((section, name))


def find_bare(name: str) -> KeySpec | None:
    """Return the key that `name` means without its section. A test sees to it that there is only one."""
    exact = [spec for spec in all_keys() if spec.name == name]
    tables = [spellings(section) for section in ("", *section_classes())]
    return next(iter(exact or [table[name] for table in tables if name in table]), None)


def is_bare_section(names: Iterable[str]) -> bool:
    """Return whether a file's top level consists of keys of fsdp_config, as transformers' own files do."""
    words = list(names)
    elsewhere = {*spellings(""), *section_classes()} - {*spellings("fsdp_config")}
    return any(word in spellings("fsdp_config") for word in words) and not any(word in elsewhere for word in words)


def closest(word: str, words: list[str], *, cutoff: float = _CLOSE) -> list[str]:
    """Return the spellings most like `word`, best first."""
    from difflib import get_close_matches

    return get_close_matches(word, words, n=3, cutoff=cutoff)


def _guess(section: str, name: str) -> str | None:
    word = name.replace("-", "_").lower()
    here = closest(word, [*spellings(section), *(section_classes() if not section else ())])
    if here:
        spec = spellings(section).get(here[0])
        return f"did you mean {spec.name if spec else here[0]}?"
    for home in ("", *section_classes()):
        near = closest(word, list(spellings(home)))
        if near:
            spec = spellings(home)[near[0]]
            return f"did you mean {spec.name} {f'under {home}' if home else 'at the top level'}?"
    return None


def path_of(dotted: str) -> KeyPath:
    """Split `section.key` into its parts, dashes as underscores."""
    return tuple(dotted.strip().replace("-", "_").split("."))


Answer = Literal["taken", "noted", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """An option of accelerate's or torchrun's command line that is not a key.

    Attributes:
        answer: What becomes of it.
        text: What it comes to; for noted and refused ones the sentence that is printed.
        sets: What it sets, `KEY=VALUE`; `{}` stands for its value.
        words: What each word of its value sets, where they are words; "": nothing.
        has_value: Whether the next word belongs to it.
        hint: What serves instead of a refused one.
    """

    answer: Answer
    text: str
    sets: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    has_value: bool = False
    hint: str = ""


def _sets(assignment: str) -> ForeignOption:
    return ForeignOption(answer="taken", text=f"sets {assignment}", sets=assignment)


def _needs_accelerate(what: str) -> str:
    return f"{what} needs accelerate launch"


def _noted(text: str, *, has_value: bool = True) -> ForeignOption:
    return ForeignOption(answer="noted", text=text, has_value=has_value)


_ALWAYS = "is always so"
_TPU = "says how accelerate finds a TPU pod; here the same command runs on each of its hosts"
_SAGEMAKER = "is read for SageMaker only, and this run does not use it"
_DEEPSPEED = "is read by DeepSpeed only, and this run does not use it"
_MEGATRON = "is read by Megatron-LM only, and this run does not use it"
_OF_DEEPSPEED = (
    "deepspeed_config_file",
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "zero_stage",
)
_OF_MEGATRON = (
    "attention_backend",
    "attention_dropout",
    "attention_softmax_in_fp32",
    "calculate_per_token_loss",
    "context_parallel_size",
    "decoder_last_pipeline_num_layers",
    "eod_mask_loss",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "gradient_clipping",
    "hidden_dropout",
    "no_load_optim",
    "no_save_optim",
    "num_micro_batches",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pp_degree",
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "sequence_parallelism",
    "tp_degree",
    "use_custom_fsdp",
    "use_distributed_optimizer",
    "use_precision_aware_optimizer",
    "use_rotary_position_embeddings",
)
_SEARCH = "search the ranks' files: grep WORD runs/latest/ranks/*/"

_FSDP_WORDS: Mapping[str, str] = {
    "full_shard": "fsdp_config.fsdp_sharding_strategy=FULL_SHARD",
    "shard_grad_op": "fsdp_config.fsdp_sharding_strategy=SHARD_GRAD_OP",
    "no_shard": "fsdp_config.fsdp_sharding_strategy=NO_SHARD",
    "hybrid_shard": "fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD",
    "hybrid_shard_zero2": "fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD_ZERO2",
    "offload": "fsdp_config.fsdp_offload_params=true",
    "auto_wrap": f"fsdp_config.fsdp_auto_wrap_policy={AUTO_WRAP}",
}
"""Words of transformers' `--fsdp "full_shard auto_wrap"`, and the key each one sets."""

FOREIGN_OPTIONS: Mapping[str, ForeignOption] = {
    "use_fsdp": _sets("distributed_type=FSDP"),
    "multi_gpu": _sets("distributed_type=MULTI_GPU"),
    "cpu": _sets("use_cpu=true"),
    "fp16": _sets("mixed_precision=fp16"),  # accelerate to 0.15
    "bf16": _sets("mixed_precision=bf16"),
    "tpu": _sets("distributed_type=XLA"),
    "standalone": _sets("num_machines=1"),
    "num_cpu_threads_per_process": ForeignOption(
        answer="taken",
        text="sets OMP_NUM_THREADS in launch.env",
        sets="launch.env.OMP_NUM_THREADS={}",
        has_value=True,
    ),
    "fsdp": ForeignOption(
        answer="taken", text="sets the keys that its words mean", words=_FSDP_WORDS, has_value=True
    ),
    "start_method": ForeignOption(
        answer="taken",
        text="spawn sets launch.preload=none; fork and forkserver are forks of a preloaded interpreter, as ever",
        words={"spawn": "launch.preload=none", "fork": "", "forkserver": ""},
        has_value=True,
    ),
    "no_preload": _sets("launch.preload=none"),
    "quiet": ForeignOption(answer="taken", text=f"{_ALWAYS}: a failure is reported in a few lines"),
    "run_path": ForeignOption(answer="taken", text=f"{_ALWAYS}: a script runs inside its worker's interpreter"),
    "use_parallelism_config": ForeignOption(
        answer="taken", text="the sizes of parallelism_config count wherever they are set"
    ),
    "use_xpu": _noted("is ignored by accelerate as well", has_value=False),
    "ipex": _noted("is read by Intel's extension of torch only, and this run does not use it", has_value=False),
    "tpu_cluster": _noted(_TPU, has_value=False),
    "no_tpu_cluster": _noted(_TPU, has_value=False),
    "vm": _noted(_TPU),
    "aws_access_key_id": _noted(_SAGEMAKER),
    "aws_secret_access_key": _noted(_SAGEMAKER),
    "mpirun_ccl": _noted("is read by mpirun only, and this run does not use it"),
    **{name: _noted(_DEEPSPEED) for name in _OF_DEEPSPEED},
    **{f"megatron_lm_{name}": _noted(_MEGATRON) for name in _OF_MEGATRON},
    "use_deepspeed": ForeignOption(
        answer="refused",
        text=_needs_accelerate("DeepSpeed"),
        hint="leave it out: FSDP's FULL_SHARD shards what ZeRO-3 shards, SHARD_GRAD_OP what ZeRO-2 shards",
    ),
    "use_megatron_lm": ForeignOption(
        answer="refused", text=_needs_accelerate("Megatron-LM"), hint="leave it out to train with FSDP"
    ),
    "mpirun_hostfile": ForeignOption(
        answer="refused",
        text=_needs_accelerate("mpirun"),
        has_value=True,
        hint="--hostfile names nodes that fsdplaunch starts workers on over ssh",
    ),
    "use_tp": ForeignOption(  # accelerate 1.4 to 1.6
        answer="refused",
        text=f"is not supported: {SPLIT_LAYERS}",
        hint="use --use_fsdp --parallelism_config_tp_size N",
    ),
    "use_mps_device": ForeignOption(  # accelerate to 0.15
        answer="refused", text=f"is not supported: {RUNS_ON}", hint="leave it out to run on the CPU"
    ),
    "logs_specs": ForeignOption(
        answer="refused",
        text="is torchrun's, and has no meaning here",
        has_value=True,
        hint="every rank's output is in the run's folder, in ranks/RANK/; --show-ranks and --tee show it",
    ),
    "duplicate_stdout_filters": ForeignOption(
        answer="refused",
        text="is torchrun's, and has no meaning here",
        has_value=True,
        hint=f"{_SEARCH}stdout.log",
    ),
    "duplicate_stderr_filters": ForeignOption(
        answer="refused",
        text="is torchrun's, and has no meaning here",
        has_value=True,
        hint=f"{_SEARCH}stderr.log",
    ),
}
"""Every such option by its name without dashes, underscored."""

LETTERS: Mapping[str, str] = {"-r": "redirects", "-t": "tee", "-q": "quiet"}
"""Options of one letter, and the name each stands for."""
