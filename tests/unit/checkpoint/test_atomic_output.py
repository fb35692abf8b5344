"""The output: where it may go, that it appears whole or not at all, and what a killed merge leaves."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.checkpoint import output_folder
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, merge_fsdp_weights
from fsdplaunch.checkpoint.output_folder import check_memory
from fsdplaunch.errors import CheckpointError, UsageError

OVERWRITE = MergeOptions(overwrite=True)


@pytest.fixture
def checkpoint(rows, tmp_path):
    return rows.save(tmp_path / "run" / "ckpt")


@pytest.mark.parametrize(
    ("given", "where"),
    [
        *(
            ("run/ckpt", where)
            for where in ("run/ckpt", "run/ckpt/out", "run", ".", "link/out", "run/ckpt/../a/b")
        ),
        ("run", "run/out"),
    ],
)
def test_output_in_on_or_above_the_checkpoint_is_refused(checkpoint, given, where, dcp, tmp_path):
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "run/a").symlink_to(checkpoint)
    before = dcp.tree(tmp_path)
    with pytest.raises(UsageError, match=r"the output .* (is|lies inside|contains) the checkpoint"):
        merge(tmp_path / given, tmp_path / where, options=OVERWRITE)
    assert dcp.tree(tmp_path) == before


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_existing_weights_are_refused_with_the_option_that_replaces_them(checkpoint, name, dcp, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("x")
    for merge_into in (merge, merge_fsdp_weights):
        with pytest.raises(UsageError, match=rf"the output .*out holds {name} already") as caught:
            merge_into(checkpoint, tmp_path / "out")
        assert caught.value.exit_code == 2
        assert "--overwrite" in caught.value.hint
        assert dcp.tree(tmp_path / "out") == {name: b"x"}
    merge_fsdp_weights(checkpoint, tmp_path / "out", overwrite=True)
    assert list(dcp.tree(tmp_path / "out")) == ["model.safetensors"]


def test_a_copied_file_never_replaces_one_unasked(checkpoint, dcp, tmp_path):
    for folder, text in (("out", "old"), ("model", "new")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"holds config\.json already"):
        merge(checkpoint, tmp_path / "out", options=MergeOptions(copy_from=tmp_path / "model"))
    assert dcp.tree(tmp_path / "out") == {"config.json": b"old"}
    merge(checkpoint, tmp_path / "out", options=MergeOptions(copy_from=tmp_path / "model", overwrite=True))
    assert dcp.tree(tmp_path / "out")["config.json"] == b"new"


def test_links_of_a_model_folder_are_followed_within_it_and_the_hubs_cache_alone(checkpoint, dcp, tmp_path):
    cache, secret = tmp_path / "models--net", tmp_path / "secret"
    model, blob = cache / "snapshots" / "1f", cache / "blobs" / "7a"
    for path, text in ((blob, "blob"), (model / "tokenizer.real", "own"), (secret, "theirs")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (model / "config.json").symlink_to("../../blobs/7a")
    (model / "tokenizer.json").symlink_to("tokenizer.real")
    merge(checkpoint, tmp_path / "out", options=MergeOptions(copy_from=model))
    found = dcp.tree(tmp_path / "out")
    assert (found["config.json"], found["tokenizer.json"]) == (b"blob", b"own")
    (model / "vocab.json").symlink_to(secret)
    with pytest.raises(UsageError, match=r"vocab\.json is a link that leads out of the model folder"):
        merge(checkpoint, tmp_path / "other", options=MergeOptions(copy_from=model))


def test_what_fails_after_the_output_is_in_place_says_so(checkpoint, dcp, tmp_path, monkeypatch):
    sync, out = output_folder.sync_folder, tmp_path / "out"

    def fail(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error")
        sync(folder)

    monkeypatch.setattr(output_folder, "sync_folder", fail)
    with pytest.raises(CheckpointError, match="out is complete, but may not be on disk yet: Input/output error"):
        merge(checkpoint, out)
    assert "layer.weight" in dcp.safetensors(out / "model.safetensors")


def test_output_that_is_or_looks_like_a_file_is_refused(checkpoint, tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="exists and is not a folder"):
        merge(checkpoint, tmp_path / "out", options=OVERWRITE)
    assert (tmp_path / "out").read_text() == "x"
    with pytest.raises(UsageError, match="looks like a file") as caught:
        merge(checkpoint, tmp_path / "merged" / "model.safetensors")
    assert caught.value.hint == f"use {tmp_path}/merged"


def test_output_is_made_with_its_parents_or_an_empty_folder_used(checkpoint, dcp, tmp_path):
    (tmp_path / "out").mkdir()
    for out in (tmp_path / "out", tmp_path / "a" / "b" / "c d"):
        merge(checkpoint, out)
        assert dcp.names(out) == ["model.safetensors"]
    assert dcp.names(tmp_path / "a" / "b") == ["c d"]


@pytest.mark.parametrize("there", ["other files", "weights", "weights, on a disk that cannot exchange folders"])
def test_weights_are_replaced_where_asked_and_other_files_kept(checkpoint, there, dcp, tmp_path, monkeypatch):
    if "disk" in there:
        monkeypatch.setattr(output_folder, "rename_exchange", lambda *_: False)
    out = tmp_path / "out"
    out.mkdir()
    old = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "model.safetensors",
    ]
    old = old if "weights" in there else []
    for name in [*old, "config.json", "tokenizer.json"]:
        (out / name).write_text(f"old {name}")
    merge(checkpoint, out, options=OVERWRITE if old else None)
    kept = dcp.tree(out)
    assert sorted(kept) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert kept["config.json"] == b"old config.json"
    assert "layer.weight" in dcp.safetensors(out / "model.safetensors")
    assert dcp.names(tmp_path) == ["out", "run"]


def test_overwrite_of_a_folder_with_folders_is_refused(checkpoint, dcp, tmp_path):
    (tmp_path / "out" / "src").mkdir(parents=True)
    (tmp_path / "out" / "src" / "train.py").write_text("x")
    with pytest.raises(UsageError, match="'src', which is not a plain file and would be lost"):
        merge(checkpoint, tmp_path / "out", options=OVERWRITE)
    assert dcp.tree(tmp_path / "out") == {"src/train.py": b"x"}


def test_failed_overwrite_leaves_the_old_output(rows, dcp, tmp_path):
    checkpoint = rows.save(tmp_path / "ckpt")
    merge(checkpoint, tmp_path / "out")
    before = dcp.tree(tmp_path / "out")
    (checkpoint / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError):
        merge(checkpoint, tmp_path / "out", options=OVERWRITE)
    assert dcp.tree(tmp_path / "out") == before


def test_full_disk_is_refused_before_anything_is_written(checkpoint, dcp, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"need \d+ bytes, .* has 1000 bytes free"):
        merge(checkpoint, tmp_path / "a" / "out")
    assert dcp.names(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "moment", ["os.pwrite", "os.fsync", "os.ftruncate", "os.copy_file_range", "pathlib.Path.rename"]
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_any_failure_while_writing_leaves_nothing(checkpoint, moment, error, dcp, tmp_path, monkeypatch):
    before = dcp.tree(tmp_path)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(moment, fail)
    wanted = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    with pytest.raises(wanted):
        merge(checkpoint, tmp_path / "deep" / "out")
    monkeypatch.undo()
    assert dcp.tree(tmp_path) == before
    assert dcp.names(tmp_path) == ["run"]


@pytest.mark.parametrize("content", ["model.safetensors", "mine/"])
def test_output_that_another_program_made_meanwhile_is_kept(checkpoint, content, dcp, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def make_meanwhile(*_):
        if not out.exists():
            out.mkdir()
            (out / content).mkdir() if content.endswith("/") else (out / content).write_text("theirs")

    options = OVERWRITE if content.endswith("/") else None
    with pytest.raises(UsageError, match=r"the output .* (holds model.safetensors already|holds 'mine')"):
        merge(checkpoint, out, options=options, progress=make_meanwhile)
    assert dcp.tree(out) == ({} if content.endswith("/") else {content: b"theirs"})
    assert dcp.names(tmp_path) == ["out", "run"]


@pytest.mark.parametrize("name", ["x" * 250, "\u00e9" * 120, "\U0001f600" * 60, " ", "-", "a\nb", "-rf", "*"])
def test_output_of_any_name_is_made(checkpoint, name, tmp_path):
    result = merge(checkpoint, tmp_path / name)
    assert result.output == tmp_path / name
    assert result.files[0].is_file()


SLOW = """
import sys, time
from pathlib import Path
import fsdplaunch.checkpoint.byte_transfer
from fsdplaunch.checkpoint.merge.merge import merge

