"""Load merged weights in one plain process: the same evaluation loss, and a sample of text.

    python generate.py OUT [--data FILE ...] [--prompt TEXT] [--length 200]

OUT is the folder that `fsdplaunch merge-weights` wrote. Give the same --data as in training.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from train_lm import CONTEXT, Transformer, evaluate, read_text


@torch.no_grad()
def sample(model: Transformer, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
    """Continue prompt by length bytes, drawing each from the model's distribution."""
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[0, -1]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
        tokens = torch.cat((tokens, drawn[None]), dim=1)
    return bytes(tokens[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with model.safetensors")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="the text files of the training run")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Transformer()
    model.load_state_dict(load_file(args.folder / "model.safetensors"))
    _, evaluation = read_text(args.data)
    print(f"evaluation loss of the merged weights: {evaluate(model, evaluation):.6f}")
    print(sample(model, args.prompt.encode(), args.length).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
