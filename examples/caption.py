"""Caption the pictures of a folder with a Qwen-VL model.

    python examples/caption.py photos --model Qwen/Qwen3-VL-8B-Instruct --output captions.jsonl

Every picture becomes a line of JSON with its `file_name` and `text`. For millions of pictures, several GPUs, shards and
tables, or runs that go on after a kill, see `examples/captioner/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

import hf_vit_accel

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def batches(folder: Path, size: int) -> Iterator[list[tuple[str, Image.Image]]]:
    """Yield names and pictures of a folder. Damaged files are reported and left out."""
    batch = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        try:
            image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        except Exception as error:  # Pillow's decoders raise errors of any class
            print(f"left out: {path}: {error}")
            continue
        batch.append((path.relative_to(folder).as_posix(), image))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def caption(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    images: Sequence[Image.Image],
    prompt: str,
    max_new_tokens: int,
) -> list[str]:
    """Return a caption for every picture."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    prompts = [text] * len(images)
    inputs = processor(text=prompts, images=list(images), padding=True, return_tensors="pt", device=model.device)
    tokens = model.generate(
        **inputs.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        custom_generate=hf_vit_accel.graphed_decoding,
    )
    answers = tokens[:, inputs["input_ids"].shape[1] :]
    return [answer.strip() for answer in processor.batch_decode(answers, skip_special_tokens=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Caption a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--output", type=Path, default=Path("captions.jsonl"))
    parser.add_argument("--prompt", default="Describe this picture.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"there is no folder {options.folder}")

    processor = AutoProcessor.from_pretrained(options.model)
    processor.tokenizer.padding_side = "left"  # new tokens follow the prompt
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    model = hf_vit_accel.patch(model.to("cuda" if torch.cuda.is_available() else "cpu").eval())

    with options.output.open("w", encoding="utf-8") as file:
        for batch in batches(options.folder, options.batch_size):
            names, images = zip(*batch, strict=True)
            captions = caption(model, processor, images, options.prompt, options.max_new_tokens)
            for name, text in zip(names, captions, strict=True):
                file.write(json.dumps({"file_name": name, "text": text}, ensure_ascii=False) + "\n")
            file.flush()
    print(hf_vit_accel.status(model))


if __name__ == "__main__":
    main()
