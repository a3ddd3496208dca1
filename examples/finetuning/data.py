"""Find pictures and their texts in JSON lines, folders, shards and tables; hold some out; make batches of them."""

from __future__ import annotations

import hashlib
import json
import numbers
import os
import os.path
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from media.items import Item, fields, open_item, size, sizes
from media.pictures import read_image
from media.processors import vision_tokens
from media.prompts import fill, named
from media.sources import find
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import ProcessorMixin

__all__ = [
    "Collator",
    "Example",
    "Examples",
    "Row",
    "check_prompt",
    "count_workers",
    "describe",
    "find_examples",
    "fingerprint",
    "hold_out",
]

PICTURES = ("file_name", "image", "path", "key")
TEXTS = ("text", "caption", "answer", "txt")
IGNORED = -100
"""The label of tokens without a loss."""
_TRIES = 100

Fields = Mapping[str, Any]
"""The fields of a line of JSON or of a table's row, by name."""


@dataclass(frozen=True)
class Example:
    """A picture and its fields.

    Args:
        item: the picture
        values: the fields of its line of JSON; None if the fields are read where the picture is
        text: the name of the field with its text, the same in one input
    """

    item: Item
    values: Fields | None = None
    text: str = TEXTS[0]

    @property
    def picture(self) -> str:
        """The picture's name; equal for all examples of one picture."""
        return self.item.key if self.values is None else self.item.file

    def fields(self, names: set[str]) -> Fields:
        """Return the fields with these names that exist, and possibly others."""
        return fields(self.item, names) if self.values is None else self.values


def find_examples(
    inputs: Sequence[str],
    *,
    column: str | None = None,
    text_column: str | None = None,
    split: str = "train",
    root: Path | None = None,
) -> list[Example]:
    """Find all examples of the inputs, in their order.

    Args:
        inputs: .jsonl files, folders with a `metadata.jsonl`, and all inputs of the captioning example
        column: the column of the pictures; by default the first of PICTURES that exists
        text_column: the column of the texts; by default the first of TEXTS that an input has
        split: the split of datasets
        root: the folder of relative paths in .jsonl files; by default the file's folder

    Raises:
        ValueError: if an input does not exist, or holds no pictures or no texts, or a folder has two texts of a picture
    """
    examples: list[Example] = []
    for name in inputs:
        path = Path(name)
        if path.is_file() and path.suffix in (".json", ".csv", ".tsv"):
            raise ValueError(f"{name}: texts are read from .jsonl and .parquet files, .tar shards and folders")
        lines = path / "metadata.jsonl" if path.is_dir() else path
        if lines.suffix == ".jsonl" and lines.is_file():
            of_input = list(_read_lines(lines, column, root or lines.parent))
            if path.is_dir():
                _check_only_source(lines, of_input)
        else:
            items = find([name], column=column, split=split).items
            of_input = [Example(item) for item in items if item.kind == "image"]
        if not of_input:
            raise ValueError(f"no pictures in {name}")
        text = _find_text_column(of_input, text_column)
        examples += [replace(example, text=text) for example in of_input]
    return examples


def _check_only_source(lines: Path, examples: Sequence[Example]) -> None:
    """Raise ValueError where a picture in a folder has a .txt file, too: nobody could tell which text is meant."""
    folder = lines.parent.resolve()
    for example in examples:
        text = Path(example.item.file).with_suffix(".txt")
        if text.is_file() and folder in text.resolve().parents:
            raise ValueError(
                f"a picture of {lines.parent} has a line in {lines.name} and the file {text.name}: "
                f"name {lines} itself to train on its lines, or move it away to train on .txt files"
            )


def _read_lines(path: Path, column: str | None, root: Path) -> Iterator[Example]:
    """Yield the examples of a .jsonl file."""
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


