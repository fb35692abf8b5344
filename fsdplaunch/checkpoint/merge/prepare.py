"""A merge to safetensors, planned and checked: names, tied weights, files of the model's folder, removal."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.chunks import ItemLocation
from fsdplaunch.checkpoint.manifest import model_entry
from fsdplaunch.checkpoint.merge import MergeOptions
from fsdplaunch.checkpoint.merge.plan import MergePlan, build_plan, plan_alone
from fsdplaunch.checkpoint.merge.weight_names import Selection, select_weights
from fsdplaunch.checkpoint.merge.write import written_blocks
from fsdplaunch.checkpoint.output_folder import check_copies, check_space, save_locks
from fsdplaunch.checkpoint.readers.data_files import DataFiles, identity_of
from fsdplaunch.checkpoint.readers.dcp_index import StoredTensor, gc_pause
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.untrusted_files import real_path, short
from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.files import durable_file
from fsdplaunch.run_dir import read_json

CONFIG_NAME = "config.json"
# What transformers' and sentence-transformers' savers write, apart from weights and training state.
_COMPANION = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|vocab|tokenizer\w*|\w*processor_config"
    r"|processor\w*|chat_template\w*)\.json"
    r"|tokenizer\S*|vocab\.\w+|merges\.txt|\w+\.model|\w+\.tiktoken|\w*chat_template\w*\.jinja"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|distcp)(\.index\.json)?")


def _find_model_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a model's folder that belong beside merged weights; never weights.

    A file may be a link to another one in it, or in the hub's cache to a blob beside the folder of snapshots.
    """
    if not folder.is_dir():
        msg = f"the model folder {folder} is not a folder"
        raise UsageError(msg, hint="give a folder on this machine that holds config.json")
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    if CONFIG_NAME not in found:
        msg = f"the model folder {folder} holds no {CONFIG_NAME}"
        hint = "give the folder that the model was loaded from, or saved to by save_pretrained"
        raise UsageError(msg, hint=hint)
    files = [path for name, path in found.items() if _COMPANION.fullmatch(name) and not _WEIGHTS.fullmatch(name)]
    home = real_path(folder)
    homes = (home, home.parents[1] / "blobs") if home.parent.name == "snapshots" else (home,)
    for path in files:
        if not any(real_path(path).is_relative_to(each) for each in homes):
            msg = f"{path} is a link that leads out of the model folder"
            raise UsageError(msg, hint="put the real file there, or give the folder that has it")
    return tuple(files)


def copy_model_files(model_files: Sequence[Path], folder: Path) -> None:
    """Copy the files into `folder`, on disk when this returns; links are followed."""
    for path in model_files:
        with path.open("rb") as source, durable_file(folder / path.name, "xb") as goal:
            shutil.copyfileobj(source, goal)


_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp_(\d+)")
# Ends of names: the weight that is kept comes first.
_EMBEDDINGS = ("shared", "embed_tokens", "wte", "word_embeddings", "embed_in")
_HEADS = ("lm_head", "embed_out")

Items = Mapping[ItemLocation, TorchZipItem]


