"""Models are named alike in each process, in whatever order they are found."""

from torch import nn

from fsdplaunch.comparison.record import NamedModels


def test_models_of_one_size_are_named_in_the_order_in_which_they_are_trained():
    for reverse in (False, True):
        made = [nn.Sequential(nn.Linear(3, 3)) for _ in range(3)]
        trained = made[::-1] if reverse else made
        params = [param for model in trained for param in model.parameters()]
        names = {id(param): name for name, param, _ in NamedModels().named(params)}
        found = [names[id(model[0].weight)] for model in trained]
        assert found == ["0.weight", "Sequential2.0.weight", "Sequential3.0.weight"]
