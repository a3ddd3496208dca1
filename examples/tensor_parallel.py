"""Split a language model over the GPUs of one machine, and share its vision tower among them.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py photos/*.jpg --model Qwen/Qwen2.5-VL-7B-Instruct

The plan "auto" of transformers splits the language model's weights. The number of key-value heads must divide by the
ranks. Every rank keeps the complete tower. In stock, every rank encodes all pictures of a call. With
`data_parallel=True` every rank encodes a share, and all get the result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import transformers
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_vit_accel


def load_split(name: str) -> PreTrainedModel:
    """Load a checkpoint, with the weights of its language model split among the ranks."""
    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    ranks = dist.get_world_size()
    if text.num_key_value_heads % ranks:
        raise SystemExit(
            f"{name} has {text.num_key_value_heads} key-value heads, which cannot be split over {ranks} ranks; "
            "start as many ranks as divide them"
        )
    parts = text.base_model_tp_plan or {}
    if not any(part.startswith("layers.") for part in parts):  # Qwen3-VL's layers have no plan; Qwen3's are the same
        text.base_model_tp_plan = transformers.Qwen3Config.base_model_tp_plan | parts
    plan = DistributedConfig(tp_plan="auto", tp_size=ranks)
    model = AutoModelForImageTextToText.from_pretrained(name, config=config, dtype="auto", distributed_config=plan)
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Caption the pictures in one call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="+")
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--prompt", default="Describe this picture.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py ...")

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")

    processor = AutoProcessor.from_pretrained(options.model)
    processor.tokenizer.padding_side = "left"  # new tokens follow the prompt
    model = hf_vit_accel.patch(load_split(options.model), data_parallel=True)

    # All ranks must make the same calls.
    images = [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in options.picture]
    content = [{"type": "image"}, {"type": "text", "text": options.prompt}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    prompts = [text] * len(images)
    inputs = processor(text=prompts, images=images, padding=True, return_tensors="pt", device=model.device)
    inputs = inputs.to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
    answers = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if dist.get_rank() == 0:
        for path, answer in zip(options.picture, answers, strict=True):
            print(f"{path}: {answer}")
        print(hf_vit_accel.status(model))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
