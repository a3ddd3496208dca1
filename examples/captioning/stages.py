"""What the workers of a cluster do with a batch, in two stages: made ready on any CPU, captioned where a model is.

No cluster is needed here: stages are called, in any order and as often as anybody likes, and every record comes once.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from media.batches import Task, header_of
from media.files import lock
from media.pictures import REFUSE_ABOVE
from media.processors import limit_pixels, load_processor
from PIL import Image

import hf_vit_accel
from captioning.captioner import Absent, Captioner, load_model, reuse_for
from captioning.journal import Batches
from captioning.options import Options
from captioning.progress import Tally
from captioning.worker import Worker

__all__ = ["Answer", "Job", "anywhere", "make_ready", "measure"]

_READERS = 4  # threads of a worker that read: they wait for the file system, mostly


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers are told. run: its fingerprint. commit: of a model on the Hub. folder: that of its `Batches`."""

    options: Options
    run: str
    commit: str | None
    on_gpu: bool
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        found: torch.dtype = getattr(torch, self.options.dtype_on(self.on_gpu))
        return found

    def worker(self, model: Any) -> Worker:
        """What works on batches, one at a time."""
        options, processor = self.options, processor_of(self.options, self.commit)
        Image.MAX_IMAGE_PIXELS = max(options.refuse_above, REFUSE_ABOVE)
        return Worker(
            captioner=Captioner(model, processor, *options.decoding),
            journal=Batches(self.folder),
            progress=Tally(),
            process=0,
            run=self.run,
            batch_tokens=options.batch_tokens,
            batch_size=options.batch_size,
            refuse_above=options.refuse_above,
        )


def processor_of(options: Options, commit: str | None) -> Any:
    """The processor, loaded once in a process."""
    return _processor(options.named, commit, options.min_pixels, options.max_pixels)


@cache
def _processor(named: str, commit: str | None, least: int | None, most: int | None) -> Any:
    processor = load_processor(named, commit)
    limit_pixels(processor, least, most)
    return processor


def anywhere(task: Task) -> Task:
    """The task with whole paths: workers stand in other folders."""
    item = task.item
    whole = item.split is None or os.path.exists(item.file)
    return replace(task, item=replace(item, file=os.path.abspath(item.file))) if whole else task


def measure(job: Job, tasks: Sequence[Task]) -> list[Task]:
    """The tasks with their sizes, from headers."""
    worker = job.worker(Absent(job.dtype))
    with ThreadPoolExecutor(_READERS) as pool:
        sizes = pool.map(lambda task: header_of(task.item, worker.captioner.processor, worker.refuse_above), tasks)
        return [
            replace(task, tokens=tokens, pixels=pixels) for task, (tokens, pixels) in zip(tasks, sizes, strict=True)
        ]


def make_ready(job: Job, batch: Sequence[Task]) -> bytes:
    """Reads, decodes and cuts a batch into patches: all that is done before there is a model."""
    worker = job.worker(Absent(job.dtype))
    with ThreadPoolExecutor(_READERS) as pool:
        rows = list(pool.map(worker.reader(), batch))
    for row in rows:
        if isinstance(row.seen, Image.Image):
            row.seen.info.clear()  # profiles, thumbnails, whatever a file says of itself: dead weight on the way
    failed, good, inputs = worker.prepare(rows)
    # `send` has the prompts share their pixels, of which pickle then writes one copy.
    return pickle.dumps((failed, good, worker.captioner.send(inputs)), protocol=pickle.HIGHEST_PROTOCOL)


class Answer:
    """A patched model with its graphs warm, in a process of its own; batches that are ready become records."""

    def __init__(self, job: Job) -> None:
        options, self.stack, self.lock = job.options, ExitStack(), Lock()
        self.stack.enter_context(lock(job.folder.parent, alone=False))  # until the process ends
        device = torch.device("cuda" if job.on_gpu else "cpu")
        model = load_model(options.named, job.dtype, device, job.commit)
        if not options.no_patch:
            how = dict(attention=options.attention, cuda_graphs=options.cuda_graphs)
            hf_vit_accel.patch(model, **how, reuse=reuse_for(model, options.prompt or ()))
            if options.cuda_graphs and job.on_gpu:
                hf_vit_accel.warmup(model, progress=False)
        self.worker = job.worker(model)
        self.batches = Batches(job.folder)
        self.patched = not options.no_patch

    def __call__(self, batch: int, ready: Any) -> Tally:
        """Writes the records of a batch, unless they are there: counts of them.

        Called by several threads: one has the model, the others bring their batches on the way to it.
        """
        if (records := self.batches.read(batch)) is not None:  # by somebody who died before he said so
            failed = sum(each.status == "error" for each in records)
            return Tally(failed=failed, text=sum(each.tokens or 0 for each in records))
        failed, good, inputs = pickle.loads(ready)
        inputs = self.worker.captioner.send(inputs)
        with self.lock:
            self.worker.process, self.worker.progress = batch, Tally()
            self.worker.caption(failed, good, inputs)
            return self.worker.progress

    def status(self) -> str:
        """How the model runs."""
        return str(hf_vit_accel.status(self.worker.captioner.model)) if self.patched else "stock"
