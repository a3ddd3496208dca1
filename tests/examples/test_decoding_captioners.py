"""The trained captioners decode by `graphed_decoding` as they do by stock: every token in fp32, captions in bf16."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import both, counts_of
from support.recorded_ops import OperationRecorder
from support.towers import ONE_TOWER
from tiny import FAMILIES

import hf_vit_accel
from hf_vit_accel import graphed_decoding

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "tiny_captioner")]

import parity  # noqa: E402

Recorder = type[OperationRecorder]


@pytest.mark.parametrize("family", ONE_TOWER)
def test_every_token_in_fp32_is_that_of_stock(family: str, recorder: Recorder) -> None:
    model: Any = hf_vit_accel.patch(parity.load(family, torch.float32))
    tokenizer = parity.load_tokenizer(family)
    batches = parity.held_out(family, 10, size=5)
    outputs = dict(return_dict_in_generate=True, output_logits=True, output_scores=True)
    captions: list[str] = []
    for batch in batches:
        output = both(model, batch.inputs, max_new_tokens=24, **outputs)
        new_tokens = output.sequences[:, batch.inputs["input_ids"].shape[1] :]
        captions += tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    both(model, batches[0].inputs, max_new_tokens=24, do_sample=True, temperature=1.3)
    assert counts_of(model).static_calls == len(batches) + 1 and not counts_of(model).reasons
    assert parity.score(captions, batches) >= 0.9 * len(captions)
    assert recorder.captures <= 2 * len(batches)


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
