"""Pictures and their texts: found in JSON lines, folders, shards and tables, held out, read, made into batches."""

from __future__ import annotations

import hashlib
import json
import os.path
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from media.items import Item, fields, open_item
from media.pictures import read_image
from media.processors import vision_tokens
from media.prompts import fill, named
from media.sources import find
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

__all__ = ["Collator", "Example", "Examples", "Row", "find_examples", "hold_out", "text_column"]

PICTURES = ("file_name", "image", "path", "key")
TEXTS = ("text", "caption", "answer", "txt")
IGNORED = -100
"""The label that no loss is computed for."""
_TRIES = 100


@dataclass(frozen=True)
class Example:
    """A picture and what belongs to it. values: of its line of JSON; None for what is read where the picture lies."""

    item: Item
    values: Mapping[str, Any] | None = None

    @property
    def picture(self) -> str:
        """The same for all examples of one picture."""
        return self.item.key if self.values is None else self.item.file

    def fields(self, wanted: set[str]) -> Mapping[str, Any]:
        """At least what of `wanted` there is."""
        return fields(self.item, wanted) if self.values is None else self.values


def find_examples(
    inputs: Sequence[str], *, column: str | None = None, split: str = "train", root: Path | None = None
) -> list[Example]:
    """All examples of the inputs, in their order.

    An input is a .jsonl file, a folder with a `metadata.jsonl`, or whatever the captioning example reads. column: of
    the pictures, by default the first known name; split: of datasets; root: what paths in .jsonl files are relative
    to, by default the file's folder. Raises ValueError for an input that is not there or holds no pictures.
    """
    found: list[Example] = []
    for name in inputs:
        path = Path(name)
        lines = path / "metadata.jsonl" if path.is_dir() else path
        if lines.suffix == ".jsonl" and lines.is_file():
            more = list(_in_lines(lines, column, root or lines.parent))
        else:
            items = find([name], column=column, split=split).items
            more = [Example(item) for item in items if item.kind == "image"]
        if not more:
            raise ValueError(f"no pictures in {name}")
        found += more
    return found


def _in_lines(path: Path, column: str | None, root: Path) -> Iterator[Example]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
            if not isinstance(values, dict):
                raise ValueError(f"line {number} of {path} is {type(values).__name__}, expected an object")
            names = [column] if column else PICTURES
            picture = next((values[name] for name in names if isinstance(values.get(name), str)), None)
            if picture is None:
                has = f"it has {', '.join(values)}; name the column with --image-column"
                raise ValueError(f"line {number} of {path}: expected a picture's path in {' or '.join(names)}, {has}")
            yield Example(Item(key=f"{path}:{number}", file=os.path.normpath(root / picture)), values)


def text_column(examples: Sequence[Example], column: str | None) -> str:
    """The name of the texts. Raises ValueError if none of the first examples has one of that name."""
    names = (column,) if column else TEXTS
    for example in examples[:_TRIES]:  # one without a text is passed over, the first one too
        has = example.fields(set(names))
        if found := next((name for name in names if name in has), None):
            return found
    first = f"{examples[0].item.key} has {', '.join(sorted(examples[0].fields(set())))}"
    raise ValueError(f"expected a text in {' or '.join(names)}, {first}; name it with --text-column")


