"""Write files whole or not at all, lock folders, fingerprint settings, and print names of files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
_MODULES = ("accelerate.commands.", "torch.distributed.")
_INTERVAL = 0.1  # seconds
_MESSAGE = b"\nthe launcher of this process was killed, so the process ends, too\n"


def end_with_launcher() -> None:
    """End this process if `accelerate launch` or `torchrun` started it and is killed.

    A launcher that SIGKILL ends cannot end its processes. They would go on, and keep the output folder locked. A
    process that was started from a shell outlives the shell.
    """
    launcher = os.getppid()
    if _is_launcher(launcher):
        threading.Thread(target=_end_after, args=(launcher,), name="launcher", daemon=True).start()


def _is_launcher(process: int) -> bool:
    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name in _PROGRAMS or word.startswith(_MODULES) for word in words[:4])


def _end_after(launcher: int) -> None:
    """Wait until another process has adopted this one, then end."""
    while os.getppid() == launcher:
        time.sleep(_INTERVAL)
    with suppress(OSError):  # nobody may read the output any more
        os.write(2, _MESSAGE)
    os._exit(1)  # from a thread nothing else ends a process that waits for another one


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CANNOT_WRITE = (*FULL, errno.EROFS, errno.EIO, errno.EACCES)
_SHOWN = 5
Settings = dict[str, Any]
"""Settings of a run as JSON holds them."""


def replace_file(path: Path, text: str) -> None:
    """Write a file. If that is interrupted, the file stays as it was."""
    with part_of(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` at the end of the with block unless that raises."""
    # The name is short, since that of `path` may be as long as the file system allows.
    part = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def fingerprint(settings: Settings) -> str:
    """Return a short name for settings: equal settings have equal names, in any order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def lock(folder: Path, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Keep other runs out of a folder for the length of a with block, or until the process ends.

    Without locks in the file system or the operating system, other runs are not kept out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        try:
            import fcntl
        except ImportError:  # pragma: no cover, only Windows lacks it
            yield lambda: None
            return
        # Without this, loaders of data would keep the lock of a killed process until they notice its end.
        os.register_at_fork(after_in_child=file.close)
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
    print(line.encode("utf-8", errors="backslashreplace").decode(), flush=True)
