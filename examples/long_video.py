"""Ask a Qwen-VL model about a long video, within little memory.

    python examples/long_video.py talk.mp4 "What is this talk about?" --model Qwen/Qwen3-VL-8B-Instruct --fps 2

The tower encodes the video in passes of at most `--max-rows` patches, so it never holds the rows of every frame. The
rest is the language model's, which sees every frame: where its memory runs out, half as many frames are tried.
transformers reads videos with torchvision and torchcodec (pip install torchvision torchcodec), which needs FFmpeg.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

import hf_vit_accel


def answer(
    model: PreTrainedModel, processor: ProcessorMixin, video: str, question: str, fps: float, max_new_tokens: int
) -> str:
    """Answer a question about a video, of which so many frames a second are looked at."""
    content = [{"type": "video", "video": video}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"fps": fps, "device": model.device},
    ).to(model.device)
    frames, height, width = inputs["video_grid_thw"][0].tolist()
    print(f"{fps:g} frames a second: {frames} x {height} x {width} patches, {inputs['input_ids'].shape[1]} tokens")
    tokens = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        custom_generate=hf_vit_accel.graphed_decoding,
    )
    return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer with as many frames as fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video")
    parser.add_argument("question")
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--fps", type=float, default=2.0, help="frames a second to begin with")
    parser.add_argument("--max-rows", type=int, default=16384, help="most patches in a pass of the tower")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)

    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model = hf_vit_accel.patch(model, max_rows=options.max_rows)

    for halvings in range(8):
        fps = options.fps / 2**halvings
        try:
            print(answer(model, processor, options.video, options.question, fps, options.max_new_tokens))
            break
        except torch.OutOfMemoryError:
            print(f"out of memory at {fps:g} frames a second")
        torch.cuda.empty_cache()  # outside of the handler, whose traceback keeps tensors alive
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
    print(hf_vit_accel.status(model))


if __name__ == "__main__":
    main()
