"""The workers' entry: set up device and process group, run the user's script as `__main__`, record how it ended.

    python -m fsdplaunch.runtime.bootstrap [-m] SCRIPT_OR_MODULE [ARGS...]

Started once per rank with torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...) and with those of
`fsdplaunch.config.environment`, in a process of its own or in one forked from an interpreter that has torch.
"""

import faulthandler
import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from fsdplaunch.config.environment import (
    ALLOW_UNSHARDED,
    COMPARE_DIR,
    DEVICE,
    MEASURE_STEPS,
    REHEARSAL_STEPS,
    decode,
)
from fsdplaunch.config.resolve import shards_models, uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import ShardingError
from fsdplaunch.features import COMPARISON_WORKER, TUNE_WORKER, XLA, feature
from fsdplaunch.files import flush_both
from fsdplaunch.parent_death import die_with_parent
from fsdplaunch.run_dir import note_start
from fsdplaunch.runtime.patch import (
    ABANDON_GROUP,
    FINISH_MEASUREMENT,
    FINISH_RECORD,
    FINISH_SAVES,
    PRINT_SHARDED,
    PROCESSES_END,
    RANK0_SAVES_END,
    REPORT_END,
    THREADS_END,
    before_first_step,
    before_import,
    call_if_imported,
    once_imported,
)
from fsdplaunch.runtime.rank import begin_record, hide_ranks, rank, world_size
from fsdplaunch.runtime.script import ScriptTarget, conclude, parse_target, run_target
from fsdplaunch.runtime.torch_error_notes import explaining_mixtures
from fsdplaunch.step_record import StepWriter


def main(argv: list[str]) -> None:
    """Run one worker from its command line, `[-m] SCRIPT_OR_MODULE [ARGS...]`, to its end.

    Raises:
        SystemExit: The script failed (1), was interrupted (130), or exited with its own status.
    """
    note_start("fork")
    die_with_parent(signal.SIGKILL)
    faulthandler.enable()
    try:
        config = decode()
        _work(config, parse_target(argv))
    except BaseException as failure:
        call_if_imported(PRINT_SHARDED)
        call_if_imported(ABANDON_GROUP)
        status = conclude(failure)
        flush_both()
        sys.exit(status)


_ENDS = (
    PRINT_SHARDED,
    PROCESSES_END,
    FINISH_RECORD,
    FINISH_MEASUREMENT,
    THREADS_END,
    FINISH_SAVES,  # a run whose last save failed has failed
    REPORT_END,
    RANK0_SAVES_END,
)
"""What is called at the end of the script, in this order, where something has imported it."""


def _work(config: Config, target: ScriptTarget) -> None:
    script = os.path.basename(target.name)  # noqa: PTH119  (a module's name has no path)
    if uses_xla(config):
        feature(XLA).set_up_xla(config, script)
    elif config.distributed_type == "FSDP":
        _set_up(config, script)
    else:
        _set_up_replicas(config)
    _begin_record(config)
    if config.launch.hide_ranks:
        from fsdplaunch.runtime.device import hide_group

        hide_ranks()
        hide_group()
    _take_steps()
    note_start("hooks")
    try:
        with explaining_mixtures():
            run_target(target)
            if uses_xla(config):
                feature(XLA).call_untrained(config.main_training_function)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    for end in _ENDS:
        call_if_imported(end)
    if shards_models(config) and config.launch.shard != "off":
        from fsdplaunch.runtime.sharding_watch import check_sharded

        check_sharded(script)


def _begin_record(config: Config) -> None:
    record = begin_record()
    if record is not None:
        once_imported("torch", partial(_measure, record, config))  # importing it is the script's business


def _measure(record: StepWriter, config: Config, _torch: Any) -> None:
    from fsdplaunch.runtime.measuring import measure

    measure(record, config)


def _take_steps() -> None:
    """End the script after some steps, if that is asked for: to measure, to compare, or to try a checkpoint."""
    steps = os.environ.get(REHEARSAL_STEPS)
    if steps and os.environ.get(COMPARE_DIR):
        feature(COMPARISON_WORKER).record(int(steps))
    elif steps:
        from fsdplaunch.runtime.check_run import save_and_load, stop_after

        stop_after(int(steps), save_and_load)
    elif steps := os.environ.get(MEASURE_STEPS):
        feature(TUNE_WORKER).measure(int(steps))


def _set_up_replicas(config: Config) -> None:
    """Prepare for a script that distributes itself: its set-up is its own, as under torchrun."""
    from fsdplaunch.runtime.collectives.gloo import keep_gloo_quiet, wait_for_gloo_at_exit

    def keep_accelerate_on_cpu() -> None:
        from fsdplaunch.runtime.compat.accelerate import keep_accelerate_on_cpu

        keep_accelerate_on_cpu()

    wait_for_gloo_at_exit()
    if os.environ.get(DEVICE) == "cuda":
        from fsdplaunch.runtime.device import require_gpus

        require_gpus()
    if config.use_cpu and config.distributed_type != "NO":
        before_import("accelerate", keep_accelerate_on_cpu)
    keep_gloo_quiet()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get(ALLOW_UNSHARDED) != "1":
        once_imported("torch.optim.optimizer", lambda optimizers: before_first_step(optimizers, _check_group))


def _check_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return
    from fsdplaunch.runtime.messages import script_line

    workers = os.environ.get("WORLD_SIZE")
    msg = (
        f"{script_line()} trains alone: each of the {workers} workers has a model of its own, in no process group"
    )
    hint = (
        "set distributed_type to FSDP to have it sharded, or num_processes to 1, or launch with --allow-unsharded"
    )
    raise ShardingError(msg, hint=hint)


def _set_up(config: Config, script: str) -> None:
    from fsdplaunch.runtime.compat import adapt_libraries
    from fsdplaunch.runtime.device import choose_device, join_group, see_own_gpu
    from fsdplaunch.runtime.sharding_watch import check_at_first_step, watch_libraries, watch_sharding
    from fsdplaunch.runtime.torch_internals.fsdp import gather_outside_of_inference_mode

    note_start("imports")
    automatic = config.launch.shard in ("auto", "always")
    if automatic and config.launch.hide_ranks:
        see_own_gpu()
    device = choose_device(config)
    join_group(config, device)
    note_start("group")
    watch_sharding()
    watch_libraries()
    gather_outside_of_inference_mode()
    if config.launch.shard != "off":
        check_at_first_step(script)
    adapt_libraries(config, on_cpu=device.type == "cpu")
    if automatic:
        # Shard what the script does not; until the process ends, for exit handlers may save.
        from torch.optim import optimizer

        from fsdplaunch.runtime.auto import HookContext
        from fsdplaunch.runtime.auto.install import hooks
        from fsdplaunch.runtime.auto.rank0.passes import serve_models_of_others
        from fsdplaunch.runtime.inspection.describe import print_waiting, wait_for_others

        hook_context = HookContext(config, device, rank=rank(), size=world_size())
        _installed.enter_context(hooks(hook_context))
        wait_for_others()
        before_first_step(optimizer, print_waiting)
        serve_models_of_others(hook_context)


_installed = ExitStack()


if __name__ == "__main__":
    # Called through the imported module: this one, the interpreter's first `__main__`, is replaced by the script.
    from fsdplaunch.runtime.bootstrap import main as run_worker

    run_worker(sys.argv[1:])
