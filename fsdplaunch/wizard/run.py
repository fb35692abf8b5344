"""The way in: facts and answers -> the text of a file, asked for or not. The caller writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.keys import Path, build_config
from fsdplaunch.config.layers import file_layer, flag_layer
from fsdplaunch.config.load import read_file
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render
from fsdplaunch.config.schema import Config
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.cluster import describe_cluster
from fsdplaunch.probe.hardware import describe_hardware
from fsdplaunch.wizard.question import Situation
from fsdplaunch.wizard.questions import answer_all, compose, find_problems, given_questions
from fsdplaunch.wizard.review import repeat_command
from fsdplaunch.wizard.session import Session, Talk
from fsdplaunch.wizard.suggest import Facts
