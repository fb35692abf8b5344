"""Saves beside training, on one rank only, without room, to folders not shared; which checkpoint is the newest."""

import contextlib
import ctypes
import gc
import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import FORMS, save_half_way
from tests.distributed.tiny import adamw, build, plugin, words_of

ASYNC = {"FSDPLAUNCH_CHECKPOINT_ASYNC": "true"}


def fresh(seed: int = 0, version: int = 2) -> tuple[nn.Module, Any]:
    model = build(seed)
    return fsdplaunch.prepare(
        model, adamw(model.parameters()), plugin=plugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    )


# Beside training


def save_while_blocked(folder: str) -> list[bool]:
    """Whether the first save had returned unwritten, whether a second waited for it, whether both are there."""
    from fsdplaunch.runtime.saving import background_save, save_job

    model, optimizer = fresh()
    gate, write, before = threading.Event(), save_job.durable_file, Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_job, "durable_file", lambda path: (gate.wait(20), write(path))[1])
        patch.chdir(folder)
        first = Path(folder) / fsdplaunch.save_checkpoint("c", model=model, optimizer=optimizer, step=1)
        os.chdir(before)  # while it is being written
        found = [not first.exists()]
        threading.Timer(1.0, gate.set).start()
        start = time.monotonic()
        second = fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=2)
        found.append(time.monotonic() - start > 0.8)
        background_save.finish_saves()
    return [*found, all((each / "fsdplaunch.json").exists() for each in (first, second))]


def test_second_save_waits_for_the_one_under_way(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(save_while_blocked, str(tmp_path), env=ASYNC) == [[True] * 3] * 2


def fail(folder: str) -> tuple[str, list[str], str, bool, str]:
    """What a blocking save raises, two calls, the next save and the end; whether a failed save left anything."""
    from fsdplaunch.runtime.saving import save_job
    from fsdplaunch.runtime.saving.background_save import finish_saves

    def write(*_: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return io.BytesIO()

    def save(step: int) -> str:
        return words_of(fsdplaunch.save_checkpoint, folder, model=model, optimizer=optimizer, step=step)

    model, optimizer = fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_job, "durable_file", write)
        patch.setattr(save_job, "crc_of", lambda *_: 0)
        blocking = save(9)
        patch.setenv(*next(iter(ASYNC.items())))
        at_once, at_next = [save(1)], save(2)
        dist.barrier()
        left = any(Path(folder).iterdir())
        dist.barrier()
        (Path(folder) / "checkpoint-3").touch()
        at_once.append(save(3))
    optimizer.step()
    return blocking, at_once, at_next, left, words_of(finish_saves)


def test_failure_of_one_rank_reaches_all_at_once_or_at_the_next_save(two_ranks: RankPool, tmp_path: Path) -> None:
    for blocking, at_once, at_next, anything_left, at_end in two_ranks.run(fail, str(tmp_path)):
        assert "checkpoint-9: rank 1: OSError: [Errno 28] No space left on device" in blocking
        assert at_once == ["nothing was raised"] * 2
        assert f"{tmp_path}/checkpoint-3: rank 0: {tmp_path}/checkpoint-3 is a file" in at_end
        assert "checkpoint-1: rank 1: OSError: [Errno 28] No space left on device" in at_next
        assert not anything_left


# Calls that not all ranks make


def save_on_one(folder: str) -> str:
    from fsdplaunch.runtime.collectives import waits

    model, _ = fresh()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NOTICE_SECONDS", "CONFIRM_SECONDS", "STILL_SECONDS"):
            patch.setattr(waits, name, 0.5)
        message = words_of(fsdplaunch.save_checkpoint, folder, model=model) if dist.get_rank() == 0 else ""
        dist.all_reduce(torch.zeros(1))  # where the other rank waits
    fsdplaunch.save_checkpoint(folder, model=model)
    return message


def test_save_on_one_rank_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    message = two_ranks.run(save_on_one, str(tmp_path / "c"))[0]
    assert "save_checkpoint was called on rank 0 only: rank 1 went on" in message
    assert "rank 1 went on, waiting for rank 0 at test_saving.py:" in message
    assert "(save_on_one)" in message
    assert (tmp_path / "c" / "fsdplaunch.json").exists()  # and the next save on all ranks is no worse for it


def save_late(folder: str) -> str:
    from fsdplaunch.runtime.collectives import waits

    model, _ = fresh()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "NOTICE_SECONDS", 0.2)
        time.sleep(1.5 * dist.get_rank())
        fsdplaunch.save_checkpoint(f"{folder}/c", model=model)
    return said.getvalue()


def test_late_rank_is_mentioned_and_waited_for(two_ranks: RankPool, tmp_path: Path) -> None:
    said = two_ranks.run(save_late, str(tmp_path))[0]
    assert "rank 0: save_checkpoint waits for rank 1" in said
    assert (tmp_path / "c" / "fsdplaunch.json").exists()


