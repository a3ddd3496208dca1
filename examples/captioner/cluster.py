"""Run the stages as a pipeline of Ray Data: where they run, how often they are tried, how many batches wait."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext

from captioner.batches import Task
from captioner.options import OnRay
from captioner.stages import Answer, Job, make_ready, measure

_HEADERS_PER_TASK = 1000
_MOST_FAILURES = 8  # batches that may end in a Python error; more of them mean that all batches fail
_ROW_BY_ROW: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}  # a row of Ray's holds a batch of ours
_MODEL_MEMORY = 1 << 30  # bytes of a model on a CPU, which leave room for other work
_BATCHES_PER_ACTOR = 2  # one is captioned, one is on its way to the GPU
_REPORTED = ("failed", "vision", "text", "halved")


def connect(options: OnRay) -> bool:
    """Join the cluster of RAY_ADDRESS or of this machine, or start one. Return whether models run on GPUs."""
    examples = Path(__file__).resolve().parents[1]
    ray.init(runtime_env={"py_modules": [str(examples / "captioner")]})
    context = DataContext.get_current()
    context.max_errored_blocks = _MOST_FAILURES
    context.max_consecutive_actor_init_deaths = _MOST_FAILURES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    if options.device:
        return options.device == "gpu"
    return ray.cluster_resources().get("GPU", 0) > 0


def measured(job: Job, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with their sizes, from headers that the cluster reads."""
    if not tasks:
        return []
    parts = [tasks[start : start + _HEADERS_PER_TASK] for start in range(0, len(tasks), _HEADERS_PER_TASK)]
    rows = _rows(parts).map_batches(_measure, fn_args=[job], num_cpus=1, **_ROW_BY_ROW).take_all()
    measured_parts = {row["number"]: pickle.loads(row["data"]) for row in rows}
    sized_tasks: list[Task] = []
    for number, part in enumerate(parts):
        # Ray may give up a part: its tasks have no sizes, but are captioned.
        sized_tasks += measured_parts.get(number, part)
    return sized_tasks


def captioned(job: Job, batches: Sequence[Sequence[Task]], most_actors: int | None) -> Iterator[dict[str, Any]]:
    """Caption the batches. CPUs and the object store bound how many batches are made ready ahead.

    The pool of actors grows and shrinks with the cluster. If the worker of a batch dies, another one takes it.
    """
    resources = ray.cluster_resources()
    models_now = max(1, int(resources.get("GPU", 0) if job.on_gpu else resources["CPU"] // 2))
    if most_actors is None and not job.on_gpu:
        most_actors = models_now
    # Stages of equal needs would be fused into one, and the actors would decode.
    device = {"num_gpus": 1} if job.on_gpu else {"num_cpus": 1, "memory": _MODEL_MEMORY}
    pool = ActorPoolStrategy(
        min_size=1,
        initial_size=min(models_now, most_actors or models_now),
        max_size=most_actors,
        max_concurrent_calls_per_actor=_BATCHES_PER_ACTOR,
        enable_true_multi_threading=True,
    )
    ready = _rows(batches).map_batches(_make_ready, fn_args=[job], num_cpus=1, **_ROW_BY_ROW)
    counts = ready.map_batches(_Actor, fn_constructor_args=[job], compute=pool, **device, **_ROW_BY_ROW)
    yield from counts.iter_rows()


def _rows(parts: Sequence[Sequence[Task]]) -> ray.data.Dataset:
    rows = [{"number": number, "data": pickle.dumps(list(part))} for number, part in enumerate(parts)]
    return ray.data.from_items(rows, override_num_blocks=len(rows))


def _row(number: int, data: bytes) -> pa.Table:
    return pa.table({"number": [number], "data": pa.array([data], pa.large_binary())})  # "large": above 2 GiB, too


def _measure(table: pa.Table, job: Job) -> pa.Table:
    tasks = pickle.loads(table["data"][0].as_py())
    return _row(table["number"][0].as_py(), pickle.dumps(measure(job, tasks)))


def _make_ready(table: pa.Table, job: Job) -> pa.Table:
    batch = pickle.loads(table["data"][0].as_py())
    return _row(table["number"][0].as_py(), make_ready(job, batch))


class _Actor(Answer):
    def __call__(self, table: pa.Table) -> pa.Table:
        number = table["number"][0].as_py()
        try:
            tally = super().__call__(table["data"][0].as_buffer())
        except torch.AcceleratorError:  # every later call to the GPU in this process would fail
            os._exit(1)
        counts = {name: tally[name] for name in _REPORTED}
        return pa.Table.from_pylist([{"number": number, "status": self.status(), **counts}])
