"""The two stages of a cluster, without one: batches are prepared, captioned, written and not written again."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from captioner import stages
from captioner.batches import Task
from captioner.files import lock
from captioner.journal import Record
from captioner.model import Caption, Inputs
from captioner.options import OnRay
from captioner.prepare import prepare
from read_once import read_once
from support_captioning import (
    MODEL,
    PROMPT,
    WORDS,
    counted,
)

pytest.importorskip("pyarrow")


def job_of(inputs: Sequence[str], output: Path, **options: object) -> tuple[stages.Job, list[Task]]:
    """Return a job as the driver makes it, and its tasks."""
    all_options = OnRay(
        inputs=list(inputs), output=output, model=str(MODEL), prompt=[PROMPT], max_new_tokens=WORDS, **options
    )
    with ExitStack() as stack:
        ready = prepare(all_options, False, stack)
    return stages.Job(options=all_options, run=ready.run, commit=None, on_gpu=False), ready.plan.tasks


def test_a_batch_that_is_written_twice_is_there_once(
    mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_once(monkeypatch)
    job, tasks = job_of(mixed_inputs, tmp_path)
    answer = stages.Answer(job)
    first = answer(stages.make_ready(job, tasks))
    assert counted(tmp_path) == alone and first["vision"] and first["text"] and first["failed"] == 2
    with pytest.raises(ValueError, match="another run is writing"), lock(tmp_path, alone=True):
        pass
    answer.stack.close()
    assert stages.Answer(job)(stages.make_ready(job, tasks)) == first and counted(tmp_path) == alone
    assert len(list(tmp_path.glob("captions-*.jsonl"))) == 2, "another worker writes another shard"


def test_a_batch_that_the_memory_does_not_hold_is_halved(
    mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_once(monkeypatch)
    job, tasks = job_of(mixed_inputs, tmp_path)
    answer = stages.Answer(job)
    generate = answer.worker.captioner.generate

    def generate_up_to_five(inputs: Sequence[Inputs], seeds: Sequence[Sequence[int]]) -> list[list[Caption]]:
        if len(seeds[0]) > 5:
            raise torch.OutOfMemoryError
        return generate(inputs, seeds)

    monkeypatch.setattr(answer.worker.captioner, "generate", generate_up_to_five)
    assert answer(stages.make_ready(job, stages.measure(job, tasks)))["halved"] == 3  # 14 to 7 and 7, those to 3 and 4
    assert counted(tmp_path) == alone


def test_prompts_share_their_pixels_on_the_way(mixed_inputs: list[str], tmp_path: Path) -> None:
    job, tasks = job_of(mixed_inputs, tmp_path)
    one, two = (
        len(stages.make_ready(job, [replace(task, prompts=prompts) for task in tasks]))
        for prompts in ((PROMPT,), (PROMPT, "is the text above ?"))
    )
    assert one > 1_000_000 and two < 1.02 * one


def test_an_actor_patches_with_the_defaults(
    mixed_inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the attention is asked for: graphs are those of `patch(model)`."""
    calls: list[tuple[str, dict[str, object]]] = []
    fake = SimpleNamespace(patch=lambda model, **settings: calls.append(("patch", settings)))
    monkeypatch.setattr(stages, "hf_vit_accel", fake)
    monkeypatch.setattr(stages, "load_model", lambda name, dtype, device, commit: calls.append((str(device), {})))
    job, _ = job_of(mixed_inputs, tmp_path, attention="torch_varlen")
    stages.Answer(replace(job, on_gpu=True))
    assert calls == [("cuda", {}), ("patch", {"attention": "torch_varlen", "reuse": False})]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import `captioning.cluster` without Ray, which its functions of tables do not need."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.data", SimpleNamespace(ActorPoolStrategy=None, DataContext=None))
    monkeypatch.setitem(sys.modules, "captioner.cluster", None)
    monkeypatch.delitem(sys.modules, "captioner.cluster")
    return importlib.import_module("captioner.cluster")


def test_a_row_is_a_batch(
    cluster: ModuleType,
    mixed_inputs: list[str],
    alone: Counter[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_once(monkeypatch)
    job, tasks = job_of(mixed_inputs, tmp_path)
    sized = cluster._measure(cluster._row(5, pickle.dumps(tasks)), job)
    assert pickle.loads(sized["data"][0].as_py()) == stages.measure(job, tasks) != tasks
    actor = cluster._Actor(job)
    (reported,) = actor(cluster._make_ready(sized, job)).to_pylist()
    assert (reported["number"], reported["failed"], reported["halved"]) == (5, 2, 0) and "patched" in reported["status"]
    assert counted(tmp_path) == alone


def test_an_actor_whose_gpu_fails_leaves_its_batch_to_another(
    cluster: ModuleType, mixed_inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    read_once(monkeypatch)
    monkeypatch.setattr(os, "_exit", sys.exit)
    job, tasks = job_of(mixed_inputs, tmp_path)
    actor = cluster._Actor(job)
    monkeypatch.setattr(actor.worker.captioner, "generate", die)
    with pytest.raises(SystemExit):
        actor(cluster._make_ready(cluster._row(0, pickle.dumps(tasks)), job))
    assert not counted(tmp_path)
