"""Tell checkpoints apart by their contents."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PretrainedConfig

from captioner.files import Settings, fingerprint

_SUFFIXES = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt")
_TRAINING_FILES = ("optimizer.bin", "scheduler.bin", "trainer_state.json", "training_args.bin")


def identity(model: str, revision: str | None) -> tuple[Settings, str]:
    """Identify a checkpoint: by the contents of its folder, or by its commit on the Hub. Also return a title."""
    config = config_of(model, revision)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(f"{model} ({config.model_type}) is not a vision-language model that transformers can load")
    if not Path(model).is_dir():
        commit = getattr(config, "_commit_hash", None) or revision
        return {"model": model, "revision": commit}, f"{model} (revision {commit or 'unknown'})"
    if revision is not None:
        raise ValueError(f"--revision is for models on the Hub, and {model} is a folder")
    checksums = checksums_of(Path(model))
    return {"files": checksums}, f"{model} (checksum {fingerprint(checksums)})"


def config_of(model: str, revision: str | None) -> PretrainedConfig:
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


def checksums_of(folder: Path) -> dict[str, str]:
    """Compute the checksums of a checkpoint's files, by name. Loading the model reads the same files once more."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]
    files = [file for file in files if file.name not in _TRAINING_FILES]

    def checksum(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(zip([file.name for file in files], pool.map(checksum, files), strict=True))
