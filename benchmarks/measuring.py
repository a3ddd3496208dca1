"""Compute errors, alternate the order of contenders and write JSON files, for all benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_vit_accel import machine

Row = dict[str, Any]
"""A row of a JSON file."""
Grid = Sequence[tuple[int, int, int]]
"""Frames, height and width in patches of every image or video."""


STEPS_UNTIL_STEADY = 4
"""A training step is captured at its third call."""


def largest_error(outputs: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest relative L2 error of an output, computed in fp32."""
    errors = []
    for output, reference in zip(outputs, expected, strict=True):
        reference = reference.float()
        errors.append(float((output.float() - reference).norm() / reference.norm()))
    return max(errors)


def in_turn(contenders: Iterable[str], index: int) -> list[str]:
    """Order the contenders of a round: backwards in every other round, so that drift favours nobody."""
    names = list(contenders)
    return names[::-1] if index % 2 else names


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or "cpu"."""
    return machine.cuda_device_name() if device.type == "cuda" else "cpu"


def write_json(path: Path | None, document: Row) -> None:
    """Write a document to a file, if one was asked for."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
