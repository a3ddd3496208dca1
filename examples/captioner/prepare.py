"""Find out, in the first process and before a model is loaded, which run this is and what it has to do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from captioner.checkpoints import identity
from captioner.files import Settings, fingerprint, lock, say, some
from captioner.journal import Entry, Journal
from captioner.options import Options
from captioner.plan import Plan, check_prompts, make_plan
from captioner.sources import Found, find


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can begin."""

    run: str
    start: int  # number of this start in the output folder
    settings: Settings
    plan: Plan
    title: str
    root: str
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
    found_items = find(options.inputs, column=options.column, root=_root(options, last_start))
    _say_passed_over(found_items)
    items = found_items.items[: options.limit]
    records = [record for record in journal.records() if record.run == run]
    plan = make_plan(items, options.prompts, records, retry_errors=options.retry_errors)
    if plan.tasks:
        captioned = {record.prompt for record in records if record.caption is not None}
        check_prompts([prompt for prompt in options.prompts if prompt not in captioned], items)
    _say_plan(plan, len(items), run)
    if last_start and not records:
        last_settings = last_start.get("settings", {})
        changed = [name for name in settings if settings[name] != last_settings.get(name)]
        say(f"a new run: {' and '.join(changed) or 'nothing'} changed")
    if share_lock is not None:
        share_lock()
    return Prepared(
        run=run,
        start=len(starts),
        settings=settings,
        plan=plan,
        title=title,
        root=found_items.root,
        clashed=bool(found_items.clashes),
    )


def _root(options: Options, last_start: Entry) -> str | None:
    if options.root is None:
        last_root = last_start.get("root")  # so that files keep their keys
        return last_root if last_root and Path(last_root).is_dir() else None
    if not options.root.is_dir():
        raise ValueError(f"--root {options.root} is no folder")
    return str(options.root.resolve())


def _say_plan(plan: Plan, items: int, run: str) -> None:
    say(f"{items} items, {len(plan.tasks)} of them to caption (run {run})")
    if items and not plan.tasks:
        say("Nothing is left. --no-patch begins no new run; --attempt with a new number captions everything anew.")
    if plan.outdated:
        say(f"{plan.outdated} captions are outdated, since their pictures or filled prompts changed")
    if plan.records and not plan.matching:
        say(f"None of the {plan.records} records here is of these inputs; are they another copy? Then see --root.")
    if plan.errors:
        say(f"{plan.errors} earlier errors are left alone; --retry-errors tries them again")


def _say_passed_over(found_items: Found) -> None:
    for why, paths in found_items.passed_over.items():
        say(f"passed over: {len(paths)} {why}: {some(paths)}")
    if found_items.clashes:
        say(f"error: {len(found_items.clashes)} items share a name with another: {some(found_items.clashes)}")
