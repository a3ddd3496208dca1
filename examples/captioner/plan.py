"""Decide what a run still has to do, from its items and earlier records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool

from captioner.batches import Task
from captioner.items import Item, UnknownField, checksum, fields, fill, named, open_item, size, stamp
from captioner.journal import Record

_FIELDS_OF_NAME = {"name", "stem", "folder", "key", "kind"}


@dataclass
class Plan:
    tasks: list[Task] = field(default_factory=list)
    updates: list[Record] = field(default_factory=list)  # end outdated records, and note new times of unchanged files
    outdated: int = 0  # captions
    expected_by_prompt: Counter[str] = field(default_factory=Counter)  # records in the end
    errors: int = 0  # earlier ones that are not retried
    matching: int = 0  # earlier records of these items


def make_plan(
    items: Sequence[Item], prompts: Sequence[str], records: Sequence[Record], *, retry_errors: bool = False
) -> Plan:
    plan = Plan()
    item_by_key = {item.key: item for item in items}
    # The error of a damaged shard has the shard's own key. Once the shard is mended, no item has that key.
    mended_shards = {item.source for item in items if item.source} - item_by_key.keys()
    done: set[tuple[str, str]] = set()
    with ThreadPool(8) as pool:  # asks the file system, and reads the files that have another time
        comparisons = pool.map(lambda record: holds(record, item_by_key.get(record.key)), records)
    for record, is_current in zip(records, comparisons, strict=True):
        item = item_by_key.get(record.key)
        plan.matching += item is not None or record.key in mended_shards
        has_changed = is_current is False or record.key in mended_shards
        is_requested_error = item is not None and record.prompt in prompts and record.status == "error"
        if has_changed or (is_requested_error and retry_errors):
            plan.outdated += record.caption is not None
            plan.updates.append(replace(record, status="outdated", caption=None))
            continue
        done.add((record.key, record.prompt))
        plan.errors += is_requested_error
        new_stamp = stamp(item) if item is not None and is_current else None
        if new_stamp and record.stamp and new_stamp != record.stamp:
            plan.updates.append(replace(record, stamp=new_stamp))
    for item in items:
        missing = tuple(prompt for prompt in prompts if (item.key, prompt) not in done)
        if missing:
            plan.tasks.append(Task(item=item, prompts=missing))
            plan.expected_by_prompt.update(missing)
    plan.expected_by_prompt.update(prompt for _, prompt in done if prompt in prompts)
    return plan


def holds(record: Record, item: Item | None) -> bool | None:
    """Tell whether an item has the picture and the filled prompt of a record; None if there is none, or unreadable."""
    if item is None:
        return None
    is_same_picture = same_picture(record, item)
    if not is_same_picture or named([record.prompt]) <= _FIELDS_OF_NAME or not (record.asked or record.error):
        return is_same_picture
    if item.source is not None and stamp(item) == record.stamp:
        return True  # columns of a row and members of a shard do not change without it, as texts beside a picture may
    try:
        return filled(record.prompt, item) == (record.asked or "")
    except Exception:  # the text is gone: captions that were made with it may stay
        return None


def same_picture(record: Record, item: Item) -> bool | None:
    """Tell whether an item still has the bytes of a record; None if they cannot be read."""
    current_stamp = stamp(item)
    length = size(item)
    if item.problem is not None or (length is None and item.row is None):
        return None
    if current_stamp is not None and current_stamp == record.stamp:
        return True
    if record.checksum is None:  # the picture could not be read, or the record is of the first version
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
    kind = "video" if item.kind == "video" else "picture"
    return fill(prompt, fields(item, named([prompt])) | {"kind": kind})


def check_prompts(prompts: Iterable[str], items: Iterable[Item]) -> None:
    """Raise ValueError for a prompt that no item can fill, before a model is loaded for it.

    An item whose metadata cannot be read may have any field.
    """
    for prompt in prompts:
        reason = ""
        for item in items:
            try:
                filled(prompt, item)
            except UnknownField as error:
                reason = max(reason, str(error), key=len)  # of the item with the most fields
                continue
            except Exception:
                pass
            break
        else:
            raise ValueError(f"no picture can fill a prompt: {reason}")
