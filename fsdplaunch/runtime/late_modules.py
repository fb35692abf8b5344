"""Functions that matter only where something has imported their module: looked up, never imported."""

import sys
from typing import Any

ABANDON_GROUP = "fsdplaunch.runtime.device.abandon_group"
GROUP_IS_ABANDONED = "fsdplaunch.runtime.device.group_is_abandoned"
PROCESSES_END = "fsdplaunch.runtime.auto.ddp.spawned_ranks.raise_refused"
MISSING_GRADIENTS_NOTE = "fsdplaunch.runtime.compute.local_gradients.missing_gradients_note"
PRINT_SHARDED = "fsdplaunch.runtime.inspection.announce.print_waiting"
REPORT_END = "fsdplaunch.runtime.collectives.hang_detector.report_end"
WEIGHTS_USED = "fsdplaunch.runtime.loading.pretrained.weights_used"
RANK0_SAVES_OPEN = "fsdplaunch.runtime.auto.rank0.service.is_open"
RANK0_SAVES_END = "fsdplaunch.runtime.auto.rank0.service.note_end"
RANK0_SAVES_CLOSE = "fsdplaunch.runtime.auto.rank0.service.close"
WAIT_FOR_COPIES = "fsdplaunch.runtime.saving.background.background_save.wait_for_copies"
THREADS_END = "fsdplaunch.runtime.state_dict.gather.raise_failed"
FINISH_SAVES = "fsdplaunch.runtime.saving.background.background_save.finish_saves"

XLA_TO_SAVE = "fsdplaunch.runtime.xla.saving.to_save"
XLA_READ = "fsdplaunch.runtime.xla.saving.read"
XLA_CLIP = "fsdplaunch.runtime.xla.gradients.clip_norm"
XLA_NO_SYNC = "fsdplaunch.runtime.xla.gradients.unsynchronized"

FINISH_RECORD = "fsdplaunch.runtime.comparison.record_run.finish"
FINISH_MEASUREMENT = "fsdplaunch.runtime.measuring.measure.finish"


def call_if_imported(function: str, *arguments: Any) -> Any:
    """Call the function of this name and return what it does; None while nothing has imported its module."""
    module, _, name = function.rpartition(".")
    return getattr(sys.modules[module], name)(*arguments) if module in sys.modules else None
