"""Whole conversations with the wizard, in process: keys go in through a pipe, everything drawn is looked at."""

import io
import re
import selectors
import sys
import threading
import time
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from fsdplaunch.wizard.conversation import Conversation, Prompts
from fsdplaunch.wizard.questions import QUESTIONS
from fsdplaunch.wizard.run import run_wizard
from fsdplaunch.wizard.state import WizardState
from tests.unit.wizard.conftest import MACHINES

pytestmark = pytest.mark.timeout(30)

ENTER, UP, DOWN, BACK = "\r", "\x1b[A", "\x1b[B", "\x02"
CTRL_C, CTRL_D, CLEAR = "\x03", "\x04", "\x15"

EIGHT = MACHINES["eight_h100"]


class Talked:
    """A conversation that has ended: its result or the exception, what was drawn and what was said."""

    def __init__(self, result, drawn, words):
        self.result = result
        plain = re.sub(r"\x1b\[[0-9;?]*m", "", drawn)
        self.drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", plain)
        self.words = words
        self.said = "\n".join(words)


def talk(*keys, facts=EIGHT, columns=100, answers=None, path="fsdp.yaml", settings=None, overwrite=False):
    """Hold a conversation; each text after the first is typed when the screen has come to rest."""
    drawn, words = io.StringIO(), []
    output = Vt100_Output(drawn, lambda: Size(rows=60, columns=columns))
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=output):
        keyboard.send_text(keys[0])
        reader = threading.get_ident()
        typist = threading.Thread(target=type_when_at_rest, args=(keyboard, keys[1:], drawn, reader), daemon=True)
        typist.start()
        dialogue = Conversation(
            state=WizardState(facts=facts, settings=settings or {}),
            given=answers or {},
            path=Path(path),
            overwrite=overwrite,
            say=words.append,
            prompts=Prompts(output),
        )
        try:
            result = dialogue.run()
        except KeyboardInterrupt as left:
            result = left
        typist.join()
    return Talked(result, drawn.getvalue(), words)


def type_when_at_rest(keyboard, texts, drawn, reader):
    for text in texts:
        before, quiet = -1, 0
        while quiet < 5:
            time.sleep(0.03)
            now = drawn.tell()
            quiet = quiet + 1 if now == before > 0 and waits_for_input(reader) else 0
            before = now
        keyboard.send_text(text)


def waits_for_input(thread):
    """Whether a thread waits for keys: on a busy machine a screen may stand still because nothing computes."""
    frame = sys._current_frames().get(thread)
    return frame is None or frame.f_code.co_filename == selectors.__file__


def test_wizard_enter_through_everything_is_what_yes_writes():
    talked = talk(ENTER * 9)
    unasked = run_wizard(facts=EIGHT, say=pytest.fail, interactive=False, yes=True)
    assert talked.result.text == unasked.text
    assert talked.result.command == unasked.command
    assert list(Path().iterdir()) == []
    assert "fsdp.yaml (new)" in talked.said
    assert all(line in talked.said for line in talked.result.text.splitlines())


def test_wizard_tpus_are_asked_about_no_workers():
    talked = talk(DOWN * 4 + ENTER + ENTER * 7)
    assert "How many workers" not in talked.drawn
    assert "--where tpu --goal balanced" in talked.result.command


def test_wizard_going_back_over_a_condition_drops_the_stale_answers():
    """Several nodes, their address, a replica per node; then back to the first question: this machine."""
    several = DOWN + ENTER + CLEAR + "3" + ENTER + CLEAR + "n1:29400" + ENTER + ENTER + ENTER
    hybrid = DOWN + DOWN + ENTER
    talked = talk(several + hybrid + BACK * 6 + UP + ENTER + ENTER * 8)
    config = talked.result.config
    assert (config.num_machines, config.main_process_ip, config.num_processes) == (1, None, 8)
    assert config.fsdp_config.fsdp_sharding_strategy == "FULL_SHARD"
    assert config.parallelism_config.parallelism_config_dp_replicate_size in (None, 1)
    assert {"nodes", "rendezvous"}.isdisjoint(talked.result.answers)
    assert "n1" not in talked.said


