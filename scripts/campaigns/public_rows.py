"""The rows of `public_scripts`: each script with the arguments that make it small."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).with_name("public_programs")


@dataclass(frozen=True)
class Row:
    """One script.

    Attributes:
        name: In the table.
        target: A module after `-m `, a file of this repository, or `OWNER/NAME:PATH` under --sources.
        arguments: Of the script, apart by spaces.
        keys: Configuration.
        whole: Further arguments, with which it comes to its end within a minute.
        saves: What it has saved by then, as a pattern of files.
        modules: The folder of the clone that its own packages are in.
        needs: A file of the --work folder that is not made here, because the script checks what is in it.
        alone: Whether it runs in one process on a CPU.
    """

    name: str
    target: str
    arguments: str = ""
    keys: tuple[str, ...] = ()
    whole: str = ""
    saves: str = ""
    modules: str = "."
    needs: str = ""
    alone: bool = True


HIDDEN = ("launch.hide_ranks=true",)
TRAINER = " --per_device_train_batch_size 4 --report_to none --use_cpu --output_dir out --save_strategy no"
CLM = f"--model_name_or_path model{TRAINER} --learning_rate 1e-3"
TRL = f"{CLM} --max_length 32 --bf16 False"
SHORT = "--max_steps 6"
PREFERENCES = f"{TRL} --dataset_name preferences"
TIMM = "--data-dir images --model vit_tiny_patch16_224 --img-size 32 --model-kwargs img_size=32 --num-classes 2"
TIMM += " --batch-size 8 --workers 1 --device cpu --epochs 1 --no-aug --opt sgd --lr 1e-3 --output out-timm"
TIMM += " --experiment one"
EPOCHS = "--checkpointing_steps epoch --output_dir out-{}"
MNIST = "--epochs 1 --batch-size 32"
WORDS = (
    "--data corpus --emsize 16 --nhid 16 --nhead 2 --bptt 8 --batch_size 8 --epochs 1 --use-optimizer --lr 1e-3"
)
LLMC = "--input_bin tokens.bin --model d12 --batch_size 4 --sequence_length 16 --total_batch_size 64"
LLMC += " --overfit_single_batch 0 --write_tensors 0"
OLORA = "--base_model model --data_path instructions --output_dir out-lora --batch_size 4 --cutoff_len 64"
OLORA += " --val_set_size 8 --eval_step 4 --save_step 4 --device_map cpu --dtype float32 --lora_dropout 0 --seed 0"
PEFT_SFT = f"{CLM} --dataset_name texts --use_peft_lora True --lora_r 4 --lora_dropout 0"
PEFT_SFT += " --max_length 32 --bf16 False --lora_target_modules q_proj,v_proj"
GLUE = "--model_name_or_path bert --train_file labels.json --validation_file labels.json --output_dir out-glue"
GLUE += " --per_device_train_batch_size 4 --seed 1"
EXAMPLES = {
    "mnist/main.py": (MNIST, "--save-model", "mnist_cnn.pt"),
    "mnist_rnn/main.py": (MNIST, "--save-model", "mnist_rnn.pt"),
    "vae/main.py": (MNIST, "", ""),
    "mnist_forward_forward/main.py": ("--epochs 3 --train_size 32 --test_size 32 --no_accel", "", ""),
    "siamese_network/main.py": ("--epochs 1 --batch-size 8 --test-batch-size 8", "", ""),
    "dcgan/main.py": (
        "--dataset fake --batchSize 8 --ngf 4 --ndf 4 --workers 0 --manualSeed 1 --niter 1",
        "--dry-run",
        "netG_epoch_0.pth",
    ),
    "imagenet/main.py": ("--dummy --arch resnet18 --batch-size 4 --workers 0 --seed 0 --lr 1e-3", "", ""),
    "reinforcement_learning/reinforce.py": ("", "", ""),
    "reinforcement_learning/actor_critic.py": ("", "", ""),
}
SD = "--pretrained_model_name_or_path sd --train_data_dir pictures/train --resolution 16 --train_batch_size 2"
SD += " --seed 1 --lr_warmup_steps 0 --checkpointing_steps 2"
VOC = "--data-path voc --dataset voc --model lraspp_mobilenet_v3_large --device cpu -b 2 --epochs 1 -j 0"
VOC += " --output-dir out-voc"
WORD_MODELS = ("RNN_TANH", "LSTM", "GRU", "Transformer")
NAMED = {"by_feature/fsdp_with_peak_mem_tracking": " --model_name_or_path bert-base-cased"}
HF = "huggingface/transformers:examples/pytorch"
ACCELERATE = "huggingface/accelerate:examples"
_TRAINERS = (
    Row("TRL sft", "-m trl.scripts.sft", f"{TRL} --dataset_name texts", (), SHORT, "out/model.safetensors"),
    Row("TRL dpo", "-m trl.scripts.dpo", PREFERENCES, (), SHORT, "out/model.safetensors"),
    Row("TRL reward", "-m trl.scripts.reward", PREFERENCES, (), SHORT, "out/model.safetensors"),
    Row("TRL kto", "-m trl.scripts.kto", PREFERENCES, (), SHORT, "out/model.safetensors"),
    Row(
        "transformers run_clm",
        f"{HF}/language-modeling/run_clm.py",
        f"{CLM} --train_file texts/train.json --do_train --block_size 32",
        (),
        SHORT,
        "out/model.safetensors",
    ),
    Row(
        "transformers run_clm_no_trainer",
        f"{HF}/language-modeling/run_clm_no_trainer.py",
        "--model_name_or_path model --train_file texts/train.json --validation_file texts/train.json"
        " --block_size 32 --per_device_train_batch_size 4 --output_dir out-clm --seed 1 --num_train_epochs 1",
        (),
        "--checkpointing_steps epoch",
        "out-clm/model.safetensors",
    ),
    Row(
        "transformers run_glue_no_trainer",
        f"{HF}/text-classification/run_glue_no_trainer.py",
        GLUE,
        (),
        "--num_train_epochs 1 --checkpointing_steps epoch",
        "out-glue/model.safetensors",
    ),
    Row(
        "transformers run_glue",
        f"{HF}/text-classification/run_glue.py",
        "--model_name_or_path bert --train_file labels.json --validation_file labels.json --do_train --do_eval"
        f"{TRAINER}",
        (),
        SHORT,
        "out/model.safetensors",
    ),
    *(
        Row(f"accelerate {path}", f"{ACCELERATE}/{path}.py", f"--cpu{NAMED.get(path, '')}", (), whole, saves)
        for path, whole, saves in (
            ("nlp_example", "", ""),
            ("complete_nlp_example", EPOCHS.format("nlp"), "out-nlp/epoch_2/*"),
            (
                "by_feature/checkpointing",
                "--checkpointing_steps epoch --output_dir out-ckpt",
                "out-ckpt/epoch_2/*",
            ),
            ("by_feature/gradient_accumulation", "--gradient_accumulation_steps 2", ""),
            ("by_feature/early_stopping", "", ""),
            ("by_feature/cross_validation", "--num_folds 2", ""),
            ("by_feature/local_sgd", "", ""),
            ("by_feature/ddp_comm_hook", "", ""),
            ("by_feature/automatic_gradient_accumulation", "", ""),
            ("by_feature/memory", "", ""),
            ("by_feature/multi_process_metrics", "", ""),
            ("by_feature/profiler", "", ""),
            ("by_feature/tracking", "", ""),
            (
                "by_feature/fsdp_with_peak_mem_tracking",
                "--checkpointing_steps epoch --output_dir out-peak",
                "out-peak/epoch_2/*",
            ),
        )
    ),
    Row(
        "peft sft", "huggingface/peft:examples/sft/train.py", PEFT_SFT, (), SHORT, "out/adapter_model.safetensors"
    ),
    Row(
        "peft olora",
        "huggingface/peft:examples/olora_finetuning/olora_finetuning.py",
        OLORA,
        (),
        "",
        "out-lora/adapter_model.safetensors",
    ),
)
_BIG = (
    *(
        Row(
            f"diffusers {name}",
            f"huggingface/diffusers:examples/text_to_image/{name}.py",
            f"{SD} --output_dir out-{name}",
            (),
            "--max_train_steps 3",
            f"out-{name}/{saved}",
        )
        for name, saved in (
            ("train_text_to_image", "unet/*.safetensors"),
            ("train_text_to_image_lora", "*.safetensors"),
        )
    ),
    Row(
        "LLaMA-Factory sft",
        "hiyouga/LLaMA-Factory:src/train.py",
        "factory.yaml",
        saves="out-factory/model.safetensors",
        modules="src",
    ),
    Row(
        "alignment-handbook sft",
        "huggingface/alignment-handbook:scripts/sft.py",
        "--config handbook.yaml",
        saves="out-handbook/model.safetensors",
        modules="src",
    ),
    Row(
        "torchvision segmentation",
        "growlix/pytorch-i1k-baseline:references/segmentation/train.py",
        VOC,
        HIDDEN,
        "",
        "out-voc/*.pth",
        modules="references/segmentation",  # the clone's root has a torchvision of its own
    ),
    *(
        Row(
            f"lightning {name}",
            str(OWN / "lightning_plain.py"),
            name,
            saves="out-lightning/final.pt",
            alone=name == "ddp",
        )
        for name in ("ddp", "fsdp")
    ),
    Row("sentence-transformers", str(OWN / "sentence_trainer.py"), saves="out-sentences/model.safetensors"),
)
_PLAIN = (
    *(
        Row(
            f"pytorch/examples {path}",
            f"pytorch/examples:{path}",
            arguments,
            (),
            whole,
            saves,
        )
        for path, (arguments, whole, saves) in EXAMPLES.items()
    ),
    *(
        Row(
            f"pytorch/examples words {kind}",
            "pytorch/examples:word_language_model/main.py",
            f"{WORDS} --model {kind}",
        )
        for kind in WORD_MODELS
    ),
    Row(
        "minGPT adder",
        "karpathy/minGPT:projects/adder/adder.py",
        "--model.model_type=gpt-nano --trainer.num_workers=0 --trainer.batch_size=8",
        (),
        "--trainer.max_iters=500",
        "out/adder/model.pt",
    ),
    Row(
        "minGPT chargpt",
        "karpathy/minGPT:projects/chargpt/chargpt.py",
        "--model.model_type=gpt-nano --trainer.num_workers=0 --trainer.batch_size=8 --data.block_size=16",
        (),
        "--trainer.max_iters=500",
        "out/chargpt/model.pt",
    ),
    Row(
        "makemore",
        "karpathy/makemore:makemore.py",
        "--input-file names.txt --num-workers 0 --work-dir out-makemore",
        (),
        "--max-steps 502",
        "out-makemore/model.pt",
    ),
    Row("ng-video-lecture bigram", "karpathy/ng-video-lecture:bigram.py"),
    *(
        Row(f"cleanrl {name}", f"vwxyzjn/cleanrl:cleanrl/{name}.py", f"--no-cuda {arguments}", (), whole)
        for name, arguments, whole in (
            ("ppo", "--num-envs 4 --num-steps 16", "--total-timesteps 256"),
            ("dqn", "--learning-starts 100", "--total-timesteps 300"),
        )
    ),
    Row("nlp-tutorial BERT", "graykode/nlp-tutorial:5-2.BERT/BERT.py"),
    Row("mixture-of-experts", "davidmrau/mixture-of-experts:example.py"),
    Row(
        "mixture-of-experts CIFAR-10",
        "davidmrau/mixture-of-experts:cifar10_example.py",
        needs="data/cifar-10-batches-py",
    ),
    Row("torchdiffeq ode_demo", "rtqichen/torchdiffeq:examples/ode_demo.py", "--data_size 100"),
    Row("torchdiffeq ode_demo adjoint", "rtqichen/torchdiffeq:examples/ode_demo.py", "--data_size 100 --adjoint"),
    Row(
        "planar_flow",
        "kamenbliznashki/normalizing_flows:planar_flow.py",
        "--train --target_potential u_z1 --flow_length 4",
    ),
    Row("x-transformers train_copy", "lucidrains/x-transformers:train_copy.py"),
    Row("llm.c train_gpt2.py", "karpathy/llm.c:train_gpt2.py", LLMC, HIDDEN, "--num_iterations 2"),
    Row("llm.c train_gpt2.py with RANK", "karpathy/llm.c:train_gpt2.py", LLMC, (), "--num_iterations 2"),
    Row("timm train.py", "huggingface/pytorch-image-models:train.py", TIMM, (), "", "out-timm/one/last.pth.tar"),
    Row(
        "timm train.py alone",
        "huggingface/pytorch-image-models:train.py",
        TIMM,
        HIDDEN,
        "",
        "out-timm/one*/last.pth.tar",
    ),
)
ROWS = (
    *_TRAINERS,
    *_BIG,
    *_PLAIN,
    Row("lightning plain", str(OWN / "lightning_plain.py")),
)
