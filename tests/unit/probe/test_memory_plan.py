from dataclasses import replace

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.probe.memory_plan import Sharding, plan_memory
from fsdplaunch.probe.model_files import ModelFacts

MODEL = ModelFacts(parameters=1000, unit=100, outside=50, dtypes={"bf16": 1000})
BF16 = Sharding(ranks=4, compute="bf16")


@pytest.mark.parametrize(
    ("model", "sharding", "gpu", "host"),
    [
        (MODEL, BF16, 4 * 4 * 250 + (3 * 100 + 50) * 2, 0),  # fp32 is kept and two bytes are gathered
        (MODEL, replace(BF16, ranks=3), 4 * 4 * 334 + 700, 0),  # shards are rounded up
        (MODEL, Sharding(ranks=2, compute="no"), 4 * 2 * 500 + 350 * 2, 0),  # the model's own format
        (ModelFacts(parameters=1000, unit=100), Sharding(ranks=1), 16 * 1000 + 1200, 0),  # fp32 where unknown
        (MODEL, replace(BF16, reshard=False), 4000 + (1000 + 100) * 2, 0),  # the whole model stays
        (MODEL, replace(BF16, offload=True), 700, 4000),
        (ModelFacts(parameters=1000, unit=1000), replace(BF16, ranks=2), 8000 + 2000, 0),  # no more than the model
    ],
)
def test_plan_memory(model, sharding, gpu, host):
    plan = plan_memory(model, sharding)
    assert (plan.gpu, plan.host) == (gpu, host)


def test_plan_memory_without_a_parameter_count_is_refused():
    with pytest.raises(UsageError, match="number of parameters is not known"):
        plan_memory(ModelFacts(size_bytes=10), Sharding(ranks=2))
