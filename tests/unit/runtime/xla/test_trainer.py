"""What transformers' training arguments get of a configuration for PyTorch/XLA; nothing here has torch_xla."""

from types import SimpleNamespace

import pytest

from fsdplaunch.config.load import stack
from fsdplaunch.config.yaml_text import read_text
from fsdplaunch.runtime.xla.wrappers import configure_trainer, trainer_arguments


def arguments(text):
    return trainer_arguments(stack(read_text(text, "x")).config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{xla: true}", {}),
        ("{xla: true, xla_v2: true, xla_fsdp_grad_ckpt: true}", {"xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True}),
        ("{xla: true, fsdp_activation_checkpointing: true}", {"xla_fsdp_grad_ckpt": True}),
        (
            "{xla: true, xla_fsdp_settings: {flatten_parameters: yes}}",
            {"xla_fsdp_settings": {"flatten_parameters": True}},
        ),
        ("{xla: true, transformer_layer_cls_to_wrap: 'A,B'}", {"transformer_layer_cls_to_wrap": ["A", "B"]}),
        ("{xla: true, auto_wrap_policy: NO_WRAP}", {"transformer_layer_cls_to_wrap": []}),
        ("{xla: true, auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: 9}", {"min_num_params": 9}),
    ],
)
def test_arguments_are_those_of_the_file(text, expected):
    nothing = {"xla": True, "xla_fsdp_v2": False, "xla_fsdp_settings": {}, "xla_fsdp_grad_ckpt": False}
    assert arguments(f"fsdp_config: {text}\n") == nothing | expected


def test_precision_becomes_settings_unless_they_say_it():
    low = arguments("mixed_precision: bf16\nfsdp_config: {xla: true}\n")["xla_fsdp_settings"]
    assert low == {"compute_dtype": "bfloat16", "fp32_reduce_scatter": True}
    own = "mixed_precision: bf16\nfsdp_config: {xla: true, xla_fsdp_settings: {compute_dtype: fp16}}\n"
    assert arguments(own)["xla_fsdp_settings"]["compute_dtype"] == "float16"


class TrainingArguments:
    """As transformers' dataclass: filled, then finished."""

    def __init__(self, fsdp="", fsdp_config=None, optim="adamw_torch_fused"):
        self.fsdp, self.fsdp_config, self.optim = fsdp, fsdp_config, optim
        self.__post_init__()

    def __post_init__(self):
        self.finished = (self.fsdp, self.fsdp_config)


def test_empty_arguments_are_filled_and_the_scripts_own_stay(monkeypatch, capsys):
    module = SimpleNamespace(TrainingArguments=type("Arguments", (TrainingArguments,), {}))
    monkeypatch.setitem(__import__("sys").modules, "transformers.training_args", module)
    config = stack(read_text("fsdp_config: {xla: true, xla_v2: true}\n", "x")).config
    configure_trainer(config)
    filled = module.TrainingArguments()
    assert filled.finished == ("full_shard auto_wrap", trainer_arguments(config))
    assert filled.optim == "adamw_torch"
    own = module.TrainingArguments("full_shard", {"xla": True}, "adafactor")
    assert (own.finished, own.optim) == (("full_shard", {"xla": True}), "adafactor")
    said = capsys.readouterr().err
    assert said.count("fsdp and fsdp_config are the configuration's") == 1
