"""Tell checkpoints apart by their contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PretrainedConfig

from captioner.files import Settings, fingerprint, replace_file

_SUFFIXES = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
_TRAINING_FILES = ("optimizer.bin", "scheduler.bin", "trainer_state.json", "training_args.bin")


def checkpoint(folder: Path, cached: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Compute the checksums of a checkpoint's files."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]
    files = [file for file in files if file.name not in _TRAINING_FILES]
    versions = {file: f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files}

    def checksum(file: Path) -> str:
        if versions[file] in cached:
            return cached[versions[file]]
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(8) as pool:
        checksums = dict(zip(files, pool.map(checksum, files), strict=True))
    by_name = {file.name: checksums[file] for file in files}
    return by_name, {versions[file]: checksums[file] for file in files}


def config_of(model: str, revision: str | None) -> PretrainedConfig:
    """Read the configuration of a checkpoint."""
    if Path(model).is_file():
        raise ValueError(f"{model} is a file; name the folder of the checkpoint")
    try:
        return AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        if Path(model, "adapter_config.json").is_file():
            raise ValueError(
                f"{model} holds LoRA adapters: merge them into their model first, as examples/README.md shows"
            ) from None
        reason = str(error).strip().splitlines()[0]
        if Path(model).is_dir():
            raise ValueError(f"{model} holds no checkpoint: {reason}") from None
        raise ValueError(f"cannot load {model}: no folder is there, and as a name on the Hub: {reason}") from None


def identity(model: str, revision: str | None, output: Path, *, write: bool = False) -> tuple[Settings, str]:
    """Identify a checkpoint: by the contents of its folder, or by its commit on the Hub."""
    if not Path(model).is_dir():
        return _identity_on_hub(model, revision)
    if revision is not None:
        raise ValueError(f"--revision is for models on the Hub, and {model} is a folder")
    cache_file = output / ".checksums.json"
    cached: dict[str, str] = {}
    with suppress(OSError, ValueError):  # the file is not there yet, or damaged
        cached = json.loads(cache_file.read_text())
    checksums, computed = checkpoint(Path(model), cached)
    if not checksums:
        raise ValueError(f"{model} holds no checkpoint")
    _check_kind(model, config_of(model, None))
    if write and not computed.items() <= cached.items():
        with suppress(OSError):  # the run can do without this file; other writes report a full disk
            replace_file(cache_file, json.dumps(cached | computed))
    return {"files": checksums}, f"{model} (checksum {fingerprint(checksums)})"


def _check_kind(model: str, config: PretrainedConfig) -> None:
    """Raise ValueError for a model that takes no pictures, before its weights are loaded."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(f"{model} ({config.model_type}) is not a vision-language model that transformers can load")


def _identity_on_hub(model: str, revision: str | None) -> tuple[Settings, str]:
    config = config_of(model, revision)
    _check_kind(model, config)
    commit = getattr(config, "_commit_hash", None) or revision
    return {"model": model, "revision": commit}, f"{model} (revision {commit or 'unknown'})"
