"""`fsdplaunch merge-weights`: show what will be merged, show progress, say what came of it."""

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fsdplaunch.checkpoint.merge.merge import MergeOptions, MergeResult, merge, prepare_merge
from fsdplaunch.checkpoint.readers.open import AmbiguousError, find_model
from fsdplaunch.cli.output import Output, byte_progress
from fsdplaunch.display_text import size_words
from fsdplaunch.errors import UsageError

_SHOWN = 5  # names that a line lists


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that its cleaning up is done; a second one waits."""
    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, _: FrameType | None) -> NoReturn:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in caught:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _choose_checkpoint(given: Path, out: Output) -> Path:
    try:
        find_model(given)
    except AmbiguousError as problem:
        if os.environ.get("CI") or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        out.say(f"{problem.message.partition(': ')[0]}:")
        for number, path in enumerate(problem.candidates, 1):
            out.say(f"  {number}  {path}")
        out.ask(f"which one? [1-{len(problem.candidates)}] ")
        answer = sys.stdin.readline().strip()
        if not re.fullmatch(r"[0-9]{1,4}", answer) or not 1 <= int(answer) <= len(problem.candidates):
            raise
        return problem.candidates[int(answer) - 1]
    return given


def _parse_rename(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not (old or new):
        msg = f"--rename {text!r} is not OLD=NEW"
        raise UsageError(msg, hint="write it as --rename model.language_model=model")
    return old, new


def merge_weights(
    *,
    checkpoint: Path,
    output: Path,
    unsafe_serialization: bool,
    file_format: str,
    no_checksums: bool,
    rename: Sequence[str],
    dry_run: bool,
    as_json: bool,
    out: Output,
    **further: Any,
) -> None:
    """Merge a sharded checkpoint and report the result, or only show the plan; `further` is of `MergeOptions`."""
    if file_format not in {"safetensors", "torch"}:
        msg = f"--format {file_format!r} is not known"
        raise UsageError(msg, hint="use safetensors or torch")
    further["verify"] |= further["remove_checkpoint_dir"]
    options = MergeOptions(
        **further,
        checksums=not no_checksums,
        safe_serialization=file_format == "safetensors" and not unsafe_serialization,
        rename=tuple(map(_parse_rename, rename)),
    )
    checkpoint = _choose_checkpoint(checkpoint, out)
    if dry_run:
        prepared = prepare_merge(checkpoint, options, output=output)
        if as_json:
            out.json(prepared.to_dict())
            return
        out.say(f"{prepared.folder}: {size_words(prepared.plan.nbytes)}, nothing written")
        for file in prepared.plan.files:
            out.data(f"{file.name}  {size_words(file.nbytes)}  {len(file.tensors)} tensors")
        return
    with ended_by_signals(), byte_progress(out) as update:
        result = merge(checkpoint, output, options=options, progress=update)
    if as_json:
        out.json(_result_as_data(result))
        return
    _say_result(result, checkpoint, out)
    for path in result.files:
        out.data(str(path))


def _result_as_data(result: MergeResult) -> dict[str, Any]:
    return {
        "source": str(result.source),
        "output": str(result.output),
        "files": [str(path) for path in result.files],
        "tensors": result.tensors,
        "bytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "dtypes": result.dtypes,
        "skipped": list(result.skipped),
        "excluded": list(result.excluded),
        "renamed": [list(pair) for pair in result.renamed],
        "tied": [list(pair) for pair in result.tied],
        "copied": [str(path) for path in result.copied],
        "verified": result.verified,
        "unchecked_bytes": result.unchecked,
        "removed": result.removed,
    }


def _say_result(result: MergeResult, given: Path, out: Output) -> None:
    source = result.source
    if source != given and not (source.exists() and given.exists() and source.samefile(given)):
        out.say(f"used {source}")
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(result.dtypes.items()))
    checked = ", read back and equal" if result.verified else ""
    if result.unchecked:
        checked += f", {size_words(result.unchecked)} of it not compared with a checksum"
    speed = f"{size_words(result.nbytes)} in {result.seconds:.1f} s"
    out.say(f"merged {result.tensors} tensors ({kinds}), {speed}{checked}")
    if result.skipped:
        shown = ", ".join(result.skipped[:_SHOWN]) + (", ..." if len(result.skipped) > _SHOWN else "")
        out.say(f"left out, not tensors of the model: {shown}")
    if result.tied:
        shown = ", ".join(f"{name} is {kept}" for name, kept in result.tied[:_SHOWN])
        out.say(f"tied, written once: {shown} (--keep-tied writes each name)")
    if result.copied:
        out.say(f"copied {', '.join(path.name for path in result.copied)}")
    if result.removed:
        out.say(f"removed {source}")
    if result.excluded:
        out.say(f"left out on request: {len(result.excluded)} weights")
