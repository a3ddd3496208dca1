"""Write files whole or not at all, lock folders, fingerprint settings, and print names of files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CANNOT_WRITE = (*FULL, errno.EROFS, errno.EIO, errno.EACCES)
_SHOWN = 5
_SIGNAL_AT_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of Linux
Settings = dict[str, Any]  # settings of a run as JSON holds them


def replace_file(path: Path, data: bytes) -> None:
    """Write a file. If that is interrupted, the file stays as it was."""
    # The name is short, since that of `path` may be as long as the file system allows.
    part = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def encoded(text: str) -> bytes:
    """Return text as UTF-8. Names of files that are not UTF-8 hold lone surrogates, which become JSON's escapes."""
    return text.encode("utf-8", errors="backslashreplace")


def fingerprint(settings: Settings) -> str:
    """Return a short name for settings: equal settings have equal names, in any order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def end_with_launcher() -> None:
    """End this process when `accelerate launch` or `torchrun` is killed, which cannot end its processes then.

    They would go on, and keep the output folder locked. A process that was started from a shell outlives the shell.
    """
    is_launched = "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if is_launched and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_DEATH_OF_PARENT, signal.SIGKILL)


@contextmanager
def lock(folder: Path, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Keep other runs out of a folder for the length of a with block, or until the process ends.

    Yields a function that lets other processes of the same run in. Without locks in the file system, other runs are not
    kept out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {folder}; wait for it, or name another output") from None
        except OSError:
            yield lambda: None
        else:
            yield lambda: fcntl.flock(file, fcntl.LOCK_SH)


def some(names: Sequence[str]) -> str:
    """Join the first few names, and count the others."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def say(line: str) -> None:
    """Print a line at once. It may hold names of files that are no valid UTF-8."""
    print(encoded(line).decode(), flush=True)