fsdplaunch.checkpoint.byte_transfer.STEP = 64 * 1024
def slow(*progress):
    print(progress[1], flush=True)
    time.sleep(60)
merge(Path(sys.argv[1]), Path(sys.argv[2]), progress=slow)
"""


def test_what_a_killed_merge_leaves_is_removed_by_the_next_one_into_the_same_output(dcp, tmp_path):
    draft = dcp.Draft().add("w", (1024, 64), [((0, 0), (512, 64)), ((512, 0), (512, 64))])
    checkpoint = draft.save(tmp_path / "ckpt")
    before = dcp.tree(checkpoint)
    command = [sys.executable, "-c", SLOW, str(checkpoint), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as merging:
        assert int(merging.stdout.readline()) > 0
        with pytest.raises(CheckpointError, match=f"is being written by process {merging.pid} on "):
            merge(checkpoint, tmp_path / "out")
        merging.kill()
    assert dcp.tree(checkpoint) == before
    left = [name for name in dcp.names(tmp_path) if name != "ckpt"]
    assert left
    assert all(name.startswith(".out.partial-") for name in left)
    other = tmp_path / ".out.partial-x.partial-01234567"  # of another output, "out.partial-x"
    other.mkdir()
    merge(checkpoint, tmp_path / "out")
    assert dcp.names(tmp_path) == [other.name, "ckpt", "out"]


def test_torch_format_without_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "MemTotal: 9 kB\nMemAvailable: 2048 kB\n")
    check_memory(2**21)
    with pytest.raises(CheckpointError, match=r"in memory: 3.0 MiB, 2.0 MiB are free"):
        check_memory(3 * 2**20)
