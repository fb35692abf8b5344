"""What a run is called when somebody else has started its launchers."""

from pathlib import Path

from fsdplaunch.run_dir import GROUP_RUN, has_fixed_name, run_name


def test_run_that_nobody_named_gets_a_fresh_name_each_time():
    (name, folder), (other, _) = run_name({}), run_name({})
    assert folder == Path(name)
    assert name != other
    assert not has_fixed_name({})


def test_named_run_has_that_name_and_folder_on_every_machine():
    environ = {GROUP_RUN: "r1/task2/try0"}
    assert run_name(environ) == ("r1-task2-try0", Path("r1/task2/try0"))
    assert has_fixed_name(environ)


def test_every_start_in_a_named_folder_gets_a_folder_of_its_own():
    environ = {GROUP_RUN: "r1/"}
    (name, folder), (other, _) = run_name(environ), run_name(environ)
    assert folder == Path("r1") / name
    assert name != other
    assert not has_fixed_name(environ)
