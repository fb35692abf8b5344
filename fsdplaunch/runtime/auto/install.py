"""Install all hooks of one worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fsdplaunch.runtime.auto.arithmetic import computing_whole
from fsdplaunch.runtime.auto.assignments import assigning_shards
from fsdplaunch.runtime.auto.births import recording
from fsdplaunch.runtime.auto.buffers import aligning_buffers
from fsdplaunch.runtime.auto.data import dividing_loaders
from fsdplaunch.runtime.auto.draws import drawing_whole
from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.moves import keeping_hooks
from fsdplaunch.runtime.auto.norms import clipping_whole
from fsdplaunch.runtime.auto.randomness import drawing_alike_in_evaluation, seeding_by_rank
from fsdplaunch.runtime.auto.readings import reading_whole
from fsdplaunch.runtime.auto.regroup import training_shards
from fsdplaunch.runtime.auto.restoring import loading_whole
from fsdplaunch.runtime.auto.saving import saving_whole
from fsdplaunch.runtime.auto.trigger import building_in_host_memory, sharding_on_compile, sharding_on_move
from fsdplaunch.runtime.auto.updates import updating_shards


@contextmanager
def hooks(job: Job) -> Iterator[Job]:
    """Install the hooks of one worker, and take them away at the end."""
    contexts = (
        recording(job.births),
        sharding_on_move(job),
        sharding_on_compile(job),
        building_in_host_memory(job),
        keeping_hooks(job),
        training_shards(job),
        dividing_loaders(job),
        aligning_buffers(job),
        seeding_by_rank(job.streams),
        drawing_alike_in_evaluation(job.streams, job.models),
        drawing_whole(job),
        clipping_whole(job),
        reading_whole(job),
        computing_whole(job),
        updating_shards(job),
        assigning_shards(job),
        saving_whole(job),
        loading_whole(job),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield job
