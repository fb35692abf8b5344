"""What a refusal to shard says."""

import pytest

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.sharding.checks import naming


@pytest.mark.parametrize("kind", [NotImplementedError, TypeError])
def test_refusal_of_torch_names_the_module(kind: type[Exception]):
    with (
        pytest.raises(ShardingError, match=r"torch cannot shard layers\.0: no views") as caught,
        naming("layers.0"),
    ):
        raise kind("no views\nand more")
    assert "fsdp_ignored_modules" in caught.value.hint


def test_error_of_ours_passes_with_its_own_hint():
    with pytest.raises(ShardingError) as caught, naming("layers.0"):
        raise ShardingError("layers.0 has no values", hint="give it some")
    assert (caught.value.message, caught.value.hint) == ("layers.0 has no values", "give it some")
