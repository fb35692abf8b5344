"""Which hooks for communication may be left out: those of torch that make it cheaper."""

from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

from fsdplaunch.runtime.auto.ddp import only_compresses


def own(_state: Any, _bucket: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("hook", "compresses"),
    [
        (default_hooks.bf16_compress_hook, True),
        (powerSGD_hook.powerSGD_hook, True),
        (post_localSGD_hook.post_localSGD_hook, False),
        (own, False),
        (default_hooks.bf16_compress_wrapper(own), False),
    ],
)
def test_hooks_that_only_compress_are_told_from_others(hook: Any, compresses: bool) -> None:
    assert only_compresses(hook) is compresses
