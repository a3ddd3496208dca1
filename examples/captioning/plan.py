"""What a run is, and what it still has to do: pure functions of settings, items and records."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from captioning.batches import Task
from captioning.journal import Record
from captioning.sources import Item, size

__all__ = ["Plan", "checkpoint", "differences", "make_plan", "missing_processes"]

_LIMIT = re.compile(r"TooLarge: .* the limit is (\d+)")
_OF_A_CHECKPOINT = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
_OF_TRAINING = ("optimizer.bin", "scheduler.bin", "trainer_state.json", "training_args.bin")


@dataclass
class Plan:
    """tasks: what is to caption. stale: (key, prompt) of records that hold no more, as the file is another now, or
    the error is tried again. expected: how many records there are in the end. errors: earlier ones, left alone.
    known: earlier records; matching: those of them that are of these items."""

    tasks: list[Task] = field(default_factory=list)
    stale: set[tuple[str, str]] = field(default_factory=set)
    expected: int = 0
    errors: int = 0
    known: int = 0
    matching: int = 0


def make_plan(
    items: Sequence[Item],
    prompts: Sequence[str],
    records: Iterable[Record],
    *,
    retry_errors: bool = False,
    refuse_above: int = 0,
) -> Plan:
    """What is left. records: those of the same model and settings. refuse_above: an error that names a smaller limit
    holds no more."""
    plan = Plan()
    sizes = {item.key: size(item) for item in items}
    # The error of a damaged shard stands under the shard's own name, which is no item's once the shard is mended.
    mended = {item.source for item in items if item.source} - sizes.keys()
    errors, done = set(), set()
    for record in records:
        name = record.key, record.prompt
        here = record.key in sizes and record.prompt in prompts
        limit = _LIMIT.match(record.error or "")
        changed = sizes.get(record.key) not in (None, record.bytes) or record.key in mended
        retried = here and record.status == "error" and (retry_errors or (limit and int(limit[1]) < refuse_above))
        (plan.stale if changed or retried else done).add(name)
        if here and record.status == "error":
            errors.add(name)
        plan.known += 1
        plan.matching += record.key in sizes or record.key in mended
    done -= plan.stale
    plan.errors = len(errors - plan.stale)
    for item in items:
        missing = tuple(prompt for prompt in prompts if (item.key, prompt) not in done)
        if missing:
            plan.tasks.append(Task(item=item, prompts=missing, tokens=0))
    plan.expected = sum(prompt in prompts for _, prompt in done) + sum(len(task.prompts) for task in plan.tasks)
    return plan


def checkpoint(folder: Path, known: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The contents of a checkpoint as checksums, wherever it lies and whenever it was copied there; and all checksums.

    known: checksums of earlier runs, by path, size and time, which are not computed again.
    """
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _OF_A_CHECKPOINT and file.is_file()]
    files = [file for file in files if file.name not in _OF_TRAINING]
    stats = {file: f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files}

    def checksum(file: Path) -> str:
        if (found := known.get(stats[file])) is not None:
            return str(found)
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(8) as pool:
        sums = dict(zip(files, pool.map(checksum, files), strict=True))
    return {file.name: digest for file, digest in sums.items()}, {stats[file]: sums[file] for file in files}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What tells two runs' settings apart, for people."""
    found = []
    for name in [*new, *(name for name in old if name not in new)]:
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name == "files":
            before, now = (each if isinstance(each, Mapping) else {} for each in (before, now))
            files = sorted(file for file in {*before, *now} if before.get(file) != now.get(file))
            found.append(f"the checkpoint's {', '.join(files)}")
        else:
            found.append(f"{name}: {before} before, {now} now")
    return found


def missing_processes(started: int) -> str | None:
    """A warning if the launcher was asked for more processes: `accelerate launch --cpu` silently starts one."""
    if os.environ.get("WORLD_SIZE"):
        return None
    try:
        parent = psutil.Process().parent()
        asked = re.search(r"--num[_-]processes[= ](\d+)", " ".join(parent.cmdline() if parent else ()))
    except psutil.Error:
        return None
    if asked is None or int(asked[1]) <= started:
        return None
    return (
        f"warning: {asked[1]} processes were asked for and {started} was started; on a CPU launch with "
        "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu"
    )
