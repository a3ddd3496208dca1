"""Work on a batch in two stages, as a cluster does: prepared on any CPU, captioned where a model is.

The stages need no cluster. They may be called in any order and several times: records that come twice count once.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock

import torch
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

import hf_vit_accel
from captioner.batches import Task, header_of
from captioner.files import lock
from captioner.journal import Journal
from captioner.model import Absent, Captioner, load_model
from captioner.options import Options
from captioner.pictures import REFUSE_ABOVE
from captioner.processors import limit_pixels, load_processor
from captioner.progress import Tally
from captioner.worker import Ready, Worker

_READERS = 4  # threads of a worker that read: they mostly wait for the file system


@dataclass(frozen=True, kw_only=True)
class Job:
    """The facts of a run that all workers need; `commit` is that of a model on the Hub."""

    options: Options
    run: str
    commit: str | None
    on_gpu: bool

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return getattr(torch, self.options.dtype_on(self.on_gpu))

    def worker(self, model: PreTrainedModel | Absent, shard: int = -1) -> Worker:
        """Return a worker that works on one batch at a time."""
        options = self.options
        Image.MAX_IMAGE_PIXELS = max(options.refuse_above, REFUSE_ABOVE)
        processor = _processor(options.named, self.commit, options.min_pixels, options.max_pixels)
        return Worker(
            captioner=Captioner(model, processor, *options.decoding),
            journal=Journal(options.output),
            progress=Tally(),
            process=shard,
            run=self.run,
            batch_tokens=options.batch_tokens,
            batch_size=options.batch_size,
            refuse_above=options.refuse_above,
        )


@cache
def _processor(model: str, commit: str | None, min_pixels: int | None, max_pixels: int | None) -> ProcessorMixin:
    """Load the processor, once in a process."""
    processor = load_processor(model, commit)
    limit_pixels(processor, min_pixels, max_pixels)
    return processor


def anywhere(task: Task) -> Task:
    """Make the path of a task absolute, since workers run in other folders."""
    item = task.item
    is_path = item.split is None or os.path.exists(item.file)
    return replace(task, item=replace(item, file=os.path.abspath(item.file))) if is_path else task


def measure(job: Job, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with their sizes, from the headers."""
    worker = job.worker(Absent(job.dtype))

    def measure_one(task: Task) -> Task:
        tokens, pixels = header_of(task.item, worker.captioner.processor, worker.refuse_above)
        return replace(task, tokens=tokens, pixels=pixels)

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(measure_one, tasks))


def make_ready(job: Job, batch: Sequence[Task]) -> bytes:
    """Read, decode and cut a batch into patches, and pickle it: all work that needs no model."""
    worker = job.worker(Absent(job.dtype))
    with ThreadPoolExecutor(_READERS) as pool:
        rows = list(pool.map(worker.reader(), batch))
    for row in rows:
        if isinstance(row.medium, Image.Image):
            row.medium.info.clear()  # profiles and thumbnails would travel with the picture
    ready = worker.prepare(rows)
    # `send` lets the prompts share their pixels, so that pickle writes them once.
    return pickle.dumps(replace(ready, inputs=worker.captioner.send(ready.inputs)), protocol=pickle.HIGHEST_PROTOCOL)


class Answer:
    """Caption batches that are ready, with a patched model in a process of its own."""

    def __init__(self, job: Job) -> None:
        options = job.options
        self.stack = ExitStack()
        self.lock = Lock()
        self.stack.enter_context(lock(options.output, alone=False))  # until the process ends
        device = torch.device("cuda" if job.on_gpu else "cpu")
        model = load_model(options.named, job.dtype, device, job.commit)
        self.worker = job.worker(model, Journal(options.output).new_shard())
        if not options.no_patch:
            self.worker.captioner.patching = options.patching(model)
            hf_vit_accel.patch(model, **self.worker.captioner.patching)
        self.is_patched = not options.no_patch

    def __call__(self, pickled: bytes | memoryview) -> Tally:
        """Write the records of a batch, and return its counts.

        Several threads call this. One thread uses the model, while the others send their batches to its GPU.
        """
        ready: Ready = pickle.loads(pickled)
        ready = replace(ready, inputs=self.worker.captioner.send(ready.inputs))
        with self.lock:
            self.worker.progress = tally = Tally()
            self.worker.caption(ready)
            return tally

    def status(self) -> str:
        """Describe how the model runs."""
        return str(hf_vit_accel.status(self.worker.captioner.model)) if self.is_patched else "stock"
