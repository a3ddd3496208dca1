"""What a run is, and what it still has to do: pure functions of settings, items and records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from media.batches import Task
from media.items import Item, checksum, fields, open_item, size, stamp
from media.prompts import fill, named

from captioning.journal import Record

__all__ = ["Plan", "differences", "filled", "holds", "make_plan", "missing_processes", "same_picture"]

_OF_THE_NAME = {"name", "stem", "folder", "key", "kind"}
_LIMIT = re.compile(r"TooLarge: .* the limit is (\d+)")


@dataclass
class Plan:
    """tasks: what is to caption. stale: (key, prompt) of records that hold no more, as the file or what is asked is
    another now, or the error is tried again; changed: how many of them are captions. stamps: by key, the new ones of
    files that are the same with another time. expected: how many records there are in the end. errors: earlier ones,
    left alone. known: earlier records; matching: those of them that are of these items."""

    tasks: list[Task] = field(default_factory=list)
    stale: set[tuple[str, str]] = field(default_factory=set)
    changed: int = 0
    stamps: dict[str, str] = field(default_factory=dict)
    expected: int = 0
    errors: int = 0
    known: int = 0
    matching: int = 0

    def revised(self, run: str, record: Record) -> Record | None:
        """A record of this run as it holds now, None for one that holds no more; of other runs as it is."""
        if record.run != run:
            return record
        if (record.key, record.prompt) in self.stale:
            return None
        return replace(record, stamp=self.stamps.get(record.key, record.stamp)) if record.stamp else record


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
    plan, records = Plan(), list(records)
    by_key = {item.key: item for item in items}
    # The error of a damaged shard stands under the shard's own name, which is no item's once the shard is mended.
    mended = {item.source for item in items if item.source} - by_key.keys()
    errors, done = set(), set()
    unsure = [each for each in records if each.key in by_key and not _untouched(each, by_key[each.key])]
    with ThreadPoolExecutor(8) as pool:  # files are read that have another time than they had
        verdicts = pool.map(lambda record: holds(record, by_key[record.key]), unsure)
        held = {id(record): verdict for record, verdict in zip(unsure, verdicts, strict=True)}
    for record in records:
        name, still = (record.key, record.prompt), held.get(id(record))
        here = record.key in by_key and record.prompt in prompts
        limit = _LIMIT.match(record.error or "")
        changed = still is False or record.key in mended
        if changed:
            plan.changed += record.caption is not None
        elif still and record.stamp is not None and (now := stamp(by_key[record.key])) is not None:
            plan.stamps[record.key] = now
        retried = here and record.status == "error" and (retry_errors or (limit and int(limit[1]) < refuse_above))
        (plan.stale if changed or retried else done).add(name)
        if here and record.status == "error":
            errors.add(name)
        plan.known += 1
        plan.matching += record.key in by_key or record.key in mended
    done -= plan.stale
    plan.errors = len(errors - plan.stale)
    for item in items:
        missing = tuple(prompt for prompt in prompts if (item.key, prompt) not in done)
        if missing:
            plan.tasks.append(Task(item=item, prompts=missing, tokens=0))
    plan.expected = sum(prompt in prompts for _, prompt in done) + sum(len(task.prompts) for task in plan.tasks)
    return plan


def _untouched(record: Record, item: Item) -> bool:
    same = record.stamp is not None and record.stamp == stamp(item)
    # Texts beside a picture may change without it; other columns of a row and members of a shard may not.
    return same and (item.source is not None or named([record.prompt]) <= _OF_THE_NAME)


def holds(record: Record, item: Item) -> bool | None:
    """Whether a record is of what the item is now, and of what is asked of it now; None where that cannot be read."""
    if not (same := same_picture(record, item)):
        return same
    if named([record.prompt]) <= _OF_THE_NAME or not (record.asked or record.error):
        return True
    try:
        return filled(record.prompt, item) == (record.asked or "")
    except Exception:  # as the text is gone: what was asked with it may stay
        return None


def same_picture(record: Record, item: Item) -> bool | None:
    """Whether a record is of the bytes that the item has now; None where they cannot be read."""
    now, length = stamp(item), size(item)
    if item.problem is not None or (length is None and item.row is None):
        return None
    if now is not None and now == record.stamp:
        return True
    if record.checksum is None:  # it could not be read, or the record is an old one
        return record.stamp is None and length in (None, record.bytes)
    if item.row is None and length != record.bytes:
        return False
    try:
        with open_item(item) as file:
            return checksum(file) == record.checksum
    except OSError:
        return None
    except Exception:
        return False


def filled(prompt: str, item: Item) -> str:
    """What is asked of an item. Raises ValueError for fields that it does not have, OSError for unreadable ones."""
    kind = {"kind": "video" if item.kind == "video" else "picture"}
    return fill(prompt, fields(item, named([prompt])) | kind)


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
