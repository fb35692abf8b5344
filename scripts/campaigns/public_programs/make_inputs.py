"""Make tiny models and data in a folder: a tokenizer, a Llama, a BERT, texts, labels, images, digits.

And stand-ins for what scripts would fetch: metrics, GLUE's MRPC, the tokenizer of GPT-2, token files of llm.c.
"""

import array
import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = [f"word{number}" for number in range(60)]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]

os.chdir(sys.argv[1])
random.seed(0)
vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
)
size = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
llama = LlamaConfig(**size, max_position_embeddings=128, pad_token_id=3, bos_token_id=1, eos_token_id=2)
LlamaForCausalLM(llama).save_pretrained("model")
bert = BertConfig(**size, max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BertForSequenceClassification(bert).save_pretrained("bert")
for folder in ("model", "bert"):
    tokenizer.save_pretrained(folder)

Path("texts").mkdir()
texts = [" ".join(random.choices(WORDS, k=24)) for _ in range(64)]
for split in ("train", "test"):
    Path(f"texts/{split}.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
labels = [{"sentence1": text, "label": number % 2} for number, text in enumerate(texts)]
Path("labels.json").write_text("".join(json.dumps(row) + "\n" for row in labels))
Path("corpus").mkdir()
for name in ("train", "valid", "test"):
    Path(f"corpus/{name}.txt").write_text("\n".join(texts))
for raw in (Path("data/MNIST/raw"), Path("../data/MNIST/raw")):  # where torchvision looks before it downloads
    raw.mkdir(parents=True, exist_ok=True)
    for kind, rows in (("train", 128), ("t10k", 64)):
        digits, pixels = bytes(number % 10 for number in range(rows)), random.randbytes(rows * 28 * 28)
        (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, rows, 28, 28) + pixels)
        (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, rows) + digits)
for split in ("train", "validation"):
    for kind in ("cat", "dog"):
        folder = Path("images", split, kind)
        folder.mkdir(parents=True)
        for number in range(16):
            Image.frombytes("RGB", (32, 32), random.randbytes(32 * 32 * 3)).save(folder / f"{number}.png")

rows = [{**row, "sentence2": row["sentence1"], "idx": number} for number, row in enumerate(labels)]
glue = Path("nyu-mll/glue")
glue.mkdir(parents=True)
for split in ("train", "validation"):
    (glue / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
splits = "".join(f"  - split: {split}\n    path: {split}.json\n" for split in ("train", "validation"))
(glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n")
BertForSequenceClassification.from_pretrained("bert").save_pretrained("bert-base-cased")
tokenizer.save_pretrained("bert-base-cased")
METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        columns = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=columns)

    def _compute(self, predictions, references):
        right = sum(one == other for one, other in zip(predictions, references))
        return {"accuracy": right / len(predictions), "f1": 0.0}
"""
for name in ("accuracy", "glue"):
    Path(name).mkdir()
    Path(name, f"{name}.py").write_text(METRIC)

Path("preferences").mkdir()
chosen = [{"prompt": text[:30], "chosen": text[30:60], "rejected": text[60:90]} for text in texts]
Path("preferences/train.json").write_text("".join(json.dumps(row) + "\n" for row in chosen))
Path("instructions").mkdir()
told = [{"instruction": text[:40], "output": text[40:80]} for text in texts]
Path("instructions/train.json").write_text("".join(json.dumps(row) + "\n" for row in told))
Path("input.txt").write_text("O God, O God! The quick brown fox. " * 20)
letters = ["".join(random.choices("abcdefghij", k=random.randint(3, 9))) for _ in range(400)]
Path("names.txt").write_text("\n".join(letters))
tokens = array.array("H", [random.randrange(50257) for _ in range(20000)])
header = array.array("i", [20240520, 1, len(tokens)] + [0] * 253)
Path("tokens.bin").write_bytes(header.tobytes() + tokens.tobytes())
factory = {"instruction": "word1 word2", "input": "", "output": "word3 word4"}
recipe = "per_device_train_batch_size: 4\nlearning_rate: 1.0e-3\nmax_steps: 4\nsave_steps: 4\nuse_cpu: true\n"
Path("factory").mkdir()
Path("factory/tiny.json").write_text(json.dumps([{**factory, "output": text[:40]} for text in texts]))
Path("factory/dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
Path("factory.yaml").write_text(
    "model_name_or_path: model\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset: tiny\n"
    f"template: default\ndataset_dir: factory\ncutoff_len: 64\noutput_dir: out-factory\nreport_to: none\n{recipe}"
)
Path("dialogues").mkdir()
for split in ("train", "test"):
    turns = [
        [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:80]}] for text in texts
    ]
    lines = [json.dumps({"messages": each}) + "\n" for each in turns]
    Path(f"dialogues/{split}.json").write_text("".join(lines))
Path("handbook.yaml").write_text(
    "model_name_or_path: model\ndtype: float32\ndataset_name: dialogues\nbf16: false\nmax_length: 64\n"
    "report_to: none\n"
    "chat_template: \"{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}\"\n"
    f"gradient_checkpointing: true\ngradient_checkpointing_kwargs: {{use_reentrant: false}}\n{recipe}"
    "output_dir: out-handbook\n"
)
BertModel(bert).save_pretrained("encoder")
tokenizer.save_pretrained("encoder")
voc = Path("voc/VOCdevkit/VOC2012")
for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
    (voc / name).mkdir(parents=True)
for number in range(8):
    picture, classes = random.randbytes(64 * 64 * 3), bytes(random.randrange(21) for _ in range(64 * 64))
    Image.frombytes("RGB", (64, 64), picture).save(voc / f"JPEGImages/{number}.jpg")
    Image.frombytes("P", (64, 64), classes).save(voc / f"SegmentationClass/{number}.png")
for split in ("train", "val"):
    (voc / f"ImageSets/Segmentation/{split}.txt").write_text("\n".join(map(str, range(8))))
if importlib.util.find_spec("diffusers"):
    subprocess.run([sys.executable, str(Path(__file__).with_name("make_diffusion.py"))], check=True)
Path("modules").mkdir()
Path("modules/torchaudio.py").write_text("")  # LLaMA-Factory imports it, for sounds
GPT2 = """
class _Encoding:
    max_token_value = eot_token = 50256

    def decode_bytes(self, tokens):
        return b"x" * len(tokens)

    def decode(self, tokens):
        return "x" * len(tokens)


def get_encoding(name):
    return _Encoding()
"""
Path("modules/tiktoken.py").write_text(GPT2)