def _find_text_column(examples: Sequence[Example], column: str | None) -> str:
    """Return the name of the texts' column.

    Args:
        examples: the examples of an input; the first ones are looked at
        column: the only allowed name; by default the names of TEXTS

    Raises:
        ValueError: if none of the first examples has a text of that name
    """
    names = (column,) if column else TEXTS
    for example in examples[:_TRIES]:  # training skips examples without a text, so the first ones may lack it
        existing = example.fields(set(names))
        for name in names:
            if name in existing:
                return name
    first = examples[0]
    existing = first.fields(set(names))  # with a name to look for, the columns of a row are among them
    advice = "name it with --text-column"
    if first.item.row is None:
        advice += ", or put NAME.txt beside NAME.jpg"
    raise ValueError(
        f"expected a text in {' or '.join(names)}, {first.item.key} has {', '.join(sorted(existing))}; {advice}"
    )


def check_prompt(prompt: str, examples: Sequence[Example]) -> None:
    """Raise ValueError for a prompt with a field that none of the first examples has."""
    unknown = named([prompt]) - {"kind"}
    existing = {"kind"}
    for example in examples[:_TRIES]:
        if not unknown:
            break
        try:
            existing |= example.fields(unknown).keys()
        except Exception:  # metadata that cannot be read may have any field
            return
        unknown -= existing
    if unknown:
        names = ", ".join(f"{{{name}}}" for name in sorted(unknown))
        raise ValueError(f"the prompt names {names}; there are {', '.join(sorted(existing))}")


