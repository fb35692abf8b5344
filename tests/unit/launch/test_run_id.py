"""What a run is called when somebody else has started its launchers."""

from pathlib import Path

import pytest

from fsdplaunch.run_dir import GROUP_RUN, has_fixed_name, run_name


@pytest.mark.parametrize(("environ", "above"), [({}, Path()), ({GROUP_RUN: "r1/"}, Path("r1"))])
def test_each_start_gets_a_name_and_a_folder_of_its_own_unless_it_is_given_one(environ, above):
    (name, folder), (other, _) = run_name(environ), run_name(environ)
    assert folder == above / name
    assert name != other
    assert not has_fixed_name(environ)


def test_named_run_has_that_name_and_folder_on_every_machine():
    environ = {GROUP_RUN: "r1/task2/try0"}
    assert run_name(environ) == ("r1-task2-try0", Path("r1/task2/try0"))
    assert has_fixed_name(environ)
