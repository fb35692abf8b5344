"""The questions in their order, and the options that answer them."""

from collections.abc import Mapping
from dataclasses import replace

from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.questions.nodes import NODES, RENDEZVOUS, WHERE, WORKERS
from fsdplaunch.wizard.questions.question import Question
from fsdplaunch.wizard.questions.sharding_goal import GOAL
from fsdplaunch.wizard.questions.tpus import XLA, XLA_GRAD_CKPT, XLA_SETTINGS
from fsdplaunch.wizard.questions.training import CHECKPOINTS, MODEL, PRECISION, WRAP
from fsdplaunch.wizard.state import WizardState

_PLACE = (WHERE, NODES, RENDEZVOUS, WORKERS, XLA, XLA_GRAD_CKPT, XLA_SETTINGS)
QUESTIONS = (*_PLACE, MODEL, GOAL, PRECISION, WRAP, CHECKPOINTS)
"""Everything that may be asked, besides one for all further keys."""


def earlier(question: Question, state: WizardState) -> WizardState:
    """Return the state with the answers that come before a question, which is all it may depend on.

    Args:
        question: One of QUESTIONS.
        state: With any answers.
    """
    names = {one.name for one in QUESTIONS[: QUESTIONS.index(question)]}
    return replace(state, answers={name: text for name, text in state.answers.items() if name in names})


def check_names(given: Mapping[str, str]) -> None:
    """Refuse answers to questions that do not exist.

    Args:
        given: Answers by question name.

    Raises:
        UsageError: A name is no question's.
    """
    names = [question.name for question in QUESTIONS]
    for name in given:
        if name not in names:
            msg = f"{name} is not a question of the wizard"
            raise UsageError(msg, hint=f"its questions are {', '.join(names)}")