def hold_out(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and those of a share of the pictures, always the same ones, to evaluate by.

    Raises ValueError where one of the two would be empty.
    """
    # By the whole name, too: of equal names in several folders a set's order is another in every process.
    pictures = sorted({example.picture for example in examples}, key=lambda name: (_digest(name), name))
    held = set(pictures[: max(1, round(fraction * len(pictures)))] if fraction else ())
    kept = [example for example in examples if example.picture not in held]
    if not kept:
        raise ValueError(
            f"expected pictures to train on beside those held out, got {len(pictures)} in all; 0 holds none out"
        )
    return kept, [example for example in examples if example.picture in held]


def _digest(name: str) -> bytes:
    return hashlib.sha256(Path(name).name.encode(errors="surrogatepass")).digest()


@dataclass(frozen=True)
class Row:
    """What is shown, asked and to be answered."""

    image: Image.Image
    prompt: str
    text: str


class Examples(Dataset[Row]):
    """The examples as the trainer reads them.

    One that cannot be read is told and passed over: the next one takes its place, in every run the same.
    """

    def __init__(self, examples: Sequence[Example], processor: Any, *, prompt: str, text: str) -> None:
        self.examples, self.processor, self.prompt, self.text = examples, processor, prompt, text
        self._wanted, self._told = {text, *named([prompt])}, set[str]()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        told = ""
        for place in range(index, index + min(_TRIES, len(self))):
            example = self.examples[place % len(self)]
            try:
                return self._read(example)
            except Exception as error:  # Pillow's decoders raise anything for damaged files
                told = f"{example.item.key}: {error}"
            if told not in self._told:
                self._told.add(told)
                print(f"passed over: {told}", file=sys.stderr, flush=True)
        raise ValueError(f"of {min(_TRIES, len(self))} examples in a row none can be read; the last was {told}")

    def _read(self, example: Example) -> Row:
        values = example.fields(self._wanted)
        text = values.get(self.text)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"no text in {self.text}")
        with open_item(example.item) as file:
            image, _ = read_image(file)
        if not vision_tokens(self.processor, *image.size):
            raise ValueError(f"the processor refuses a picture of {image.width} x {image.height}")
        prompt = fill(self.prompt, {"kind": "picture", **values})
        for name in ("image_token", "video_token"):  # PaddleOCR-VL's processor has no videos
            if (token := getattr(self.processor, name, None)) and token in prompt + text:
                raise ValueError(f"{token} in a text stands for a picture that there is not")
        return Row(image, prompt, text.strip())


class Collator:
    """Rows to one batch of the model's inputs, padded on the right; only the answers' tokens have labels."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        tokenizer = self.processor.tokenizer
        prompts, answers = zip(*map(self._rendered, rows), strict=True)
        inputs = dict(
            self.processor(text=list(prompts), images=[row.image for row in rows], padding=True, return_tensors="pt")
        )
        mask = inputs.pop("attention_mask").bool()
        # Apart, as when the model is used: there the prompt ends before the answer's first token is chosen.
        tokens = [torch.tensor(ids) for ids in tokenizer(list(answers), add_special_tokens=False).input_ids]
        ids = [row[known] for row, known in zip(inputs["input_ids"], mask, strict=True)]
        rest = [
            name for name, value in inputs.items() if name != "input_ids" and value.shape == mask.shape
        ]  # such as the kinds of tokens

        def joined(starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], pad: int) -> torch.Tensor:
            whole = [torch.cat(pair) for pair in zip(starts, ends, strict=True)]
            return pad_sequence(whole, batch_first=True, padding_value=pad)

        nothing = [torch.zeros_like(each) for each in tokens]
        batch = {  # first what has a row per example: the trainer takes its length for the batch's
            "input_ids": joined(ids, tokens, tokenizer.pad_token_id),
            "attention_mask": joined([torch.ones_like(each) for each in ids], [each + 1 for each in nothing], 0),
            "labels": joined([torch.full_like(each, IGNORED) for each in ids], tokens, IGNORED),
        }
        for name in rest:
            batch[name] = joined([row[known] for row, known in zip(inputs[name], mask, strict=True)], nothing, 0)
        return batch | {name: value for name, value in inputs.items() if name not in batch}

    def _rendered(self, row: Row) -> tuple[str, str]:
        """The prompt as the model's chat template writes it, and what the template makes of the answer, to its end."""
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.prompt}]}
        answered = {"role": "assistant", "content": [{"type": "text", "text": row.text}]}
        prompt = self.processor.apply_chat_template([asked], add_generation_prompt=True)
        whole = self.processor.apply_chat_template([asked, answered])
        # Templates of models that think open a thought in the prompt which the answer's does not have.
        prompt = os.path.commonprefix([prompt, whole])  # noqa: RUF071 (it is no path)
        return prompt, whole.removeprefix(prompt).rstrip()
