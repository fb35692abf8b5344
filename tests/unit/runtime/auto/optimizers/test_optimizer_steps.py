"""Optimizers step without the handlers of operators that no step needs; in a closure a script computes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.walk import build_config
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.optimizers.optimizer_steps import stepping_without_handlers
from fsdplaunch.runtime.torch_internals.dtensor import operator_handlers, use_operator_handlers


class Own(torch.optim.SGD):
    """What it computes is the script's."""


@pytest.fixture
def seen() -> Iterator[list[set[Any]]]:
    """Give DTensor a table of two handlers; return what is in its table at the end of each step."""
    before, seen = operator_handlers(), []
    use_operator_handlers({"mul": 1, "std": 2})
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(set(operator_handlers())))
    yield seen
    hook.remove()
    use_operator_handlers(before)


def param_with_gradient() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return param


def test_handlers_are_out_of_the_table_in_steps_without_closures(seen: list[set[Any]]) -> None:
    param, wrapped, table = param_with_gradient(), [], operator_handlers()
    with stepping_without_handlers({"mul"}, nobody(), lambda: wrapped.append(True)):
        torch.optim.SGD([param]).step()
        assert operator_handlers() is table
        table["unscale"] = 3  # by another part of the package
        Own([param]).step()
        torch.optim.SGD([param]).step(lambda: 0.0)
    torch.optim.SGD([param]).step()
    assert seen == [{"std"}, {"std", "unscale"}, *[{"mul", "std", "unscale"}] * 2]
    assert not wrapped


def test_what_is_put_into_the_table_in_a_step_stays_and_a_step_that_fails_puts_all_back(
    seen: list[set[Any]],
) -> None:
    param, table = param_with_gradient(), operator_handlers()
    optimizer = torch.optim.SGD([param])
    optimizer.register_step_pre_hook(lambda *_: operator_handlers().update(unscale=3))
    with stepping_without_handlers({"mul"}, nobody(), lambda: None):
        optimizer.step()
        assert operator_handlers() is table
        assert set(table) == {"mul", "std", "unscale"}
        optimizer.register_step_pre_hook(fail)
        with pytest.raises(ValueError, match="no step"):
            optimizer.step()
        assert set(operator_handlers()) == {"std", "unscale"}
    assert operator_handlers() is table
    assert len(seen) == 1


def nobody() -> Ownership:
    """Return the ownership of a script in which nothing is sharded yet."""
    return Ownership(resolve(build_config({})))


def fail(*_: Any) -> None:
    msg = "no step"
    raise ValueError(msg)
