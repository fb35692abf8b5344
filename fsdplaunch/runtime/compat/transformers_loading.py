"""Have transformers load pretrained weights on some ranks only."""

import os


def load_on_first_ranks_only(on: bool) -> None:
    """Set whether transformers loads pretrained weights on each node's first rank only.

    `from_pretrained` reads this from the environment and takes it no other way. This package reads the same
    variable, so both do the same.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true" if on else "false"
