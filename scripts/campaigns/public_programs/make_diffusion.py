"""Make a tiny Stable Diffusion in `sd`, and pictures with captions in `pictures`."""

import json
import random
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

torch.manual_seed(0)
random.seed(0)
size = {"block_out_channels": (32, 64), "norm_num_groups": 8}
unet = UNet2DConditionModel(
    layers_per_block=1,
    sample_size=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=8,
    **size,
)
vae = AutoencoderKL(
    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=4, **size
)
letters = [chr(code) for code in range(33, 127)]
names = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
Path("clip").mkdir()
Path("clip/vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
Path("clip/merges.txt").write_text("#version: 0.2\n")
text = CLIPTextConfig(
    vocab_size=len(names),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
    bos_token_id=len(names) - 2,
    eos_token_id=len(names) - 1,
    pad_token_id=1,
)
StableDiffusionPipeline(
    vae=vae,
    text_encoder=CLIPTextModel(text),
    tokenizer=CLIPTokenizer.from_pretrained("clip", model_max_length=16),
    unet=unet,
    scheduler=DDPMScheduler(),
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
).save_pretrained("sd")
Path("pictures/train").mkdir(parents=True)
captions = []
for number in range(16):
    Image.frombytes("RGB", (16, 16), random.randbytes(16 * 16 * 3)).save(f"pictures/train/{number}.png")
    captions.append(json.dumps({"file_name": f"{number}.png", "text": f"a photo of {number}"}))
Path("pictures/train/metadata.jsonl").write_text("\n".join(captions))