@pytest.mark.parametrize("answered", [0, 4, 7])
def test_wizard_ctrl_c_at_any_question_interrupts_and_writes_nothing(answered):
    talked = talk(ENTER * answered + CTRL_C)
    assert isinstance(talked.result, KeyboardInterrupt)
    assert talked.words[-1] == "Nothing was written."
    assert list(Path().iterdir()) == []


def test_wizard_bad_line_is_refused_under_the_prompt_and_asked_again():
    talked = talk(ENTER + CLEAR + "9" + ENTER, CLEAR + "5" + ENTER + ENTER * 7)
    assert "this machine has 8 visible GPUs, got 9" in talked.drawn
    assert talked.result.config.num_processes == 5


def test_wizard_line_against_a_rule_is_refused_under_the_prompt():
    """GPU ids that were set by key allow two workers."""
    settings = {("gpu_ids",): "0,1"}
    talked = talk(ENTER + CLEAR + "4" + ENTER, CLEAR + "2" + ENTER + ENTER * 7, settings=settings)
    assert "2 GPUs cannot serve 4 workers" in talked.drawn
    assert talked.result.config.num_processes == 2


def test_wizard_question_mark_explains_with_the_schemas_words_and_asks_again():
    talked = talk("?" + ENTER + "" + CLEAR + "?" + ENTER + ENTER * 8)
    assert "Run on CPU with gloo even where there are GPUs" in talked.said
    assert "--where here|machines|slurm|cpu" in talked.said
    assert "launch.workers_per_node: Worker processes per node" in talked.said
    assert talked.result.config.num_processes == 8


def test_wizard_model_size_puts_memory_beside_each_choice_and_an_estimate_at_the_end():
    talked = talk(ENTER * 2 + "8b" + ENTER, ENTER * 6)
    balanced, fastest = re.search(r"([\d.]+) of 80 GiB per GPU", talked.drawn), None
    fastest = re.search(r"gathered once per step - ([\d.]+) of 80 GiB per GPU", talked.drawn)
    assert float(balanced[1]) < float(fastest[1]) < 80
    assert (
        f"Estimate: {balanced[1]} of 80 GiB per GPU, before activations; fsdplaunch estimate 8b says more."
        in talked.said
    )
    assert re.search(r"[78][.\d]* B parameters, \d+ blocks \(a llama of 8b\)", talked.said)


def test_wizard_class_names_can_be_typed():
    keys = ENTER * 5 + DOWN + ENTER + "GPT2Block,Other" + ENTER + ENTER * 3
    assert talk(keys).result.config.fsdp_config.fsdp_transformer_layer_cls_to_wrap == ("GPT2Block", "Other")


def test_wizard_further_keys_are_explained_checked_and_set():
    """A wrong value stays on its line; a key alone is explained; empty is the end."""
    more = "fsdp_state_dict_type" + ENTER + "max_restarts=x" + ENTER
    talked = talk(ENTER * 6 + more, CLEAR + "max_restarts=3" + ENTER + "state_dict_type=1" + ENTER * 3)
    assert "fsdp_config.fsdp_state_dict_type: How checkpoints store the model" in " ".join(talked.said.split())
    assert "launch.max_restarts: must be a whole number, at least 0, got x" in talked.drawn
    assert talked.result.config.launch.max_restarts == 3
    assert talked.result.config.fsdp_config.fsdp_state_dict_type == "FULL_STATE_DICT"
    assert "--set=launch.max_restarts=3" in talked.result.command


def test_wizard_review_changes_one_answer_and_asks_nothing_else():
    change = DOWN + ENTER + DOWN * 4 + ENTER
    talked = talk(ENTER * 7 + change + DOWN + ENTER + ENTER)
    assert talked.result.config.mixed_precision == "fp16"
    assert talked.result.config.num_processes == 8


def test_wizard_review_changing_the_place_asks_what_it_brings_up():
    change = DOWN + ENTER + ENTER + DOWN + ENTER
    talked = talk(ENTER * 7 + change + ENTER + CLEAR + "n1" + ENTER + ENTER)
    config = talked.result.config
    assert (config.num_machines, config.num_processes, config.main_process_ip) == (2, 16, "n1")


def test_wizard_option_that_the_answers_leave_no_meaning_is_said_and_the_rest_goes_on():
    talked = talk(ENTER * 9, answers={"goal": "hybrid"})
    assert "--goal must be one of balanced, fastest, biggest" in talked.said
    assert talked.result.answers["goal"] == "balanced"


