"""The trained captioners decode by `graphed_decoding` as they do by stock in bf16.

`test_caption_model.py` compares their captions in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import counts_of
from support.recorded_ops import OperationRecorder
from tiny import FAMILIES

from hf_vit_accel import graphed_decoding

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "tiny_captioner")]

import parity  # noqa: E402

Recorder = type[OperationRecorder]


@pytest.mark.matrix  # `test_decoding.py` compares logits in bf16
@pytest.mark.parametrize("family", FAMILIES)
def test_captions_in_bf16_are_those_of_stock(family: str, recorder: Recorder) -> None:
    scenes = 400
    model: Any = parity.load(family, torch.bfloat16)
    rows: list[bool] = []
    for batch in parity.held_out(family, scenes, size=12):
        inputs = batch.inputs | {name: value.bfloat16() for name, value in batch.inputs.items() if "pixel" in name}
        stock = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        ours = model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=graphed_decoding)
        width = max(stock.shape[1], ours.shape[1])
        padded = [torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1) for tokens in (stock, ours)]
        rows += (padded[0] == padded[1]).all(1).tolist()
    assert len(rows) == scenes and not counts_of(model).reasons
    assert sum(rows) >= 0.995 * scenes
