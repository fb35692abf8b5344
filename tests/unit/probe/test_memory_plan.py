import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.probe.memory_plan import Sharding, plan_memory
from fsdplaunch.probe.model_files import ModelFacts

MODEL = ModelFacts(parameters=1000, unit=100, outside=50, dtypes={"bf16": 1000})


def test_plan_memory_mixed_precision_keeps_fp32_and_gathers_two_bytes():
    plan = plan_memory(MODEL, Sharding(ranks=4, compute="bf16"))
    assert (plan.parameters, plan.gradients, plan.optimizer) == (1000, 1000, 2000)
    assert plan.gathered == (3 * 100 + 50) * 2
    assert plan.gpu == 4700
    assert plan.host == 0


def test_plan_memory_without_mixed_precision_keeps_the_models_format():
    plan = plan_memory(MODEL, Sharding(ranks=2, compute="no"))
    assert (plan.parameters, plan.gradients, plan.optimizer) == (1000, 1000, 2000)
    assert plan.gathered == 350 * 2


def test_plan_memory_unknown_format_is_taken_as_fp32():
    plan = plan_memory(ModelFacts(parameters=1000, unit=100), Sharding(ranks=1))
    assert (plan.parameters, plan.gathered) == (4000, 1200)


def test_plan_memory_keeping_gathered_parameters_holds_the_whole_model():
    plan = plan_memory(MODEL, Sharding(ranks=4, compute="bf16", reshard=False))
    assert plan.gathered == (1000 + 100) * 2


def test_plan_memory_offload_moves_what_is_kept_to_the_host():
    plan = plan_memory(MODEL, Sharding(ranks=4, compute="bf16", offload=True))
    assert (plan.gpu, plan.host) == (700, 4000)


def test_plan_memory_uneven_shards_are_rounded_up():
    assert plan_memory(MODEL, Sharding(ranks=3, compute="bf16")).parameters == 334 * 4


def test_plan_memory_one_unit_never_gathers_more_than_the_model():
    plan = plan_memory(ModelFacts(parameters=1000, unit=1000), Sharding(ranks=2, compute="bf16"))
    assert plan.gathered == 2000


def test_plan_memory_without_a_parameter_count_is_refused():
    with pytest.raises(UsageError, match="number of parameters is not known"):
        plan_memory(ModelFacts(size_bytes=10), Sharding(ranks=2))
