"""Find out, in the first process and before a model is loaded, which run this is and what it has to do."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

import accelerate
import torch
import transformers

import hf_vit_accel
from captioner.checkpoints import identity
from captioner.files import fingerprint, lock, say, some
from captioner.journal import Entry, Journal
from captioner.options import Options
from captioner.plan import Plan, check_prompts, make_plan
from captioner.sources import Found, find


@dataclass(frozen=True, kw_only=True)
class Prepared:
    start: int  # number of this start in the output folder
    entry: Entry  # of this start in the manifest, with the name of its run
    plan: Plan
    clashed: bool  # items share a key


def prepare(options: Options, on_cuda: bool, stack: ExitStack) -> Prepared:
    """Find the items, plan what to do, and print both. The folder is locked as long as the stack is open."""
    journal = Journal(options.output)
    share_lock = None if options.dry_run else stack.enter_context(lock(options.output, alone=True))
    starts = journal.manifest()["runs"]
    last_start = starts[-1] if starts else {}
    checkpoint_settings, title = identity(options.model, options.revision)
    settings = checkpoint_settings | options.settings(on_cuda)
    run = fingerprint(settings)
    say(f"model {title}")
    same_root = options.root or last_start.get("root")  # so that files keep their keys
    root = os.path.realpath(same_root) if same_root and os.path.isdir(same_root) else None
    found_items = find(options.inputs, column=options.column, root=root)
    _say_passed_over(found_items)
    items = found_items.items[: options.limit]
    records = [record for record in journal.records() if record.run == run]
    plan = make_plan(items, options.prompts, records, retry_errors=options.retry_errors)
    if plan.tasks:
        captioned = {record.prompt for record in records if record.caption is not None}
        check_prompts([prompt for prompt in options.prompts if prompt not in captioned], items)
    _say_plan(plan, len(items), len(records), run)
    if last_start and not records:
        last_settings = last_start.get("settings", {})
        changed = [name for name in settings if settings[name] != last_settings.get(name)]
        say(f"a new run: {' and '.join(changed) or 'nothing'} changed")
    if share_lock is not None:
        share_lock()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, accelerate, hf_vit_accel)}
    entry = {
        "run": run,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": title,
        "settings": settings,
        "prompts": options.prompts,
        "inputs": options.inputs,
        "root": found_items.root,
        "records_by_prompt": dict(plan.expected_by_prompt),
        "versions": versions | {"python": platform.python_version()},
    }
    return Prepared(start=len(starts), entry=entry, plan=plan, clashed=bool(found_items.clashes))


def _say_plan(plan: Plan, items: int, records: int, run: str) -> None:
    say(f"{items} items, {len(plan.tasks)} of them to caption (run {run})")
    if items and not plan.tasks:
        say("Nothing is left. --no-patch begins no new run; --attempt with a new number captions everything anew.")
    if plan.outdated:
        say(f"{plan.outdated} captions are outdated, since their pictures or filled prompts changed")
    if records and not plan.matching:
        say(f"None of the {records} records here is of these inputs; are they another copy? Then see --root.")
    if plan.errors:
        say(f"{plan.errors} earlier errors are left alone; --retry-errors tries them again")


def _say_passed_over(found_items: Found) -> None:
    for why, paths in found_items.passed_over.items():
        say(f"passed over: {len(paths)} {why}: {some(paths)}")
    if found_items.clashes:
        say(f"error: {len(found_items.clashes)} items share a name with another: {some(found_items.clashes)}")