def test_wizard_sixty_columns_keep_every_line_whole():
    talked = talk(ENTER * 2 + "8b" + ENTER, ENTER * 6, columns=60)
    lines = [line for line in talked.drawn.splitlines() if re.match(r" {1,3}[ \u00bb] \S", line)]
    goals = {line.strip(" \u00bb") for line in lines if re.search("Balanced|Fastest|Biggest", line)}
    assert goals == {
        "Balanced: everything is sharded (suggested)",
        "Fastest: gathered once per step",
        "Biggest model: host memory helps",
    }
    assert re.search(r"Description: [\d.]+ of 80 GiB per GPU\. FULL_SHARD:", talked.drawn)
    assert max(map(len, talked.said.splitlines())) <= 60


def test_wizard_sixty_columns_show_all_of_a_problem_and_what_was_chosen():
    typed = ENTER * 2 + "8b" + ENTER + DOWN * 2 + ENTER + ENTER * 2 + "no_such_key=1" + ENTER
    drawn = " ".join(talk(typed, CLEAR + ENTER * 2, columns=60).drawn.split())
    assert "no_such_key: is not a key: fsdplaunch config explain lists every key" in drawn
    assert "? What is sharded? Biggest model: host memory helps ?" in drawn


EXISTING = """\
# our cluster
distributed_type: FSDP
num_processes: 4        # half of it
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_forward_prefetch: true
"""


def test_wizard_existing_file_edit_keeps_its_values_and_comments():
    Path("fsdp.yaml").write_text(EXISTING)
    talked = talk(ENTER + ENTER + CLEAR + "6" + ENTER + ENTER * 7)
    assert talked.result.text == EXISTING.replace("num_processes: 4 ", "num_processes: 6 ")
    assert "-num_processes: 4        # half of it" in talked.said
    assert "+num_processes: 6        # half of it" in talked.said
    assert Path("fsdp.yaml").read_text() == EXISTING


def test_wizard_existing_file_with_something_no_answer_says_can_be_kept():
    text = EXISTING.replace("fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: 2")
    Path("fsdp.yaml").write_text(text)
    talked = talk(ENTER * 10)
    assert talked.result.text == text
    assert "As the file says" in talked.drawn


def test_wizard_existing_file_start_over_shows_the_difference():
    Path("fsdp.yaml").write_text(EXISTING)
    talked = talk(DOWN + ENTER + ENTER * 9)
    assert talked.result.config.num_processes == 8
    assert "-num_processes: 4        # half of it" in talked.said
    assert talked.result.command.endswith("--overwrite --yes")


def test_wizard_existing_file_that_is_broken_cannot_be_edited():
    Path("fsdp.yaml").write_text("num_proceses: 4\n")
    talked = talk(ENTER + ENTER * 9)
    assert "num_proceses" in talked.said
    assert "it cannot be read" in talked.drawn
    assert talked.result.config.num_processes == 8


COPIES = EXISTING + "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"


def test_wizard_answer_against_an_earlier_one_is_refused_when_it_is_given():
    """The file's mesh of two copies does not fit three workers; splitting over all of them does."""
    Path("fsdp.yaml").write_text(COPIES)
    talked = talk(ENTER * 2 + CLEAR + "3" + ENTER * 2 + ENTER + DOWN + ENTER + ENTER * 5)
    assert "a mesh of 2 does not fit 3 workers" in talked.said
    assert talked.result.answers["goal"] == "balanced"
    assert talked.result.config.num_processes == 3


def test_wizard_review_of_a_contradiction_cannot_be_written_until_changed():
    Path("fsdp.yaml").write_text(COPIES)
    change = DOWN + ENTER
    talked = talk(
        ENTER * 8 + DOWN + ENTER + change + CLEAR + "3" + ENTER, ENTER + change + CLEAR + "6" + ENTER * 2
    )
    assert "does not fit 3 workers" in talked.said
    assert "Write fsdp.yaml (1 problem)" in talked.drawn
    assert talked.result.config.num_processes == 6
    assert talked.result.text == COPIES.replace("num_processes: 4 ", "num_processes: 6 ")


def test_config_command_has_one_option_per_question():
    import inspect

    from fsdplaunch.cli.commands import config

    parameters = {name.replace("_", "-") for name in inspect.signature(config).parameters}
    assert {question.name for question in QUESTIONS} <= parameters
