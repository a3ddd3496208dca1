"""Read the checkpoints of the trained captioners once, for tests that start the programs of examples often."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
from captioner import checkpoints
from captioner import main as batch_caption
from captioner.checkpoints import config_of
from captioner.processors import load_processor
from programs import CAPTIONERS
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

_read_model = lru_cache(maxsize=4)(batch_caption.load_model)
_read_processor = lru_cache(load_processor)
_read_config = lru_cache(config_of)


def load_once(*arguments: object) -> PreTrainedModel:
    """Stand in for `batch_caption.load_model`: read a model once, and return copies that share its weights."""
    model = _read_model(*arguments)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def load_processor_once(model: str, revision: str | None = None) -> ProcessorMixin:
    """Stand in for `load_processor`. Of a trained captioner, return a copy of a processor that is read once."""
    if _is_captioner(model):
        return copy.deepcopy(_read_processor(model, revision))
    return load_processor(model, revision)


def config_once(model: str, revision: str | None) -> PretrainedConfig:
    """Stand in for `config_of`. Of a trained captioner, return a copy of a config that is read once."""
    if _is_captioner(model):
        return copy.deepcopy(_read_config(model, revision))
    return config_of(model, revision)


def _is_captioner(model: str) -> bool:
    """Return whether a folder is that of a trained captioner, which no test changes."""
    return Path(model).parent == CAPTIONERS


STAND_INS = {"load_model": load_once, "load_processor": load_processor_once, "config_of": config_once}
"""Stand-ins by the names that they replace."""


def read_once(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let modules of examples read every checkpoint once; by default those that caption."""
    for module in modules or (batch_caption, checkpoints):
        for name in STAND_INS.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, STAND_INS[name])