def hold_out(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Split the examples by picture into those to train on and those to evaluate with.

    Args:
        examples: all examples
        fraction: the share of the pictures to evaluate with; every run holds out the same pictures

    Raises:
        ValueError: if no pictures would be left to train on
    """
    # Equal file names in several folders have equal digests. The complete name decides between them, because the
    # order of a set differs between processes.
    pictures = sorted({example.picture for example in examples}, key=lambda name: (_digest(name), name))
    held_out = set(pictures[: max(1, round(fraction * len(pictures)))] if fraction else ())
    trained = [example for example in examples if example.picture not in held_out]
    if not trained:
        raise ValueError(
            f"No pictures to train on beside those held out: the inputs hold {len(pictures)}. Give more pictures, or "
            "hold none out: --eval-fraction 0."
        )
    return trained, [example for example in examples if example.picture in held_out]


def count_workers(requested: int | None) -> int:
    """Return how many processes load examples: by default 4, and no more than the cores of this process."""
    if requested is not None:
        return requested
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores)


def fingerprint(examples: Sequence[Example]) -> str:
    """Return a digest of the examples in their order, which a resumed run must go on with.

    It covers names and sizes of the pictures, all fields of lines of JSON, and the sizes of files with their texts.
    Their contents are not read, which would take minutes.
    """
    digest = hashlib.sha256()
    for example in examples:
        digest.update(_digest(example.picture))
        lengths = sizes(example.item) if example.values is None else [size(example.item)]
        digest.update(json.dumps([example.values, lengths], sort_keys=True, default=str).encode(errors="surrogatepass"))
    return f"{len(examples)} examples, {digest.hexdigest()[:16]}"


def describe(examples: Sequence[Example]) -> str:
    """Return the number of examples, and how many of the first ones have no text, so that training passes them over."""
    looked_at = examples[:_TRIES]
    without_text = 0
    for example in looked_at:
        try:
            without_text += not _text_of(example.fields({example.text}), example.text)
        except Exception:  # metadata that cannot be read
            without_text += 1
    if not without_text:
        return f"{len(examples)} examples"
    if len(looked_at) == len(examples):
        return f"{len(examples) - without_text} of {len(examples)} examples (the others have no text)"
    return f"{len(examples)} examples ({without_text} of the first {len(looked_at)} have no text and are passed over)"


def _text_of(values: Fields, column: str) -> str:
    """Return the text to learn, which may be a number; empty where there is none."""
    text = values.get(column)
    is_text = isinstance(text, str | numbers.Real) and not isinstance(text, bool)
    return str(text).strip() if is_text else ""


def _digest(name: str) -> bytes:
    return hashlib.sha256(Path(name).name.encode(errors="surrogatepass")).digest()


@dataclass(frozen=True)
class Row:
    """A picture, the prompt about it and the text to learn."""

    image: Image.Image
    prompt: str
    text: str


class Examples(Dataset[Row]):
    """Read examples for the trainer.

    An unreadable example is reported and replaced by the next one, the same in every run.

    Args:
        examples: the examples
        processor: the model's processor
        prompt: the prompt, which may name fields in braces
    """

    def __init__(self, examples: Sequence[Example], processor: ProcessorMixin, *, prompt: str) -> None:
        self.examples = examples
        self.processor = processor
        self.prompt = prompt
        self._fields = named([prompt])
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        problem = hint = ""
        for place in range(index, index + min(_TRIES, len(self))):
            example = self.examples[place % len(self)]
            try:
                return self._read(example)
            except Exception as error:  # Pillow's decoders raise anything for damaged files
                problem = f"{example.item.key}: {error}"
                is_missing = isinstance(error, FileNotFoundError) and example.values is not None
                hint = "; --image-root names the folder of relative paths" if is_missing else ""
            if problem not in self._reported:
                self._reported.add(problem)
                print(f"passed over: {problem}", file=sys.stderr, flush=True)
        count = min(_TRIES, len(self))
        raise ValueError(f"of {count} examples in a row none can be read; the last was {problem}{hint}")

    def _read(self, example: Example) -> Row:
        """Read one example; raise any error of a damaged one."""
        values = example.fields({example.text, *self._fields})
        text = _text_of(values, example.text)
        if not text:
            raise ValueError(f"the column or file {example.text!r} is missing, empty or neither text nor number")
        with open_item(example.item) as file:
            image, _ = read_image(file)
        if not vision_tokens(self.processor, *image.size):
            raise ValueError(f"the processor refuses a picture of {image.width} x {image.height}")
        prompt = fill(self.prompt, {"kind": "picture", **values})
        for name in ("image_token", "video_token"):  # PaddleOCR-VL's processor has no videos
            token = getattr(self.processor, name, None)
            if token and token in prompt + text:
                raise ValueError(f"{token} in a text stands for a picture, and there is none")
        return Row(image, prompt, text)


class Collator:
    """Make a batch of the model's inputs from rows, padded on the right. Only the answers' tokens have labels.

    Args:
        processor: the model's processor
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return the batch; fields with a row per example come first, since the trainer takes their length."""
        tokenizer = self.processor.tokenizer
        rendered = [self._rendered(row) for row in rows]
        prompts = [prompt for prompt, _ in rendered]
        answers = [answer for _, answer in rendered]
        images = [row.image for row in rows]
        inputs = dict(self.processor(text=prompts, images=images, padding=True, return_tensors="pt"))
        mask = inputs.pop("attention_mask").bool()
        # Answers are tokenized apart from prompts, as in generation: the prompt ends before the first answer token.
        answer_ids = [torch.tensor(ids) for ids in tokenizer(answers, add_special_tokens=False).input_ids]
        prompt_ids = _unpadded(inputs.pop("input_ids"), mask)
        per_token = [name for name, value in inputs.items() if value.shape == mask.shape]  # as mm_token_type_ids
        batch = {
            "input_ids": _joined(prompt_ids, answer_ids, tokenizer.pad_token_id),
            "attention_mask": _joined(
                [torch.ones_like(ids) for ids in prompt_ids], [torch.ones_like(ids) for ids in answer_ids], 0
            ),
            "labels": _joined([torch.full_like(ids, IGNORED) for ids in prompt_ids], answer_ids, IGNORED),
        }
        for name in per_token:
            zeros = [torch.zeros_like(ids) for ids in answer_ids]
            batch[name] = _joined(_unpadded(inputs.pop(name), mask), zeros, 0)
        return batch | inputs

    def _rendered(self, row: Row) -> tuple[str, str]:
        """Return the prompt and the answer as the model's chat template writes them."""
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.prompt}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": row.text}]}
        prompt = self.processor.apply_chat_template([question], add_generation_prompt=True)
        conversation = self.processor.apply_chat_template([question, answer])
        # Templates of thinking models open a thought at the prompt's end, which the conversation does not have.
        prompt = os.path.commonprefix([prompt, conversation])  # noqa: RUF071 (it is no path)
        return prompt, conversation.removeprefix(prompt).rstrip()


def _unpadded(values: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    return [row[is_token] for row, is_token in zip(values, mask, strict=True)]


def _joined(prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor], pad: int) -> torch.Tensor:
    """Append every answer to its prompt, and pad the rows on the right."""
    rows = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=pad)