def save_apart(folder: str, how: str) -> str:
    model, _ = fresh()
    mine = Path(folder) / str(dist.get_rank())
    mine.mkdir()
    with contextlib.chdir(mine):  # the same relative name is another folder in each rank's own
        return words_of(fsdplaunch.save_checkpoint, mine if how == "named apart" else "out/c", model=model, step=1)


@pytest.mark.parametrize("how", ["named apart", "not shared"])
def test_folders_that_are_not_the_same_are_refused(two_ranks: RankPool, tmp_path: Path, how: str) -> None:
    for message in two_ranks.run(save_apart, str(tmp_path), how):
        if how == "not shared":
            assert f"out/c/checkpoint-1 of {os.uname().nodename} (rank 0) is not visible on" in message
            assert "(rank 1)" in message
        else:
            assert "0/checkpoint-1, rank 1 elsewhere" in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# Which one is the newest, which ones stay


def save_steps(folder: str, steps: list[int], version: int = 2) -> None:
    model, _ = fresh(version=version)
    for step in steps:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        fsdplaunch.save_checkpoint(folder, model=model, step=step)


def load(folder: str) -> tuple[int, float, str]:
    model, _ = fresh(9)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        state = fsdplaunch.load_checkpoint(folder, model=model)
    return state["step"], model.head.weight.full_tensor()[0, 0].item(), said.getvalue()


def test_only_the_last_saved_are_kept_and_loaded_and_never_what_others_wrote(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    theirs = tmp_path / "checkpoint-1" / "pytorch_model_fsdp_0"
    theirs.mkdir(parents=True)
    (theirs / ".metadata").write_bytes(b"theirs")
    (tmp_path / ".checkpoint-3.partial").mkdir()
    (tmp_path / "notes").mkdir()
    two_ranks.run(save_steps, str(tmp_path), [4, 5, 6, 2], env={"FSDPLAUNCH_CHECKPOINT_KEEP_LAST": "2"})
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-6", "checkpoint-2", "notes"}
    assert two_ranks.run(load, str(tmp_path))[0] == (2, 2.0, "")  # after a return to an earlier step


def load_words(folder: str) -> str:
    model, _ = fresh(9)
    return words_of(fsdplaunch.load_checkpoint, folder, model=model)


def load_what_vanishes(folder: str) -> str:
    """The error when rank 0 alone finds out that a checkpoint has gone."""
    from fsdplaunch.runtime.saving import save_load

    def vanish(root: Path) -> Any:
        raise FileNotFoundError(2, "No such file or directory", str(root))

    model, _ = fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_load, "find_checkpoint", vanish)
        return words_of(fsdplaunch.load_checkpoint, folder, model=model)


def test_checkpoint_that_vanishes_while_rank_0_looks_is_an_error_of_all(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for message in two_ranks.run(load_what_vanishes, str(tmp_path)):
        assert "rank 0: FileNotFoundError" in message


def save_and_load_where_rank_1_cannot_look(folder: str, kind: str, name: str) -> str:
    """The error of a load in which the file server fails rank 1 at one file or folder, and the others read on."""
    model = build(0)
    fields: dict[str, Any] = {"fsdp_version": 2}
    if kind == "LOCAL_STATE_DICT":
        fields = {"fsdp_version": 1, "use_orig_params": False}
    form = plugin(state_dict_type=kind, **fields)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=form)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
    dist.barrier()
    stat, open_file = os.stat, os.open

    def check(path: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).name == name:
            raise OSError(116, "Stale file handle")
        return path

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "stat", lambda path, *args, **named: stat(check(path), *args, **named))
            patch.setattr(os, "open", lambda path, *args, **named: open_file(check(path), *args, **named))
        return words_of(fsdplaunch.load_checkpoint, folder, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("SHARDED_STATE_DICT", "checkpoint-1"),
        ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0"),
        ("FULL_STATE_DICT", "optimizer.bin"),
        ("LOCAL_STATE_DICT", "pytorch_model_fsdp_rank1.bin"),
    ],
)
def test_file_that_one_rank_cannot_look_at_is_an_error_of_all_when_it_is_loaded(
    two_ranks: RankPool, tmp_path: Path, kind: str, name: str
) -> None:
    for message in two_ranks.run(save_and_load_where_rank_1_cannot_look, str(tmp_path), kind, name):
        assert "rank 1: " in message
        assert "Stale file handle" in message


