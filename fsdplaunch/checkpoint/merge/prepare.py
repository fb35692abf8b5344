"""A merge to safetensors that is planned and checked, before anything is written.

Which weights have several names, which files of the model's folder go along, and whether the checkpoint may be
removed in the end.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.chunks import ItemLocation
from fsdplaunch.checkpoint.manifest import INDEX_NAME, model_entry, read_json
from fsdplaunch.checkpoint.merge.options import MergeOptions
from fsdplaunch.checkpoint.merge.plan import MergePlan, build_plan, plan_alone
from fsdplaunch.checkpoint.merge.weight_names import Selection, select_weights
from fsdplaunch.checkpoint.merge.write import written_blocks
from fsdplaunch.checkpoint.output_folder import check_copies, check_space
from fsdplaunch.checkpoint.readers.data_files import DataFiles, identity_of
from fsdplaunch.checkpoint.readers.dcp_index import StoredTensor, gc_pause
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError, UsageError

CONFIG_NAME = "config.json"
# What transformers' and sentence-transformers' savers write, apart from weights and training state.
_COMPANION = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|vocab|tokenizer\w*|\w*processor_config"
    r"|processor\w*|chat_template\w*)\.json"
    r"|tokenizer\S*|vocab\.\w+|merges\.txt|\w+\.model|\w+\.tiktoken|\w*chat_template\w*\.jinja"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|distcp)(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file to copy: where it stands, its name in the output, its size in bytes."""

    path: Path
    name: str
    nbytes: int


def find_model_files(folder: Path) -> tuple[ModelFile, ...]:
    """Return the files of a model's folder that belong beside merged weights; never weights.

    Raises:
        UsageError: When it is not a model's folder.
    """
    if not folder.is_dir():
        msg = f"the model folder {folder} is not a folder"
        raise UsageError(msg, hint="give a folder on this machine that holds config.json")
    found = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if not any(path.name == CONFIG_NAME for path in found):
        msg = f"the model folder {folder} holds no {CONFIG_NAME}"
        raise UsageError(
            msg, hint="give the folder that the model was loaded from, or saved to by save_pretrained"
        )
    return tuple(
        ModelFile(path, path.name, path.stat().st_size)
        for path in found
        if _COMPANION.fullmatch(path.name) and not _WEIGHTS.fullmatch(path.name)
    )


