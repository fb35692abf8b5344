"""What a row trains: KIND [--lora] --out FOLDER [--steps N] [--each ROWS] [--resume FOLDER].

KIND is trainer, sft, dpo or accelerator; `--each` is how many rows a worker takes for a step. A checkpoint is
saved after two steps, and at the end rank 0 writes what trains, as whole tensors, to FOLDER/weights.pt.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
LENGTH, ROWS = 12, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["trainer", "sft", "dpo", "accelerator"])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume")
    parser.add_argument("--each", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if given.kind == "accelerator":
        loop(model, given)
    else:
        train(model, given)


def tokens() -> torch.Tensor:
    """Shape `(ROWS, LENGTH)`, int64, the same in every process."""
    return torch.randint(1, SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def with_adapters(model, given):
    if not given.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**LORA))


def train(model, given) -> None:
    options = {
        "output_dir": given.out, "per_device_train_batch_size": given.each,
        "max_steps": given.steps, "save_steps": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": [], "disable_tqdm": True,
        "logging_steps": 1, "use_cpu": not torch.cuda.is_available(), "bf16": False,
    }  # fmt: skip
    if given.kind == "trainer":
        rows = [{"input_ids": row, "labels": row} for row in tokens()]
        trainer = Trainer(with_adapters(model, given), TrainingArguments(**options), train_dataset=rows)
    else:
        trainer = of_trl(model, given, options)
    trainer.train(resume_from_checkpoint=given.resume)
    write(trainer.accelerator, trainer.model_wrapped, given.out)


def of_trl(model, given, options):
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    words = {"<pad>": 0, **{f"w{number}": number for number in range(1, SIZES["vocab_size"] - 1)}, "<eos>": 63}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{min(int(each), 62)}" for each in row) for row in tokens()]
    adapters = {"peft_config": LoraConfig(**LORA)} if given.lora else {}
    if given.kind == "sft":
        rows = Dataset.from_dict({"text": texts})
        made = SFTConfig(**options, max_length=LENGTH)
        return SFTTrainer(model, args=made, train_dataset=rows, processing_class=tokenizer, **adapters)
    parts = {"prompt": texts, "chosen": texts[1:] + texts[:1], "rejected": texts[2:] + texts[:2]}
    made = DPOConfig(**options, max_length=2 * LENGTH)
    if not given.lora:  # the model without its adapters otherwise
        adapters = {"ref_model": LlamaForCausalLM(model.config)}
        adapters["ref_model"].load_state_dict(model.state_dict())
    return DPOTrainer(
        model, args=made, train_dataset=Dataset.from_dict(parts), processing_class=tokenizer, **adapters
    )


def loop(model, given) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = with_adapters(model, given)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens()), batch_size=given.each)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin = 0
    if given.resume:
        accelerator.load_state(given.resume)
        begin = int(given.resume.rpartition("-")[2])
    for step, (batch,) in enumerate(loader):
        if step >= given.steps:
            break
        if step >= begin:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                accelerator.save_state(Path(given.out) / "checkpoint-2")
    write(accelerator, model, given.out)


def write(accelerator, model, out) -> None:
    """Gather the parameters that train by torch's own means, whoever sharded them."""
    one = isinstance(model, FullyShardedDataParallel)
    state = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False) if one else nullcontext():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            plain = name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
            state[plain.removeprefix("module.")] = whole.detach().cpu().clone()
    if accelerator.is_main_process:
        Path(out).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(out) / "weights.pt")


if __name__ == "__main__":
    main()
