"""The stages as a pipeline of Ray Data: what runs where, how often it is tried, how much waits."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import torch
from media.batches import Task
from ray.data import ActorPoolStrategy, DataContext

from captioning.options import OnRay
from captioning.stages import Answer, Job, make_ready, measure

__all__ = ["captioned", "connect", "measured"]

_HEADERS = 1000  # that one task reads
_GIVEN_UP = 8  # batches that may end in an error of Python; beyond, something is wrong with all of them
_ONE: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}  # a row is a batch of ours already
_MODEL = 1 << 30  # bytes of a model on a CPU, beside which other things have room
_CALLS = 2  # batches in a process with a model: one is captioned, one on its way to the GPU


def connect(options: OnRay) -> bool:
    """Joins the cluster of RAY_ADDRESS or of this machine, or starts one. Whether models are to be on GPUs."""
    examples = Path(__file__).resolve().parents[1]
    ray.init(runtime_env={"py_modules": [str(examples / name) for name in ("captioning", "media")]})
    context = DataContext.get_current()
    context.max_errored_blocks, context.max_consecutive_actor_init_deaths = _GIVEN_UP, _GIVEN_UP
    context.enable_progress_bars = context.print_on_execution_start = False
    return options.device == "gpu" if options.device else ray.cluster_resources().get("GPU", 0) > 0


def measured(job: Job, tasks: Sequence[Task]) -> list[Task]:
    """The tasks with their sizes, from headers that the cluster reads."""
    if not tasks:
        return []
    parts = [tasks[start : start + _HEADERS] for start in range(0, len(tasks), _HEADERS)]
    rows = _rows(parts).map_batches(_measure, fn_args=[job], num_cpus=1, **_ONE).take_all()
    found = {row["number"]: pickle.loads(row["data"]) for row in rows}
    # What was given up has no size; it is read later all the same.
    return [task for number, part in enumerate(parts) for task in found.get(number, part)]


def captioned(job: Job, batches: Sequence[Sequence[Task]], most: int | None) -> Iterator[dict[str, Any]]:
    """Captions the batches: for each its number, counts, and how the model runs, once its records are written.

    As many batches are made ready as CPUs and the object store take; the pool of actors grows and shrinks with the
    cluster, up to `most`. A batch whose worker died is done by another one.
    """
    there = ray.cluster_resources()
    now = max(1, int(there.get("GPU", 0) if job.on_gpu else there["CPU"] // 2))
    most = most or (None if job.on_gpu else now)
    # Of equal needs, the two stages would be taken for one, and the actors would decode.
    device = {"num_gpus": 1} if job.on_gpu else {"num_cpus": 1, "memory": _MODEL}
    pool = ActorPoolStrategy(
        min_size=1,
        initial_size=min(now, most or now),
        max_size=most,
        max_concurrent_calls_per_actor=_CALLS,
        enable_true_multi_threading=True,
    )
    ready = _rows(batches).map_batches(_ready, fn_args=[job], num_cpus=1, **_ONE)
    counts = ready.map_batches(_Actor, fn_constructor_args=[job], compute=pool, **device, **_ONE)
    yield from counts.iter_rows()


def _rows(parts: Sequence[Sequence[Task]]) -> ray.data.Dataset:
    rows = [{"number": number, "data": pickle.dumps(list(part))} for number, part in enumerate(parts)]
    return ray.data.from_items(rows, override_num_blocks=len(rows))


def _row(number: int, data: bytes) -> pa.Table:
    return pa.table({"number": [number], "data": pa.array([data], pa.large_binary())})  # of more than 2 GiB, too


def _measure(table: pa.Table, job: Job) -> pa.Table:
    return _row(table["number"][0].as_py(), pickle.dumps(measure(job, pickle.loads(table["data"][0].as_py()))))


def _ready(table: pa.Table, job: Job) -> pa.Table:
    return _row(table["number"][0].as_py(), make_ready(job, pickle.loads(table["data"][0].as_py())))


class _Actor(Answer):
    def __call__(self, table: pa.Table) -> pa.Table:
        number = table["number"][0].as_py()
        try:
            counts = super().__call__(number, table["data"][0].as_buffer())
        except torch.AcceleratorError:  # all that is asked of the GPU in this process will fail
            os._exit(1)
        found = {name: counts[name] for name in ("failed", "vision", "text", "halved")}
        return pa.Table.from_pylist([{"number": number, "status": self.status(), **found}])
