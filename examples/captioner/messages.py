"""Say how a run begins and ends, for `captioner/main.py` and `captioner/on_ray.py`."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from types import ModuleType
from typing import NoReturn

import accelerate
import torch
import transformers
import typer

import hf_vit_accel
from captioner.files import say
from captioner.journal import Entry, Record, Selection
from captioner.options import Options
from captioner.prepare import Prepared

_SHOWN_ERRORS = 5
_SHOWN_KEYS = 3
_MODULES: tuple[ModuleType, ...] = (torch, transformers, accelerate, hf_vit_accel)


def manifest_entry(options: Options, ready: Prepared, processes: int | None, device: str, status: str) -> Entry:
    """Return the manifest's entry of a run."""
    return {
        "run": ready.run,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": ready.title,
        "settings": ready.settings,
        "prompts": ready.prompts,
        "inputs": options.inputs,
        "root": ready.root,
        "column": options.column,
        "split": options.split,
        "overwrite": ready.overwrite,
        "records": ready.plan.expected,
        "records_by_prompt": dict(ready.plan.expected_by_prompt),
        "processes": processes,
        "device": device,
        "versions": {module.__name__: module.__version__ for module in _MODULES}
        | {"python": platform.python_version()},
        "status": status,
    }


def sentence(error: BaseException) -> str:
    """Return the first line of an error, which names the problem."""
    text = _first_line(str(error)) or type(error).__name__
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def refused(message: str, option: str, is_first: bool) -> Exception:
    """Return the exception for a mistake in an option. The first process prints it, and the others only end."""
    return typer.BadParameter(message, param_hint=option) if is_first else typer.Exit(2)


def cannot_load(options: Options, error: Exception, is_first: bool) -> Exception:
    """Return the exception for a model that cannot be loaded."""
    return refused(f"cannot load {options.named}: {sentence(error)}", "--model", is_first)


def stop(reason: str, code: int, *, drop_overwrite: bool, prints: bool) -> NoReturn:
    """End a run that the user has to start again."""
    if prints:
        command = "start the same command" + (" without --overwrite" if drop_overwrite else "")
        first_step = "remove the cause, and " if code == 1 else ""
        print(f"\n{reason}; the captions so far are kept: {first_step}{command} to go on", flush=True)
    raise typer.Exit(code)


def exit_by(
    records: Sequence[Record],
    expected: int,
    max_failures: float,
    has_failed: bool = False,
    can_go_on: bool = True,
) -> None:
    """Count the records, name some that are errors, and exit with 1 if records are missing or too many are errors."""
    keys_of: dict[str, list[str]] = {}
    for record in records:
        if record.status == "error":
            keys_of.setdefault(_first_line(record.error or ""), []).append(record.key)
    errors = sum(map(len, keys_of.values()))
    shown = len(keys_of) if len(keys_of) == _SHOWN_ERRORS + 1 else _SHOWN_ERRORS  # "1 other" would take a line, too
    for error, keys in sorted(keys_of.items(), key=lambda item: -len(item[1]))[:shown]:
        more = [] if len(keys) <= _SHOWN_KEYS else ["..."]
        say(f"  error, {len(keys)} x {error} ({', '.join(keys[:_SHOWN_KEYS] + more)})")
    if len(keys_of) > shown:
        print(f"  and {len(keys_of) - shown} other errors")
    if errors:
        print("  the records of status error in the output folder name all files")
    empty = sum(record.status == "ok" and not record.has_text for record in records)
    if empty:
        print(f"  {empty} captions are empty: the model ended at once; another prompt may help")
    print(f"{len(records) - errors - empty} of {len(records)} records have captions")
    if len(records) < expected:
        advice = "wait for the run, or start it once more"
        if not can_go_on:
            advice = "they stay so, since --overwrite began another run later"
        print(f"{expected - len(records)} records are missing: {advice}")
    too_many = errors > max_failures * len(records)
    if too_many:
        print(f"{errors} of {len(records)} records are errors: more than --max-failures {max_failures:g} allows")
    if has_failed or len(records) < expected or too_many:
        raise typer.Exit(1)


def partial_prompts(entry: Entry, selection: Selection) -> str:
    """Return why the newest prompts of a run are not merged unless they are named."""
    others = ", ".join(
        f"{shlex.quote(prompt)} has captions of {count} more pictures" for prompt, count in selection.by_prompt.items()
    )
    names = " or ".join(f"--prompt {shlex.quote(prompt)}" for prompt in (*selection.by_prompt, *entry["prompts"]))
    return (
        f"the newest prompts of run {entry['run']} have {len(selection.records)} records, and {others}; "
        f"name the prompts to merge: {names}, or --all-prompts{_how_to_finish(selection)}"
    )


def partial_run(entry: Entry, selection: Selection) -> str:
    """Return why the newest run is not merged unless it is named."""
    run = entry["run"]
    others = ", ".join(f"run {name} of {count}" for name, count in selection.by_run.items())
    names = " or ".join(f"--run {name}" for name in (run, *selection.by_run))
    of_prompts = f" of these prompts and {selection.prompts} of others" if selection.prompts else ""
    return (
        f"the newest run ({run}) has {len(selection.records)} records{of_prompts}, and others have captions of more "
        f"pictures ({others} more); name the run to merge: {names}" + _how_to_finish(selection)
    )


def _how_to_finish(selection: Selection) -> str:
    """Return the end of a message about a run that was not finished; else nothing."""
    if not selection.missing:
        return ""
    return f"; or start its command again, which writes the {selection.missing} records that it lacks"
