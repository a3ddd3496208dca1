"""Decide what a run still has to do, from its settings, items and earlier records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from captioner.batches import Task
from captioner.files import Settings
from captioner.items import Item, checksum, fields, fill, named, open_item, size, stamp
from captioner.journal import Record

_FIELDS_OF_NAME = {"name", "stem", "folder", "key", "kind"}
_LIMIT = re.compile(r"TooLarge: .* the limit is (\d+)")


@dataclass
class Plan:
    """The work that a run has to do."""

    tasks: list[Task] = field(default_factory=list)
    stale: set[tuple[str, str]] = field(default_factory=set)  # key and prompt of records to be made anew
    changed: int = 0  # how many of them are captions
    stamps: dict[str, str] = field(default_factory=dict)  # by key, of files with another time and the same bytes
    expected_by_prompt: Counter[str] = field(default_factory=Counter)
    errors: int = 0  # earlier ones that are not retried
    records: int = 0  # earlier ones
    matching: int = 0  # how many of them belong to these items

    @property
    def expected(self) -> int:
        """Return how many records there are in the end."""
        return self.expected_by_prompt.total()

    def revised(self, run: str, record: Record) -> Record | None:
        """Update a record of this run: None for an outdated one. Records of other runs stay."""
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
    """Plan the remaining work."""
    plan = Plan()
    records = list(records)
    item_by_key = {item.key: item for item in items}
    # The error of a damaged shard has the shard's own key. Once the shard is mended, no item has that key.
    mended_shards = {item.source for item in items if item.source} - item_by_key.keys()
    is_current = _compare_with_files(records, item_by_key)
    done: set[tuple[str, str]] = set()
    errors: set[tuple[str, str]] = set()
    for record in records:
        name = (record.key, record.prompt)
        item = item_by_key.get(record.key)
        is_requested_error = item is not None and record.prompt in prompts and record.status == "error"
        has_changed = is_current.get(id(record)) is False or record.key in mended_shards
        if has_changed:
            plan.changed += record.caption is not None
        elif item is not None and is_current.get(id(record)) and record.stamp is not None:
            new_stamp = stamp(item)
            if new_stamp is not None:
                plan.stamps[record.key] = new_stamp
        is_retried = is_requested_error and (retry_errors or _allows_more(record, refuse_above))
        if has_changed or is_retried:
            plan.stale.add(name)
        else:
            done.add(name)
        if is_requested_error:
            errors.add(name)
        plan.records += 1
        plan.matching += item is not None or record.key in mended_shards
    done -= plan.stale
    plan.errors = len(errors - plan.stale)
    for item in items:
        missing = tuple(prompt for prompt in prompts if (item.key, prompt) not in done)
        if missing:
            plan.tasks.append(Task(item=item, prompts=missing, tokens=0))
    plan.expected_by_prompt.update(prompt for _, prompt in done if prompt in prompts)
    for task in plan.tasks:
        plan.expected_by_prompt.update(task.prompts)
    return plan


def _compare_with_files(records: Sequence[Record], item_by_key: Mapping[str, Item]) -> dict[int, bool | None]:
    """Return by `id` whether records hold for their items; without those whose stamps show that nothing changed."""
    uncertain = [
        record
        for record in records
        if record.key in item_by_key and not _has_same_stamp(record, item_by_key[record.key])
    ]
    with ThreadPoolExecutor(8) as pool:  # reads the files that have another time
        verdicts = pool.map(lambda record: holds(record, item_by_key[record.key]), uncertain)
        return {id(record): verdict for record, verdict in zip(uncertain, verdicts, strict=True)}


def _has_same_stamp(record: Record, item: Item) -> bool:
    is_same_file = record.stamp is not None and record.stamp == stamp(item)
    # Texts beside a picture may change without it. Columns of a row and members of a shard may not.
    return is_same_file and (item.source is not None or named([record.prompt]) <= _FIELDS_OF_NAME)


def _allows_more(record: Record, refuse_above: int) -> bool:
    limit = _LIMIT.match(record.error or "")
    return limit is not None and int(limit[1]) < refuse_above


def holds(record: Record, item: Item) -> bool | None:
    """Tell whether an item still has the picture and the filled prompt of a record; None if it cannot be read."""
    is_same_picture = same_picture(record, item)
    if not is_same_picture:
        return is_same_picture
    if named([record.prompt]) <= _FIELDS_OF_NAME or not (record.asked or record.error):
        return True
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
    """Fill the fields of a prompt for an item."""
    kind = "video" if item.kind == "video" else "picture"
    return fill(prompt, fields(item, named([prompt])) | {"kind": kind})


def unknown_fields(prompts: Iterable[str], items: Iterable[Item]) -> tuple[set[str], set[str]]:
    """Find fields of prompts that no item has, before a model is loaded for them.

    Reads metadata until every field was seen once. An item whose metadata cannot be read may have any field.
    """
    unknown = named(prompts) - _FIELDS_OF_NAME
    available = set(_FIELDS_OF_NAME)
    for item in items:
        if not unknown:
            break
        try:
            available |= fields(item, unknown).keys()
        except Exception:
            return set(), available
        unknown -= available
    return unknown, available


def differences(old: Settings, new: Settings) -> list[str]:
    """Describe how the settings of two runs differ."""
    lines = []
    for name in [*new, *(name for name in old if name not in new)]:
        before = old.get(name)
        after = new.get(name)
        if before == after:
            continue
        if name == "files":
            lines.append(f"the checkpoint's {', '.join(_changed_files(before, after))}")
        else:
            lines.append(f"{name}: {before} before, {after} now")
    return lines


def _changed_files(before: object, after: object) -> list[str]:
    old_checksums = before if isinstance(before, Mapping) else {}
    new_checksums = after if isinstance(after, Mapping) else {}
    names = {*old_checksums, *new_checksums}
    return sorted(name for name in names if old_checksums.get(name) != new_checksums.get(name))
