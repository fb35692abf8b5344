"""Parameters have the names that the user wrote, by whatever method their class lists them."""

from collections.abc import Iterator

from torch import nn

from fsdplaunch.runtime.inspection import named_parameters


class Short(nn.Module):
    """Leaves out one parameter, by a method that takes fewer arguments than torch's, as torchrl's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.target = nn.Linear(2, 2), nn.Linear(2, 2)
        self.tied = self.own

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        named = super().named_parameters(prefix=prefix, recurse=recurse)
        yield from ((name, param) for name, param in named if not name.startswith("target"))


def test_a_method_with_fewer_arguments_is_asked_for_what_it_can_tell() -> None:
    assert [name for name, _ in named_parameters(Short())] == ["own.weight", "own.bias"]
    assert "tied.weight" in dict(named_parameters(Short(), remove_duplicate=False))
