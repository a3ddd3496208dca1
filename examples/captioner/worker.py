"""Turn the tasks of one process into records, batch by batch; the next batches are decoded meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Generic, TypeVar

import torch
from PIL import Image
from transformers import ProcessorMixin

from captioner.batches import Task, cost, halve_on_oom, memory_of, pack
from captioner.items import Item, checksum, holds_bytes, open_item, size, stamp
from captioner.journal import Journal, Record
from captioner.model import Caption, Captioner, Clip, Inputs
from captioner.pictures import REFUSE_ABOVE, Gate, Resize, TooLarge, read_frames, read_image
from captioner.plan import filled
from captioner.processors import reduced
from captioner.progress import Progress, Tally

_PREPARED_AT_A_TIME = 3  # batches
_WAITING = 3  # batches that may wait for the model
Batch = TypeVar("Batch")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """An item on its way to the model."""

    task: Task
    errors: tuple[str | None, ...]  # for every prompt
    medium: Image.Image | Clip | None = None
    prompts: tuple[str, ...] = ()
    width: int | None = None
    height: int | None = None
    bytes: int | None = None
    checksum: str | None = None
    stamp: str | None = None

    @property
    def failed(self) -> bool:
        """Tell whether no prompt can be answered."""
        return all(self.errors)


@dataclass(frozen=True)
class Ready:
    """A batch that is ready for the model."""

    failed: list[Row]
    rows: list[Row]
    inputs: list[Inputs]


def describe(error: Exception) -> str:
    """Return the text of an error in a record."""
    return f"{type(error).__name__}: {error}"


def decode(
    task: Task,
    processor: ProcessorMixin | None,
    refuse_above: int = REFUSE_ABOVE,
    resize: Resize | None = None,
    gate: Gate | None = None,
) -> Row:
    """Read one item and fill its prompts. Errors become part of the row: damaged files raise nearly any class."""
    item = task.item
    texts = []
    errors = []
    for prompt in task.prompts:
        text, error = _fill(prompt, item)
        texts.append(text)
        errors.append(error)
    row = Row(task, tuple(errors), prompts=tuple(texts), bytes=size(item), stamp=stamp(item))
    try:
        with open_item(item) as file:
            row = replace(row, checksum=checksum(file), stamp=row.stamp if holds_bytes(item) else None)
            if item.kind == "video":
                frames, metadata = read_frames(file, Path(item.key).suffix, processor, refuse_above)
                return replace(row, medium=Clip(frames, metadata), width=metadata.width, height=metadata.height)
            image, (width, height) = read_image(file, refuse_above, resize, gate)
            return replace(row, medium=image, width=width, height=height)
    except TooLarge as error:
        return _fail(replace(row, width=error.width, height=error.height), error)
    except Exception as error:
        return _fail(row, error)


def _fill(prompt: str, item: Item) -> tuple[str, str | None]:
    """Return the filled prompt and no error, or an empty text and the error: all items have equally many texts."""
    try:
        return filled(prompt, item), None
    except Exception as error:
        return "", describe(error)


def _fail(row: Row, error: Exception) -> Row:
    return replace(row, errors=tuple(earlier or describe(error) for earlier in row.errors))


@dataclass
class Worker:
    """Caption the tasks of one process and write their records."""

    captioner: Captioner
    journal: Journal
    progress: Progress | Tally
    process: int
    run: str
    batch_tokens: int  # it shrinks when memory runs out
    batch_size: int
    refuse_above: int = REFUSE_ABOVE
    decoders: int = 8
    memory: int = 2 << 30  # bytes of pictures in decoding (a quarter) and of batches ahead of the model
    slack: float = 1.0  # reduce pictures that the processor would make smaller by more than this factor

    def work(self, tasks: Sequence[Task]) -> None:
        """Caption all tasks. A batch that exceeds the memory is halved, and later batches are no larger."""
        pool = ThreadPoolExecutor(self.decoders)
        read = self.reader()
        pixels_per_token = self._pixels_per_token()

        def weigh(batch: list[Task]) -> tuple[int, int]:
            weights = [memory_of(task, pixels_per_token) for task in batch]
            return sum(while_prepared for while_prepared, _ in weights), sum(afterwards for _, afterwards in weights)

        def prepare(batch: list[Task]) -> Ready:
            ready = self.prepare(list(pool.map(read, batch)))
            return replace(ready, inputs=self.captioner.send(ready.inputs))

        batches = pack(tasks, self.batch_tokens, self.batch_size)
        begin = perf_counter()
        try:
            for ready in prepared_ahead(batches, prepare, weigh, self.memory * 3 // 4):
                self.progress.add(waited=perf_counter() - begin)
                self.caption(ready)
                begin = perf_counter()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _pixels_per_token(self) -> int:
        if not self.captioner.processor:
            return 1
        images = self.captioner.processor.image_processor
        return (images.patch_size * images.merge_size) ** 2

    def reader(self) -> Callable[[Task], Row]:
        """Return a function that decodes one item in any thread. All threads share a quarter of the memory."""
        processor = self.captioner.processor
        resize = reduced(processor, self.slack) if processor is not None else None
        gate = Gate(self.memory // 4)
        return lambda task: decode(task, processor, self.refuse_above, resize, gate)

    def prepare(self, rows: list[Row]) -> Ready:
        """Encode the decoded items of a batch, and sort out those that failed."""
        self.progress.read(len(rows))
        good = [row for row in rows if not row.failed]
        try:
            inputs = self._encode(good)
        except Exception:  # the processor refuses an item, which must not cost the whole batch: find it
            rows = [self._checked(row) for row in rows]
            good = [row for row in rows if not row.failed]
            inputs = self._encode(good)
        return Ready(failed=[row for row in rows if row.failed], rows=good, inputs=inputs)

    def _checked(self, row: Row) -> Row:
        try:
            if not row.failed:
                self._encode([row])
            return row
        except Exception as error:  # not only ValueError: a prompt that holds an image token gives IndexError
            return _fail(row, error)

    def _encode(self, rows: Sequence[Row]) -> list[Inputs]:
        """Return the model's inputs of rows, for every prompt."""
        media = [row.medium for row in rows if row.medium is not None]
        if not media:
            return []
        prompt_count = len(rows[0].prompts)
        return [self.captioner.encode(media, [row.prompts[index] for row in rows]) for index in range(prompt_count)]

    def caption(self, ready: Ready) -> None:
        """Caption a batch that is ready, and write its records."""
        captions: list[list[Caption] | Exception] = []
        for rows in _split(ready.rows, self.batch_tokens):
            inputs = ready.inputs if len(rows) == len(ready.rows) else []
            captions += halve_on_oom(lambda part, inputs=inputs: self._caption(part, inputs), rows)
        records = []
        for row in ready.failed:
            records += self._records_of(row, [])
        for row, result in zip(ready.rows, captions, strict=True):
            if isinstance(result, Exception):
                records += self._records_of(_fail(row, result), [])
            else:
                records += self._records_of(row, result)
        self._write([*ready.failed, *ready.rows], records)

    def _caption(self, rows: Sequence[Row], inputs: list[Inputs]) -> list[list[Caption]]:
        """Return the captions of rows, one for every prompt."""
        prepared = list(inputs) or self.captioner.send(self._encode(rows))
        tasks = [row.task for row in rows]
        seeds = []
        for index in range(len(prepared)):
            seeds.append([self.captioner.seed_of(task.item.key, task.prompts[index]) for task in tasks])
        try:
            captions_by_prompt = self.captioner.generate(prepared, seeds)
        except torch.OutOfMemoryError:
            inputs.clear()  # their pixels are in the memory that is full
            if len(rows) > 1:
                self.batch_tokens = min(self.batch_tokens, max(1, sum(task.tokens for task in tasks) // 2))
                self.progress.add(halved=1)
            raise
        self.progress.add(vision=self.captioner.vision_tokens(prepared[0]))
        return [list(captions) for captions in zip(*captions_by_prompt, strict=True)]

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

    def _write(self, rows: Sequence[Row], records: list[Record]) -> None:
        self.journal.append(self.process, records)
        self.progress.add(
            items=len(rows),
            failed=sum(record.status == "error" for record in records),
            cost=sum(cost(row.task, self.captioner.max_new_tokens) for row in rows),
            text=sum(record.tokens or 0 for record in records),
        )


@dataclass
class _Pending(Generic[Result]):
    """A batch in preparation, with its bytes until it is prepared and afterwards."""

    future: Future[Result]
    most_bytes: int
    least_bytes: int

    @property
    def weight(self) -> int:
        return self.least_bytes if self.future.done() else self.most_bytes


def prepared_ahead(
    batches: Iterable[Batch],
    prepare: Callable[[Batch], Result],
    weigh: Callable[[Batch], tuple[int, int]],
    memory: int,
) -> Iterator[Result]:
    """Yield the prepared batches in order, and prepare a few of the next ones meanwhile."""
    pending: deque[_Pending[Result]] = deque()
    pool = ThreadPoolExecutor(_PREPARED_AT_A_TIME)
    try:
        for batch in batches:
            most_bytes, least_bytes = weigh(batch)
            while pending and (
                len(pending) > _WAITING or sum(waiting.weight for waiting in pending) + most_bytes > memory
            ):
                yield pending.popleft().future.result()
            pending.append(_Pending(pool.submit(prepare, batch), most_bytes, least_bytes))
        while pending:
            yield pending.popleft().future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _split(rows: list[Row], most_tokens: int) -> Iterator[list[Row]]:
    """Split rows into parts of at most so many vision tokens. One row alone may exceed them."""
    part: list[Row] = []
    tokens = 0
    for row in rows:
        if part and tokens + row.task.tokens > most_tokens:
            yield part
            part = []
            tokens = 0
        part.append(row)
        tokens += row.task.tokens
    if part:
        yield part
