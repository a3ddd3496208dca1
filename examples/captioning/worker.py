"""One process at work: tasks to records, batch by batch, the next batches decoded while one is captioned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from media.batches import Task, cost, halve_on_oom, memory_of, pack
from media.items import Item, checksum, holds_bytes, open_item, size, stamp
from media.pictures import REFUSE_ABOVE, Gate, Resize, TooLarge, read_frames, read_image
from media.processors import reduced
from PIL import Image

from captioning.captioner import Captioner, Clip
from captioning.journal import Batches, Journal, Record
from captioning.plan import filled
from captioning.progress import Progress, Tally

__all__ = ["Row", "Worker", "decode"]

_MAKING, _AHEAD = 3, 3  # batches that are made ready at a time, and that wait for the model


@dataclass(frozen=True)
class Row:
    """An item on its way: decoded, with its prompts filled in. errors: one a prompt, None where there is none."""

    task: Task
    errors: tuple[str | None, ...]
    seen: Image.Image | Clip | None = None
    prompts: tuple[str, ...] = ()
    width: int | None = None
    height: int | None = None
    bytes: int | None = None
    checksum: str | None = None
    stamp: str | None = None

    @property
    def failed(self) -> bool:
        """Whether no prompt can be answered."""
        return all(self.errors)


def describe(error: Exception) -> str:
    """The reason that stands in a record."""
    return f"{type(error).__name__}: {error}"


def decode(
    task: Task,
    processor: Any,
    refuse_above: int = REFUSE_ABOVE,
    resize: Resize | None = None,
    gate: Gate | None = None,
) -> Row:
    """Reads one item. Whatever goes wrong becomes its error: decoders raise nearly anything on damaged files."""
    item = task.item
    row = Row(task, (None,) * len(task.prompts), bytes=size(item), stamp=stamp(item))
    # A prompt that cannot be filled is left empty, so that the batch has equally many of all items.
    texts, errors = zip(*(_filled(prompt, item) for prompt in task.prompts), strict=True)
    row = replace(row, prompts=texts, errors=errors)
    try:
        with open_item(item) as file:
            row = replace(row, checksum=checksum(file), stamp=row.stamp if holds_bytes(item) else None)
            if item.kind == "video":
                frames, metadata = read_frames(file, Path(item.key).suffix, processor, refuse_above)
                return replace(row, seen=Clip(frames, metadata), width=metadata.width, height=metadata.height)
            image, (width, height) = read_image(file, refuse_above, resize, gate)
            return replace(row, seen=image, width=width, height=height)
    except TooLarge as error:
        return _fail(replace(row, width=error.width, height=error.height), error)
    except Exception as error:
        return _fail(row, error)


def _filled(prompt: str, item: Item) -> tuple[str, str | None]:
    """The text, and why there is none."""
    try:
        return filled(prompt, item), None
    except Exception as error:
        return "", describe(error)


def _fail(row: Row, error: Exception) -> Row:
    return replace(row, errors=tuple(before or describe(error) for before in row.errors))


@dataclass
class Worker:
    """What captions the tasks of one process and writes their records. process: with `Batches`, the batch's number."""

    captioner: Captioner
    journal: Journal | Batches
    progress: Progress | Tally
    process: int
    run: str
    batch_tokens: int
    batch_size: int
    refuse_above: int = REFUSE_ABOVE
    decoders: int = 8
    memory: int = 2 << 30
    slack: float = 1.0
    """Pictures that the processor makes smaller by more than so much are reduced before."""

    def work(self, tasks: Sequence[Task]) -> None:
        """Captions everything. A batch that the memory does not hold is halved, and later ones are made no larger.

        memory: bytes of pictures that are decoded (a quarter) and of batches ahead of the model (the rest).
        """
        pool, read, processor = ThreadPoolExecutor(self.decoders), self.reader(), self.captioner.processor
        unit = (processor.image_processor.patch_size * processor.image_processor.merge_size) ** 2 if processor else 1

        def weigh(batch: list[Task]) -> tuple[int, int]:
            weights = [memory_of(task, unit) for task in batch]
            return sum(most for most, _ in weights), sum(least for _, least in weights)

        def make(batch: list[Task]) -> tuple[list[Row], list[Row], list[Any]]:
            failed, good, inputs = self.prepare(list(pool.map(read, batch)))
            return failed, good, self.captioner.send(inputs)

        batches, begin = pack(tasks, self.batch_tokens, self.batch_size), perf_counter()
        try:
            for failed, good, inputs in _ahead(batches, make, weigh, self.memory * 3 // 4):
                self.progress.add(waited=perf_counter() - begin)
                self.caption(failed, good, inputs)
                begin = perf_counter()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def reader(self) -> Callable[[Task], Row]:
        """What reads one item, in any thread: all of them together take a quarter of the memory."""
        processor = self.captioner.processor
        return partial(
            decode,
            processor=processor,
            refuse_above=self.refuse_above,
            resize=reduced(processor, self.slack) if processor is not None else None,
            gate=Gate(self.memory // 4),
        )

    def caption(self, failed: list[Row], good: list[Row], inputs: list[Any]) -> None:
        """Captions what `prepare` made of a batch, and writes its records."""
        found: list[Any] = []
        for part in _split(good, self.batch_tokens):
            ready = inputs if len(part) == len(good) else None
            found += halve_on_oom(partial(self._caption, ready), part)
        self._write(failed + good, [None] * len(failed) + found)

    def prepare(self, rows: list[Row]) -> tuple[list[Row], list[Row], list[Any]]:
        """The items of a batch that failed, the others, and the others' inputs, one a prompt."""
        self.progress.read(len(rows))
        good = [row for row in rows if not row.failed]
        try:
            inputs = self._encode(good)
        except Exception:  # one that the processor refuses would cost the whole batch: find it
            rows = [self._checked(row) for row in rows]
            good = [row for row in rows if not row.failed]
            inputs = self._encode(good)
        return [row for row in rows if row.failed], good, inputs

    def _checked(self, row: Row) -> Row:
        try:
            if not row.failed:
                self._encode([row])
            return row
        except Exception as error:  # not only ValueError: a prompt that holds an image token gives IndexError
            return _fail(row, error)

    def _encode(self, rows: Sequence[Row]) -> list[Any]:
        seen = [row.seen for row in rows if row.seen is not None]
        if not seen:
            return []
        prompts = range(len(rows[0].prompts))
        return [self.captioner.encode(seen, [row.prompts[index] for row in rows]) for index in prompts]

    def _caption(self, ready: list[Any] | None, rows: Sequence[Row]) -> list[Any]:
        """Per row its captions, one a prompt. ready: the inputs of these very rows; emptied where memory runs out."""
        inputs = list(ready) if ready else self.captioner.send(self._encode(rows))
        tasks = [row.task for row in rows]
        seeds = [
            [self.captioner.seed_of(task.item.key, task.prompts[index]) for task in tasks]
            for index in range(len(inputs))
        ]
        try:
            by_prompt = self.captioner.generate(inputs, seeds)
        except torch.OutOfMemoryError:
            if ready:
                ready.clear()  # its pixels lie in the memory that is full
            if len(rows) > 1:
                self.batch_tokens = min(self.batch_tokens, max(1, sum(task.tokens for task in tasks) // 2))
                self.progress.add(halved=1)
            raise
        self.progress.add(vision=self.captioner.vision_tokens(inputs[0]))
        return [list(captions) for captions in zip(*by_prompt, strict=True)]

    def _write(self, rows: list[Row], captions: list[Any]) -> None:
        records = []
        for row, found in zip(rows, captions, strict=True):
            if isinstance(found, Exception):
                row = _fail(row, found)
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
                    asked=(row.prompts[index] or None) if row.prompts else None,
                    source=row.task.item.source,
                    row=row.task.item.number,
                    checksum=row.checksum,
                    stamp=row.stamp,
                )
                if error is None:
                    record = replace(record, caption=found[index].text, tokens=found[index].tokens)
                records.append(record)
        self.journal.append(self.process, records)
        self.progress.add(
            items=len(rows),
            failed=sum(record.status == "error" for record in records),
            cost=sum(cost(row.task, self.captioner.max_new_tokens) for row in rows),
            text=sum(record.tokens or 0 for record in records),
        )


def _ahead(
    batches: Iterable[Any], prepare: Callable[[Any], Any], weigh: Callable[[Any], tuple[int, int]], memory: int
) -> Iterator[Any]:
    """What `prepare` makes of each batch, in order, a few of them in the making.

    weigh: most bytes of a batch in the making, and once it is made. All together take no more than `memory`, unless one
    alone does.
    """
    waiting: deque[tuple[Any, int, int]] = deque()
    pool = ThreadPoolExecutor(_MAKING)
    try:
        for batch in batches:
            most, least = weigh(batch)
            while waiting and (len(waiting) > _AHEAD or _weight(waiting) + most > memory):
                yield waiting.popleft()[0].result()
            waiting.append((pool.submit(prepare, batch), most, least))
        while waiting:
            yield waiting.popleft()[0].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _weight(waiting: Iterable[tuple[Any, int, int]]) -> int:
    return sum(least if future.done() else most for future, most, least in waiting)


def _split(rows: list[Row], most_tokens: int) -> Iterator[list[Row]]:
    part: list[Row] = []
    for row in rows:
        if part and sum(r.task.tokens for r in part) + row.task.tokens > most_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