def copy_model_files(model_files: Sequence[ModelFile], folder: Path) -> None:
    """Copy the files into `folder`, on disk when this returns; links are followed."""
    for model_file in model_files:
        goal = folder / model_file.name
        shutil.copyfile(model_file.path, goal)
        fd = os.open(goal, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp_(\d+)")
# Ends of names: the weight that is kept comes first.
_EMBEDDINGS = ("shared", "embed_tokens", "wte", "word_embeddings", "embed_in")
_HEADS = ("lm_head", "embed_out")

Tied = tuple[tuple[str, str], ...]


def known_ties(folder: Path, model: Path | None, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of `names` that the manifest says are one weight, or that language models tie.

    Args:
        folder: The checkpoint.
        model: The model's own folder, whose configuration may say that nothing is tied.
        names: The weights' names, without wrappers.
    """
    listed = _manifest_ties(folder)
    if listed is None:
        listed = [] if _says_untied(model) else [_language_model_tie(names)]
    here = set(names)
    groups = (tuple(name for name in group if name in here) for group in listed)
    return [group for group in groups if len(group) > 1]


def _manifest_ties(folder: Path) -> list[tuple[str, ...]] | None:
    """Return what our own save noted; None when there is no note for this model."""
    number = _MODEL_FOLDER.fullmatch(folder.name)
    tied = model_entry(folder, int(number[1]) if number else 0).get("tied")
    if not isinstance(tied, list):
        return None
    return [tuple(map(str, group)) for group in tied if isinstance(group, list)]


def _says_untied(model: Path | None) -> bool:
    """Say whether the model's configuration denies that input and output share their weight."""
    config = None if model is None else read_json(model / CONFIG_NAME)
    if not isinstance(config, dict):
        return False
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, dict) else [config]
    return any(part.get("tie_word_embeddings") is False for part in parts)


def _language_model_tie(names: Sequence[str]) -> tuple[str, ...]:
    """Return the input embeddings and the output layers among `names`, the one to keep first."""
    layer = {name: name.split(".")[-2] for name in names if name.endswith(".weight")}
    order = {end: at for at, end in enumerate((*_EMBEDDINGS, *_HEADS))}
    found = sorted((name for name in layer if layer[name] in order), key=lambda name: (order[layer[name]], name))
    ends = {layer[name] for name in found}
    return tuple(found) if ends & set(_HEADS) and ends & set(_EMBEDDINGS) else ()


def find_tied(
    selection: Selection,
    groups: Iterable[Sequence[str]],
    items: Mapping[ItemLocation, TorchZipItem],
    sources: DataFiles,
) -> Tied:
    """Return the final names of weights to leave out, each with the one that is kept and holds the same bytes.

    Args:
        selection: The weights.
        groups: Names without wrappers that are known to be one weight.
        items: Where each chunk's bytes are.
        sources: The data files; the weights in question are read.
    """
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


def _equal(
    one: StoredTensor, other: StoredTensor, items: Mapping[ItemLocation, TorchZipItem], sources: DataFiles
) -> bool:
    """Compare two weights: by type and shape, by checksums where they are cut alike, then by every byte."""
    if (one.dtype.name, one.shape) != (other.dtype.name, other.shape) or not one.dtype.size:
        return False
    first, second = plan_alone(one, items), plan_alone(other, items)
    for a, b in zip(first.pieces, second.pieces, strict=False):
        alike = (a.region, a.strides, a.flip, a.data_length) == (b.region, b.strides, b.flip, b.data_length)
        if alike and None not in {a.crc, b.crc} and a.crc != b.crc:
            return False
    blocks = zip(
        written_blocks(first, sources.read_piece), written_blocks(second, sources.read_piece), strict=True
    )
    return all(a == b for a, b in blocks)


def without(selection: Selection, left_out: set[str]) -> Selection:
    """Return the selection without some final names."""
    if not left_out:
        return selection
    pairs = zip(selection.plain, selection.tensors, strict=True)
    kept = [(plain, entry) for plain, entry in pairs if entry[0] not in left_out]
    return replace(selection, plain=tuple(plain for plain, _ in kept), tensors=tuple(entry for _, entry in kept))


_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


def check_removal(folder: Path, skipped: tuple[str, ...], excluded: tuple[str, ...] = ()) -> None:
    """Refuse to remove a checkpoint that holds more than the merged weights.

    Raises:
        UsageError: When entries of it would be lost.
    """
    if excluded:
        msg = f"{folder} also holds {len(excluded)} weights that are left out: {short(excluded[0])} would be lost"
        raise UsageError(msg, hint="merge without removing the checkpoint")
    if skipped:
        shown = ", ".join(short(name) for name in skipped[:3])
        msg = f"{folder} also holds {len(skipped)} entries that are not weights and would be lost: {shown}"
        raise UsageError(msg, hint="merge without removing the checkpoint")


def remove_checkpoint(opened: OpenCheckpoint) -> bool:
    """Delete the data files and the index that were merged, then the folder when nothing else is in it.

    All by the open folder: what a save has put in its place meanwhile is another one. The index goes first:
    without it the rest is visibly incomplete, should this be interrupted.

    Returns:
        Whether the folder is gone.

    Raises:
        CheckpointError: A file is not the one that was merged; nothing is deleted.
    """
    folder, fd = opened.folder, opened.descriptor
    for name, identity in opened.files.items():
        with suppress(FileNotFoundError):
            if identity_of(os.stat(name, dir_fd=fd)) == identity:
                continue
        msg = f"{folder} stays: {name} in it was changed after it was merged"
        raise CheckpointError(msg, hint="the merged weights are complete; look what writes to the checkpoint")
    listed = sorted(os.listdir(fd), key=lambda name: name != INDEX_NAME)  # noqa: PTH208  (it may have no path)
    for name in listed:
        if name in opened.files or _DATA_FILE.fullmatch(name):
            os.unlink(name, dir_fd=fd)
    with suppress(FileNotFoundError):
        if not os.listdir(fd) and os.path.samestat(os.fstat(fd), folder.stat()):  # noqa: PTH208
            folder.rmdir()
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMerge:
    """A merge to safetensors that is planned and checked, with nothing written yet.

    Attributes:
        folder: The checkpoint folder that is read.
        selection: Which entries are merged, and under which names.
        plan: Which bytes go where.
        tied: Final names of weights that are written under another name only: left out, and kept.
        model_files: Files that come from the model's folder.
    """

    folder: Path
    selection: Selection
    plan: MergePlan
    tied: tuple[tuple[str, str], ...] = ()
    model_files: tuple[ModelFile, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all that is written, copied files included."""
        return self.plan.nbytes + sum(model_file.nbytes for model_file in self.model_files)

    def to_dict(self) -> dict[str, Any]:
        """Return everything that would be done as plain data."""
        return {
            "source": str(self.folder),
            "skipped": list(self.selection.skipped),
            "excluded": list(self.selection.excluded),
            "renamed": [list(pair) for pair in self.selection.renamed],
            "tied": [list(pair) for pair in self.tied],
            "copied": [model_file.name for model_file in self.model_files],
            **self.plan.to_dict(),
        }


def prepare(opened: OpenCheckpoint, target: Path | None, options: MergeOptions) -> PreparedMerge:
    """Choose, name and plan; only headers are read, and the weights that are known to be tied.

    Args:
        opened: The checkpoint.
        target: The output folder, when its disk is to be checked.
        options: How to merge.

    Raises:
        UsageError: When the options ask for what is not there.
        CheckpointError: When the checkpoint cannot be merged, or the disk is too full.
    """
    source = opened.folder
    model_files = () if options.copy_from is None else find_model_files(options.copy_from)
    selection = select_weights(
        opened.index,
        where=str(source),
        strip_wrappers=options.strip_wrappers,
        only=options.only,
        exclude=options.exclude,
        renames=options.rename,
    )
    if options.remove_checkpoint_dir:
        check_removal(source, selection.skipped, selection.excluded)
    items = opened.items((tensor for _, tensor in selection.tensors))
    groups = [] if options.keep_tied else known_ties(source, options.copy_from, selection.plain)
    tied = find_tied(selection, groups, items, opened.sources)
    selection = without(selection, {left_out for left_out, _ in tied})
    with gc_pause():
        plan = build_plan(
            selection, items, max_shard_size=options.max_shard_size, dtype=options.dtype, aliases=dict(tied)
        )
    prepared = PreparedMerge(folder=source, selection=selection, plan=plan, tied=tied, model_files=model_files)
    if target is not None:
        check_copies(target, (model_file.name for model_file in model_files), overwrite=options.overwrite)
        check_space(target, prepared.nbytes)
    return prepared
