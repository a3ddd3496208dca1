"""Ask a Qwen-VL model about a picture, and print the answer token by token from CUDA graphs.

    python examples/decode.py photo.jpg "What is this?" "Which season is it?" --model Qwen/Qwen3-VL-8B-Instruct

Every question continues the chat. Questions after the first replay the steps that the first one captured.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence

import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin, TextStreamer

import hf_vit_accel


def ask(
    model: PreTrainedModel, processor: ProcessorMixin, chat: list[dict], image: Image.Image, max_new_tokens: int
) -> tuple[str, int]:
    """Stream the answer to the last question of a chat about one picture; return it, and its number of tokens."""
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(text=[text], images=[image], return_tensors="pt", device=model.device).to(model.device)
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    # `generate` passes no streamer on to a function, so the function gets it here.
    decode = functools.partial(hf_vit_accel.graphed_decoding, streamer=streamer)
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, custom_generate=decode)
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    return processor.decode(answer, skip_special_tokens=True), len(answer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture")
    parser.add_argument("question", nargs="+")
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)

    image = ImageOps.exif_transpose(Image.open(options.picture)).convert("RGB")
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    model = hf_vit_accel.patch(model.to("cuda" if torch.cuda.is_available() else "cpu").eval())

    chat: list[dict] = []
    for question in options.question:
        content = [{"type": "text", "text": question}]
        if not chat:
            content.insert(0, {"type": "image"})
        chat.append({"role": "user", "content": content})
        begin = time.perf_counter()
        answer, count = ask(model, processor, chat, image, options.max_new_tokens)
        print(f"[{count} tokens, {count / (time.perf_counter() - begin):.1f} a second]")
        chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    print(hf_vit_accel.status(model))  # its last line says which calls were replayed, and why others were not


if __name__ == "__main__":
    main()
