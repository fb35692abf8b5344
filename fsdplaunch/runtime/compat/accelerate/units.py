"""Let accelerate shard models whose input embeddings are inside of a module that it takes for a block.

transformers names BertEmbeddings beside BertLayer among the modules not to split, so accelerate makes it a unit.
Newer versions make a unit of the input embeddings inside of it too, which torch refuses: 'Invariant encountered:
value was None'.
"""

import functools
from collections.abc import Callable
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.compat.import_hook import once_imported

Policy = Callable[[Any], bool]


def keep_embeddings_out_of_blocks() -> None:
    """Have accelerate's FSDP2 make no unit around the input embeddings, if and when the script imports it."""
    once_imported("accelerate.utils.fsdp_utils", _adapt)


def _adapt(module: Any) -> None:
    prepare = getattr(module, "fsdp2_prepare_auto_wrap_policy", None)
    if prepare is None:  # before FSDP2
        return

    @functools.wraps(prepare)
    def prepare_policy(fsdp2_plugin: Any, model: Any) -> Policy | None:
        policy = prepare(fsdp2_plugin, model)
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        return policy if policy is None or embeddings is None else _without(policy, embeddings)

    module.fsdp2_prepare_auto_wrap_policy = prepare_policy


def _without(policy: Policy, embeddings: Any) -> Policy:
    """Return a policy that wraps nothing which holds these embeddings and is not itself them."""
    named: set[str] = set()

    def wraps(module: Any) -> bool:
        if not policy(module):
            return False
        around = module is not embeddings and any(each is embeddings for each in module.modules())
        name = type(module).__name__
        if around and name not in named:
            named.add(name)
            messages.say(f"accelerate: {name} is no unit, for the input embeddings inside of it are one")
        return not around

    return wraps
