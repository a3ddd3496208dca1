"""Fine-tune a Qwen-VL model on pictures and texts with transformers' `Trainer`.

    python examples/finetune.py photos --model Qwen/Qwen3-VL-8B-Instruct --output tuned --lora-rank 16
    accelerate launch --num_processes 4 examples/finetune.py photos --model Qwen/Qwen3-VL-8B-Instruct --output tuned

`photos/metadata.jsonl` names pictures and texts: {"file_name": "a.jpg", "text": "A cat."} in every line. Only the texts
have labels, not the prompt. `--resume` goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    BatchFeature,
    PreTrainedModel,
    ProcessorMixin,
    Trainer,
    TrainingArguments,
)

import hf_vit_accel

IGNORED = -100  # the label of tokens without a loss


class Collator:
    """Turn rows into a batch: pixels, tokens, and labels of the answers."""

    def __init__(self, processor: ProcessorMixin, folder: Path, prompt: str) -> None:
        self.processor = processor
        self.folder = folder
        self.prompt = prompt

    def __call__(self, rows: Sequence[dict[str, str]]) -> BatchFeature:
        """Return the inputs of the model."""
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": self.prompt}]}
        prompt = self.processor.apply_chat_template([question], add_generation_prompt=True)
        images = [ImageOps.exif_transpose(Image.open(self.folder / row["file_name"])).convert("RGB") for row in rows]
        answers = [row["text"].strip() + self.processor.tokenizer.eos_token for row in rows]
        texts = [prompt + answer for answer in answers]
        batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        lengths = batch["attention_mask"].sum(1).tolist()
        for row_labels, length, answer in zip(labels, lengths, answers, strict=True):
            count = len(self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
            row_labels[: length - count] = IGNORED  # the prompt, with the tokens of the picture
            row_labels[length:] = IGNORED  # padding on the right
        batch["labels"] = labels
        return batch


def newest_checkpoint(output: Path) -> str | None:
    """Return the newest complete checkpoint. The trainer writes its state last."""
    folders = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))) if folders else None


def load(options: argparse.Namespace, checkpoint: str | None) -> PreTrainedModel:
    """Load the model that is trained, patched."""
    dtype = torch.bfloat16 if options.lora_rank and torch.cuda.is_available() else torch.float32
    # A checkpoint of all weights is loaded here: Trainer finds no weight of Qwen2-VL's and Qwen2.5-VL's checkpoints.
    source = checkpoint if checkpoint and not options.lora_rank else options.model
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype)
    if options.freeze_tower:
        model.model.visual.requires_grad_(False)
    if options.lora_rank:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise SystemExit("--lora-rank needs PEFT: pip install peft") from None
        towers = r".*\.visual\..*" if options.freeze_tower else None
        config = LoraConfig(
            r=options.lora_rank,
            lora_alpha=2 * options.lora_rank,
            target_modules="all-linear",
            exclude_modules=towers,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config)
    if options.gradient_checkpointing:
        # Named otherwise before transformers 5.23.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return hf_vit_accel.patch(model)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the result with its processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="pictures and their metadata.jsonl")
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompt", default="Describe this picture.")
    parser.add_argument("--max-pixels", type=int, help="larger pictures are reduced to it")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--max-steps", type=int, default=-1, help="ends training earlier, or later, than --epochs")
    parser.add_argument("--batch-size", type=int, default=4, help="per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0 for all weights")
    parser.add_argument("--freeze-tower", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--save-steps", type=int, default=500)
    parser.add_argument("--log-steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    options = parser.parse_args(arguments)

    processor = AutoProcessor.from_pretrained(options.model)
    processor.tokenizer.padding_side = "right"
    if options.max_pixels:
        size = dict(processor.image_processor.size)
        size["longest_edge"] = options.max_pixels
        processor.image_processor.size = size
    rows = [json.loads(line) for line in (options.folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]

    checkpoint = newest_checkpoint(options.output) if options.resume else None
    training = TrainingArguments(
        output_dir=str(options.output),
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        bf16=torch.cuda.is_available(),
        logging_steps=options.log_steps,
        save_steps=options.save_steps,
        remove_unused_columns=False,  # the collator needs the names of pictures
        report_to="none",
    )
    model = load(options, checkpoint)
    trainer = Trainer(model, training, Collator(processor, options.folder, options.prompt), rows)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        processor.save_pretrained(options.output)
        print(hf_vit_accel.status(model))


if __name__ == "__main__":
    main()