def load_what_is_replaced(folder: str) -> tuple[int, float]:
    """The step and the weight that are loaded when another save comes into the place while the first is read."""
    from fsdplaunch.runtime.saving import save_load

    read = save_load._read_models
    model, _ = fresh()

    def replace_while_read(place: Path, *others: Any) -> None:
        read(place, *others)
        other = Path(folder) / "other"
        if dist.get_rank() == 0 and other.exists():
            place.rename(place.with_name("before"))
            other.rename(place)
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_load, "_read_models", replace_while_read)
        state = fsdplaunch.load_checkpoint(Path(folder) / "c", model=model)
    return state["step"], model.head.weight.full_tensor()[0, 0].item()


def test_checkpoint_that_is_replaced_while_it_is_read_is_read_again(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path), [1, 2])
    for step, name in ((1, "c"), (2, "other")):
        (tmp_path / f"checkpoint-{step}").rename(tmp_path / name)
    assert two_ranks.run(load_what_is_replaced, str(tmp_path)) == [(2, 2.0)] * 2


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0/__1_0.distcp", "random_states_1.pkl"])
def test_file_of_another_save_is_named_by_load(
    two_ranks: RankPool, tmp_path: Path, name: str, version: int
) -> None:
    two_ranks.run(save_steps, str(tmp_path), [1, 2], version)
    (tmp_path / "checkpoint-2" / name).write_bytes((tmp_path / "checkpoint-1" / name).read_bytes())
    for message in two_ranks.run(load_words, str(tmp_path)):
        assert f"{name.rpartition('/')[2]} does not match its checksum: it is" in message


def test_what_is_passed_over_is_said(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path), [1, 2, 3])
    next((tmp_path / "checkpoint-3").rglob("*.distcp")).unlink()
    (tmp_path / "checkpoint-2" / "fsdplaunch.json").write_text("{")
    (tmp_path / ".checkpoint-4.partial").mkdir()
    step, value, said = two_ranks.run(load, str(tmp_path))[0]
    assert (step, value) == (1, 1.0)
    assert f"skipped {tmp_path}/checkpoint-3: pytorch_model_fsdp_0/__" in said
    assert f"skipped {tmp_path}/checkpoint-2: its manifest cannot be read" in said
    assert f"skipped {tmp_path}/.checkpoint-4.partial: its save did not finish" in said
    assert f"loading {tmp_path}/checkpoint-1, the newest complete checkpoint" in said


def load_less_trained(folder: str) -> str:
    model = build()
    model.head.weight.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = fsdplaunch.prepare(model, adamw(trained), plugin=plugin(fsdp_version=2))
    return words_of(fsdplaunch.load_checkpoint, folder, model=model, optimizer=optimizer)


def test_optimizer_state_of_parameters_not_trained_any_more_is_refused(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(save_half_way, str(tmp_path), FORMS["2 sharded"], {})
    assert "has head.weight besides" in two_ranks.run(load_less_trained, str(tmp_path))[0]


# Whole state dicts


class Peak:
    """The most anonymous memory this process has had while the block ran, beyond what it had before, in bytes."""

    def __enter__(self) -> "Peak":
        gc.collect()
        self.libc = ctypes.CDLL(None)
        self.libc.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: what is freed goes
        self.before = self.highest = self.held()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.over.wait(0.001):
            self.highest = max(self.highest, self.held())

    def held(self) -> int:
        """Return the anonymous memory without the free parts of a heap that earlier tests have left."""
        self.libc.malloc_trim(0)
        return anonymous()

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()
        self.grown = self.highest - self.before


def anonymous() -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def save_whole(folder: str) -> tuple[int, int]:
    model: Any = nn.Sequential(*(nn.Linear(512, 1024, bias=False) for _ in range(24)))
    whole = 3 * 4 * sum(param.numel() for param in model.parameters())
    fields = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}
    wrap = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields, **wrap))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    with Peak() as peak:
        fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer)
    return peak.grown, whole


def test_no_rank_holds_the_whole_model_to_save_it_whole_twice(two_ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for grown, whole in two_ranks.run(save_whole, str(tmp_path / "c")):
        assert whole == 150_994_944
        assert grown < 0.2 * whole
    safe = load_file(tmp_path / "c" / "model.safetensors")
    plain = torch.load(tmp_path / "c" / "pytorch_model_fsdp.bin", weights_only=True)
    assert list(plain) == [f"{number}.weight" for number in range(24)]
    assert all(torch.equal(plain[name], safe[name]) for name in plain)


# Requests to stop


def steps_until_stopped(signalled: int, number: int) -> tuple[int, bool]:
    for step in range(200):
        if fsdplaunch.should_stop():
            return step, fsdplaunch.should_stop()
        if step == 5 and dist.get_rank() == signalled:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.zeros(1))
    return -1, False


def test_signal_to_one_rank_stops_all_at_the_same_step(two_ranks: RankPool) -> None:
    try:
        (step, still), other = two_ranks.run(steps_until_stopped, 1, signal.SIGUSR1)
    finally:
        two_ranks.stop()  # these have been asked to
    assert (step, still) == other
    assert 6 <= step <= 7
    assert still
