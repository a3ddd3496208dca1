"""`graphed_decoding` with real CUDA graphs, beside stock."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from support.decoding import both, counts_of
from tiny import TINY

from hf_vit_accel import graphed_decoding
from hf_vit_accel.decoding.steps import steps_of

pytestmark = pytest.mark.gpu


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() for name, value in inputs.items()}


@pytest.mark.parametrize("family", TINY)
def test_replays_give_the_tokens_and_logits_of_stock(family: str) -> None:
    model = TINY[family].build().cuda()
    outputs = dict(return_dict_in_generate=True, output_logits=True)
    for inputs in (tiny.left_padded(model), tiny.chat_inputs(model, [(1, 4, 6)]), tiny.chat_inputs(model, [(4, 4, 4)])):
        for _ in range(2):
            both(model, on_gpu(inputs), max_new_tokens=200, min_new_tokens=200, **outputs)
            both(model, on_gpu(inputs), max_new_tokens=20, do_sample=True, num_return_sequences=2)
    assert not counts_of(model).reasons
    assert all(step.replay is not None for step in steps_of(model)._steps.values())


def test_weights_that_move_or_change_between_replays() -> None:
    model = TINY["qwen2_5_vl"].build().cuda()
    inputs = on_gpu(tiny.left_padded(model))
    for change in (torch.Tensor.neg_, torch.Tensor.mul_, torch.clone):
        both(model, inputs, max_new_tokens=40)
        with torch.no_grad():
            weight = model.lm_head.weight
            weight.data = change(weight, *([1.5] if change is torch.Tensor.mul_ else []))
        torch.cuda.empty_cache()
        both(model, inputs, max_new_tokens=40)
    assert counts_of(model).static_calls == 6


def test_streams_follow_each_other() -> None:
    model = TINY["qwen2_5_vl"].build().cuda()
    inputs = on_gpu(tiny.left_padded(model))
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            both(model, inputs, max_new_tokens=40)
    assert counts_of(model).static_calls == 3


def test_autocast_casts_weights_anew_in_every_replay() -> None:
    """torch keeps cast weights until autocast ends. A replay that read them would read freed memory."""
    model = TINY["qwen2_5_vl"].build().cuda()
    inputs = on_gpu(tiny.left_padded(model))
    outputs = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=12, min_new_tokens=12)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            stock = model.generate(**inputs, **outputs)
            ours = model.generate(**inputs, **outputs, custom_generate=graphed_decoding)
        torch.testing.assert_close(ours.logits[1], stock.logits[1], atol=0.05, rtol=0.05)
        torch.cuda.empty_cache()
        torch.full((1 << 24,), torch.nan, device="cuda")  # where freed weights would lie
    both(model, inputs, max_new_tokens=40)
    assert counts_of(model).static_calls == 4 and not counts_of(model).reasons
