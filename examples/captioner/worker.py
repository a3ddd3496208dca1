"""Turn the tasks of one process into records, batch by batch; the next batches are decoded meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import ProcessorMixin

from captioner.batches import Bounds, Task, pack
from captioner.items import checksum, holds_bytes, open_item, size, stamp
from captioner.journal import Journal, Record
from captioner.model import PIXELS, Caption, Captioner, Clip, Inputs, Medium
from captioner.pictures import Resize, read_bytes, read_frames, read_image
from captioner.plan import filled
from captioner.processors import reduced
from captioner.progress import Progress

_DECODERS = min(4, os.cpu_count() or 1)  # threads; more of them take Python's lock from those that feed the GPU
_PART_TOKENS = 8192  # of the pictures that are encoded together, while the next ones are decoded
_SLACK_ON_GPU = 4.0  # the GPU resizes fast, so only much larger pictures are reduced on the CPU
_SWITCH_SECONDS = 1e-4  # the model's thread gets the interpreter back after every launch: Python's 5 ms add up


@dataclass(frozen=True)
class Row:
    task: Task
    errors: tuple[str | None, ...]  # for every prompt
    medium: Medium | None = None
    prompts: tuple[str, ...] = ()
    width: int | None = None
    height: int | None = None
    bytes: int | None = None
    checksum: str | None = None
    stamp: str | None = None

    @property
    def failed(self) -> bool:
        return all(self.errors)


@dataclass(frozen=True)
class Ready:
    failed: list[Row]
    rows: list[Row]
    inputs: list[Inputs]  # for every prompt


Part = tuple[list[Row], list[Inputs]]  # of a batch: its inputs for every prompt
Batch = tuple[list[Future[Part]], Future[Ready]]  # its parts, and the whole


def decode(task: Task, processor: ProcessorMixin | None, resize: Resize | None = None, *, for_gpu: bool = False) -> Row:
    """Read one item and fill its prompts. Errors become part of the row: damaged files raise nearly any class."""
    item = task.item
    texts = []
    errors = []
    for prompt in task.prompts:
        try:
            texts.append(filled(prompt, item))
            errors.append(None)
        except Exception as error:
            texts.append("")
            errors.append(_describe(error))
    row = Row(task, tuple(errors), prompts=tuple(texts), bytes=size(item), stamp=stamp(item))
    try:
        with open_item(item) as file:
            row = replace(row, checksum=checksum(file), stamp=row.stamp if holds_bytes(item) else None)
            if not file.read(1):
                raise ValueError("the file is empty")
            file.seek(0)
            if item.kind == "video":
                frames, metadata = read_frames(file, Path(item.key).suffix, processor)
                return replace(row, medium=Clip(frames, metadata), width=metadata.width, height=metadata.height)
            read = read_bytes if for_gpu else read_image
            medium, (width, height) = read(file, resize)
            return replace(row, medium=medium, width=width, height=height)
    except Exception as error:
        return _fail(row, error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _fail(row: Row, error: Exception) -> Row:
    return replace(row, errors=tuple(earlier or _describe(error) for earlier in row.errors))


@dataclass
class Worker:
    """Caption the tasks of one process and write their records."""

    captioner: Captioner
    journal: Journal
    progress: Progress
    process: int
    run: str
    bounds: Bounds  # of batches; they shrink when memory runs out

    def work(self, tasks: Sequence[Task]) -> None:
        """Caption all tasks. A batch that exceeds the memory is halved, and later batches are smaller."""
        processor = self.captioner.processor
        on_gpu = self.captioner.prepares_on_gpu
        slack = _SLACK_ON_GPU if on_gpu else 1.0
        resize = reduced(processor, slack) if processor is not None else None
        pool = ThreadPoolExecutor(_DECODERS)
        preparing = ThreadPoolExecutor(1)
        sys.setswitchinterval(_SWITCH_SECONDS)

        def start(batch: list[Task]) -> Batch:
            read = partial(decode, processor=processor, resize=resize, for_gpu=on_gpu)
            decoding = [[pool.submit(read, task) for task in part] for part in parts_of(batch)]
            encoding = [preparing.submit(self.encode, part) for part in decoding]
            return encoding, preparing.submit(self.join, [*encoding])

        try:
            for batch in started_ahead(pack(tasks, self.bounds), start):
                self.caption(self.receive(*batch))
        finally:
            for threads in (pool, preparing):
                threads.shutdown(wait=False, cancel_futures=True)

    def encode(self, decoding: list[Future[Row]]) -> Part:
        return self._encoded([row.result() for row in decoding])

    def join(self, encoding: list[Future[Part]]) -> Ready:
        encoded = [part.result() for part in encoding]
        parts = [inputs for _, inputs in encoded if inputs]
        rows = [row for rows, _ in encoded for row in rows]
        return Ready(
            failed=[row for row in rows if row.failed],
            rows=[row for row in rows if not row.failed],
            inputs=self.captioner.send([*zip(*parts, strict=True)]) if parts else [],
        )

    def receive(self, parts: list[Future[Part]], whole: Future[Ready]) -> Ready:
        """Let the tower encode parts of a batch as they come, drop them, and return the whole with their features."""
        features = []
        while parts:
            _, inputs = self._waited_for(parts.pop(0))
            if inputs:
                features.append(self.captioner.features_of(inputs[0]))
        ready: Ready = self._waited_for(whole)
        encoded = self.captioner.join_features(features)
        for inputs_of_prompt in ready.inputs:
            inputs_of_prompt["features"] = encoded
        return ready

    def _waited_for(self, future: Future[Any]) -> Any:
        begin = perf_counter()
        result = future.result()
        self.progress.waited += perf_counter() - begin
        return result

    def _encoded(self, rows: list[Row]) -> Part:
        try:
            return rows, self._encode([row for row in rows if not row.failed])
        except Exception:  # the processor refuses an item, which must not cost the whole batch: find it
            rows = [self._checked(row) for row in rows]
            return rows, self._encode([row for row in rows if not row.failed])

    def _checked(self, row: Row) -> Row:
        try:
            if not row.failed:
                self._encode([row])
            return row
        except Exception as error:  # not only ValueError: a prompt that holds an image token gives IndexError
            return _fail(row, error)

    def _encode(self, rows: Sequence[Row]) -> list[Inputs]:
        """Return the model's inputs of rows, for every prompt; pixels for the first alone."""
        media = [row.medium for row in rows if row.medium is not None]
        prompts = zip(*(row.prompts for row in rows), strict=True)
        encoded = [self.captioner.encode(media, prompts_of_rows) for prompts_of_rows in prompts]
        return encoded[:1] + [{name: inputs[name] for name in inputs.keys() - PIXELS} for inputs in encoded[1:]]

    def caption(self, ready: Ready) -> None:
        records = []
        for row in ready.failed:
            records += self._records_of(row, [])
        for row, captions in self._captioned(ready.rows, ready.inputs):
            records += self._records_of(row, captions)
        self.journal.append(self.process, records)
        rows = [*ready.failed, *ready.rows]
        self.progress.add(
            items=len(rows),
            tokens=sum(row.task.tokens for row in rows),
            failed=sum(record.status == "error" for record in records),
            text=sum(record.tokens or 0 for record in records),
        )

    def _captioned(self, rows: Sequence[Row], inputs: list[Inputs]) -> list[tuple[Row, Sequence[Caption]]]:
        """Return rows with a caption for every prompt. A row that exceeds the memory alone fails.

        Only torch's own out-of-memory error counts: a CUDNN_STATUS_NOT_SUPPORTED fails for half a batch, too.
        """
        if not rows:
            return []
        try:
            return self._generate(rows, inputs or self.captioner.send([[part] for part in self._encode(rows)]))
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # a traceback would keep the failed batch's tensors alive
        inputs.clear()  # their pixels are in the memory that is full
        if self.captioner.free_graphs():
            return self._captioned(rows, [])
        if len(rows) == 1:
            return [(_fail(rows[0], failure), [])]
        self.bounds.halve([row.task for row in rows])
        self.progress.counts["halved"] += 1
        middle = len(rows) // 2
        return [*self._captioned(rows[:middle], []), *self._captioned(rows[middle:], [])]

    def _generate(self, rows: Sequence[Row], inputs: list[Inputs]) -> list[tuple[Row, Sequence[Caption]]]:
        captions_by_prompt = []
        for index, inputs_of_prompt in enumerate(inputs):
            seeds = [self.captioner.seed_of(row.task.item.key, row.task.prompts[index]) for row in rows]
            captions_by_prompt.append(self.captioner.generate(inputs_of_prompt, seeds))
        self.progress.counts["vision"] += self.captioner.vision_tokens(inputs[0])
        return list(zip(rows, zip(*captions_by_prompt, strict=True), strict=True))

    def _records_of(self, row: Row, captions: Sequence[Caption]) -> list[Record]:
        """Return the records of a row, one for every prompt. Prompts with an error need no caption."""
        records = []
        for index, (prompt, error) in enumerate(zip(row.task.prompts, row.errors, strict=True)):
            record = Record(
                key=row.task.item.key,
                prompt=prompt,
                status="error" if error else "ok",
                error=error,
                width=row.width,
                height=row.height,
                bytes=row.bytes,
                run=self.run,
                asked=row.prompts[index] or None,
                source=row.task.item.source,
                row=row.task.item.number,
                checksum=row.checksum,
                stamp=row.stamp,
            )
            if error is None:
                record = replace(record, caption=captions[index].text, tokens=captions[index].tokens)
            records.append(record)
        return records


def parts_of(batch: Sequence[Task]) -> list[list[Task]]:
    """Divide a batch into parts of about as many vision tokens. The model waits for the first, which is small."""
    begins = accumulate((task.tokens for task in batch[:-1]), initial=_PART_TOKENS * 3 // 4)
    parts = groupby(zip(batch, begins, strict=True), key=lambda pair: pair[1] // _PART_TOKENS)
    return [[task for task, _ in part] for _, part in parts]


def started_ahead(batches: Iterable[list[Task]], start: Callable[[list[Task]], Batch]) -> Iterator[Batch]:
    """Start every batch before the last one is used. On a GPU it takes memory there."""
    started = []
    for batch in batches:
        started.append(start(batch))
        if len(started) > 1:
            yield started.pop(0)
    yield from started