def _known_ties(folder: Path, model: Path | None, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of `names` that the manifest says are one weight, or that language models tie.

    The configuration in the model's own folder may say that nothing is tied.
    """
    number = _MODEL_FOLDER.fullmatch(folder.name)
    tied = model_entry(folder, int(number[1]) if number else 0).get("tied")
    config = {} if model is None else read_json(model / CONFIG_NAME)
    inner = config.get("text_config")
    if isinstance(tied, list):  # what our own save noted
        listed = [tuple(map(str, group)) for group in tied if isinstance(group, list)]
    elif any(part.get("tie_word_embeddings") is False for part in (config, inner) if isinstance(part, dict)):
        listed = []
    else:
        layer = {name: name.split(".")[-2] for name in names if name.endswith(".weight") and name.count(".")}
        order = {end: at for at, end in enumerate((*_EMBEDDINGS, *_HEADS))}
        ends = sorted((order[layer[name]], name) for name in layer if layer[name] in order)
        both = ends and ends[0][0] < len(_EMBEDDINGS) <= ends[-1][0]
        listed = [tuple(name for _, name in ends)] if both else []
    here = set(names)
    groups = (tuple(name for name in group if name in here) for group in listed)
    return [group for group in groups if len(group) > 1]


def _find_tied(
    selection: Selection, groups: Iterable[Sequence[str]], items: Items, sources: DataFiles
) -> tuple[tuple[str, str], ...]:
    """Return the final names of weights to leave out, each with the one that is kept and holds the same bytes."""
    weights = dict(zip(selection.plain, selection.tensors, strict=True))
    tied: list[tuple[str, str]] = []
    for group in groups:
        kept: list[tuple[str, StoredTensor]] = []
        for name in group:
            final, tensor = weights[name]
            same = next((other for other, one in kept if _equal(one, tensor, items, sources)), None)
            if same is None:
                kept.append((final, tensor))
            else:
                tied.append((final, same))
    return tuple(tied)


def _equal(one: StoredTensor, other: StoredTensor, items: Items, sources: DataFiles) -> bool:
    """Compare two weights: by type and shape, by checksums where they are cut alike, then by every byte."""
    if (one.dtype.name, one.shape) != (other.dtype.name, other.shape) or not one.dtype.size:
        return False
    first, second = plan_alone(one, items), plan_alone(other, items)
    for a, b in zip(first.pieces, second.pieces, strict=False):
        alike = (a.region, a.strides, a.data_length) == (b.region, b.strides, b.data_length)
        if alike and None not in {a.crc, b.crc} and a.crc != b.crc:
            return False
    one_by_one = (written_blocks(planned, sources.read_piece) for planned in (first, second))
    return all(a == b for a, b in zip(*one_by_one, strict=True))


def remove_checkpoint(opened: OpenCheckpoint) -> bool:
    """Delete the data files and the index that were merged, then the folder when nothing else is in it.

    All by the open folder: what a save has put in its place meanwhile is another one. Where no run has the saves'
    lock, none begins meanwhile. The index goes first: without it the rest is visibly incomplete, should this be
    interrupted.

    Returns:
        Whether the folder is gone.

    Raises:
        CheckpointError: A file is not the one that was merged; nothing is deleted.
    """
    folder, fd = opened.folder, opened.descriptor
    locks = save_locks(folder.parent if _MODEL_FOLDER.fullmatch(folder.name) else folder)
    try:
        for lock in locks:
            with suppress(CheckpointError, OSError):
                lock.acquire()
        for name, identity in opened.files.items():
            with suppress(FileNotFoundError):
                if identity_of(os.stat(name, dir_fd=fd)) == identity:
                    continue
            msg = f"{folder} was not deleted: {name} in it changed after the merge"
            raise CheckpointError(msg, hint="the merged weights are complete; check what writes to the checkpoint")
        for name in opened.files:
            os.unlink(name, dir_fd=fd)
        with suppress(FileNotFoundError):
            if not os.listdir(fd) and os.path.samestat(os.fstat(fd), folder.stat()):  # noqa: PTH208
                folder.rmdir()
                return True
        return False
    finally:
        for lock in locks:
            lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMerge:
    """A merge to safetensors that is planned and checked, with nothing written yet."""

    folder: Path  # the checkpoint folder that is read
    selection: Selection  # which entries are merged, and under which names
    plan: MergePlan  # which bytes go where
    # Final names of weights that are written under another name only: left out, and kept.
    tied: tuple[tuple[str, str], ...] = ()
    model_files: tuple[Path, ...] = ()  # files that come from the model's folder

    def to_dict(self) -> dict[str, Any]:
        """Return everything that would be done as plain data."""
        return {
            "source": str(self.folder),
            "skipped": list(self.selection.skipped),
            "excluded": list(self.selection.excluded),
            "renamed": [list(pair) for pair in self.selection.renamed],
            "tied": [list(pair) for pair in self.tied],
            "copied": [path.name for path in self.model_files],
            **self.plan.to_dict(),
        }


def prepare(opened: OpenCheckpoint, target: Path | None, options: MergeOptions) -> PreparedMerge:
    """Choose, name and plan; only headers are read, and the weights that are known to be tied.

    `target` is the output folder, when its disk is to be checked.

    Raises:
        UsageError: When the options ask for what is not there.
        CheckpointError: When the checkpoint cannot be merged, or the disk is too full.
    """
    source, model = opened.folder, options.copy_from
    model_files = () if model is None else _find_model_files(model)
    if model is None and _MODEL_FOLDER.fullmatch(source.name) and (source.parent / CONFIG_NAME).is_file():
        model = source.parent  # as a Trainer saves; what the output holds already stays
        model_files = tuple(
            path for path in _find_model_files(model) if not target or not (target / path.name).exists()
        )
    selection = select_weights(
        opened.index,
        where=str(source),
        only=options.only,
        exclude=options.exclude,
        renames=options.rename,
    )
    lost = (*selection.excluded, *selection.skipped)
    if options.remove_checkpoint_dir and lost:
        shown = ", ".join(short(name) for name in lost[:3])
        msg = f"{source} also holds {len(lost)} entries that are not merged and would be lost: {shown}"
        raise UsageError(msg, hint="merge without removing the checkpoint")
    items = opened.items(tensor for _, tensor in selection.tensors)
    groups = [] if options.keep_tied else _known_ties(source, model, selection.plain)
    tied = _find_tied(selection, groups, items, opened.sources)
    aliases = dict(tied)
    kept = [at for at, (name, _) in enumerate(selection.tensors) if name not in aliases]
    selection = replace(
        selection,
        plain=tuple(selection.plain[at] for at in kept),
        tensors=tuple(selection.tensors[at] for at in kept),
    )
    with gc_pause():
        plan = build_plan(
            selection, items, max_shard_size=options.max_shard_size, dtype=options.dtype, aliases=aliases
        )
    if target is not None:
        check_copies(target, (path.name for path in model_files), overwrite=options.overwrite)
        check_space(target, plan.nbytes + sum(path.stat().st_size for path in model_files))
    return PreparedMerge(folder=source, selection=selection, plan=plan, tied=tied, model_files=model_files)
