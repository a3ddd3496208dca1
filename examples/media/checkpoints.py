"""Tell checkpoints apart by their contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from media.files import fingerprint, replace_file

__all__ = ["checkpoint", "identity"]

_OF_A_CHECKPOINT = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
_OF_TRAINING = ("optimizer.bin", "scheduler.bin", "trainer_state.json", "training_args.bin")


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


def identity(model: str, revision: str | None, output: Path, *, write: bool = False) -> tuple[dict[str, Any], str]:
    """What tells one checkpoint from another, and its name for people: a folder's contents, a commit of the Hub.

    Checksums that were computed once are kept in the output folder.
    """
    if Path(model).is_file():
        raise ValueError(f"{model} is a file; name the folder of the checkpoint")
    if Path(model).is_dir():
        if revision is not None:
            raise ValueError(f"--revision is for models on the Hub, and {model} is a folder")
        file = output / ".checksums.json"
        known: dict[str, str] = {}
        with suppress(OSError, ValueError):  # there is none yet, or it is damaged
            known = json.loads(file.read_text())
        files, sums = checkpoint(Path(model), known)
        if not files:
            raise ValueError(f"{model} holds no checkpoint")
        if write and not sums.items() <= known.items():
            with suppress(OSError):  # a full disk: what cannot do without it says so
                replace_file(file, json.dumps(known | sums))
        return {"files": files}, f"{model} (checksum {fingerprint(files)})"
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        missing = "no folder is there, and as a name on the Hub: "
        raise ValueError(f"cannot load {model}: {missing}{reason}") from None
    commit = getattr(config, "_commit_hash", None) or revision
    return {"model": model, "revision": commit}, f"{model} (revision {commit or 'unknown'})"
