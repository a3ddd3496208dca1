"""Work on a batch in two stages, as a cluster does: prepared on any CPU, captioned where a model is.

The stages need no cluster. They may be called in any order and several times; every record is written once.
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

import torch
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

import hf_vit_accel
from captioner.batches import Task, header_of
from captioner.files import lock
from captioner.journal import Batches
from captioner.model import Absent, Captioner, load_model, reuse_for
from captioner.options import Options
from captioner.pictures import REFUSE_ABOVE
from captioner.processors import limit_pixels, load_processor
from captioner.progress import Tally
from captioner.worker import Ready, Worker

__all__ = ["Answer", "Job", "anywhere", "make_ready", "measure"]

_READERS = 4  # threads of a worker that read: they mostly wait for the file system


@dataclass(frozen=True, kw_only=True)
class Job:
    """The facts of a run that all workers need.

    Args:
        options: Options of the command line.
        run: Fingerprint of the run.
        commit: Commit of a model on the Hub.
        on_gpu: Whether models run on GPUs.
        folder: Folder of the run's `Batches`.
    """

    options: Options
    run: str
    commit: str | None
    on_gpu: bool
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self.options.dtype_on(self.on_gpu))
        return dtype

    def worker(self, model: PreTrainedModel | Absent) -> Worker:
        """Return a worker that works on one batch at a time."""
        options = self.options
        Image.MAX_IMAGE_PIXELS = max(options.refuse_above, REFUSE_ABOVE)
        return Worker(
            captioner=Captioner(model, processor_of(options, self.commit), *options.decoding),
            journal=Batches(self.folder),
            progress=Tally(),
            process=0,
            run=self.run,
            batch_tokens=options.batch_tokens,
            batch_size=options.batch_size,
            refuse_above=options.refuse_above,
        )


def processor_of(options: Options, commit: str | None) -> ProcessorMixin:
    """Load the processor, once in a process."""
    return _processor(options.named, commit, options.min_pixels, options.max_pixels)


@cache
def _processor(model: str, commit: str | None, min_pixels: int | None, max_pixels: int | None) -> ProcessorMixin:
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
    ready = replace(ready, inputs=worker.captioner.send(ready.inputs))
    return pickle.dumps(ready, protocol=pickle.HIGHEST_PROTOCOL)


class Answer:
    """Caption batches that are ready, with a patched model in a process of its own."""

    def __init__(self, job: Job) -> None:
        options = job.options
        self.stack = ExitStack()
        self.lock = Lock()
        self.stack.enter_context(lock(job.folder.parent, alone=False))  # until the process ends
        device = torch.device("cuda" if job.on_gpu else "cpu")
        model = load_model(options.named, job.dtype, device, job.commit)
        if not options.no_patch:
            reuse = reuse_for(model, options.prompt or ())
            hf_vit_accel.patch(model, attention=options.attention, reuse=reuse)
        self.worker = job.worker(model)
        self.batches = Batches(job.folder)
        self.is_patched = not options.no_patch

    def __call__(self, batch: int, pickled: bytes | memoryview) -> Tally:
        """Write the records of a batch, unless they are written, and return its counts.

        Several threads call this. One thread uses the model, while the others send their batches to its GPU.

        Args:
            batch: Number of the batch.
            pickled: The batch, as `make_ready` returns it.
        """
        records = self.batches.read(batch)
        if records is not None:  # another worker wrote them, and died before it reported
            failed = sum(record.status == "error" for record in records)
            return Tally(failed=failed, text=sum(record.tokens or 0 for record in records))
        ready: Ready = pickle.loads(pickled)
        ready = replace(ready, inputs=self.worker.captioner.send(ready.inputs))
        with self.lock:
            tally = Tally()
            self.worker.process = batch
            self.worker.progress = tally
            self.worker.caption(ready)
            return tally

    def status(self) -> str:
        """Describe how the model runs."""
        return str(hf_vit_accel.status(self.worker.captioner.model)) if self.is_patched else "stock"
