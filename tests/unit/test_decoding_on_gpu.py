"""`graphed_decoding` with real CUDA graphs, beside stock."""

import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from support.decoding import both, counts_of
from tiny import TINY

from hf_vit_accel import graphed_decoding
from hf_vit_accel.decoding import model_in_loop
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
    assert all(step.replay is not None for step in steps_of(model).kept.values())


def test_greedy_calls_do_not_wait_for_their_steps() -> None:
    """Rows end by themselves, and the waits of a call do not grow with its tokens."""
    model = TINY["qwen2_5_vl"].build().cuda()
    inputs = on_gpu(tiny.left_padded(model))
    rows, columns = inputs["input_ids"].shape
    free = both(model, inputs, max_new_tokens=40, min_new_tokens=40)
    ends = [int(free[row, columns + 8 + 5 * row]) for row in range(rows)]
    both(model, inputs, max_new_tokens=40, eos_token_id=ends)
    waits = []
    for tokens in (20, 40):
        options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        both(model, inputs, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            model.generate(**inputs, **options, custom_generate=graphed_decoding)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(Counter(f"{Path(wait.filename).name}:{wait.lineno}" for wait in caught))
    assert not waits[1] - waits[0]


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


@pytest.mark.parametrize("bits", [4, 8])
def test_linears_of_bitsandbytes(bits: int) -> None:
    """Captured where the kernels can be, else decoded by stock with the reason. The tokens are stock's."""
    bnb = pytest.importorskip("bitsandbytes")
    model = TINY["qwen2_5_vl"].build().half()
    for layer in model.model.language_model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            linear = getattr(owner, name)
            kind = bnb.nn.Linear4bit if bits == 4 else bnb.nn.Linear8bitLt
            options = {} if bits == 4 else {"has_fp16_weights": False, "threshold": 6.0}
            quantised = kind(linear.in_features, linear.out_features, bias=linear.bias is not None, **options)
            quantised.load_state_dict(linear.state_dict())
            setattr(owner, name, quantised)
    model = model.cuda()
    for inputs in ({"input_ids": torch.tensor([[5, 6, 7]])}, {"input_ids": torch.tensor([[5, 6, 7]] * 8)}):
        logits = [
            model.generate(
                **on_gpu(inputs),
                max_new_tokens=20,
                min_new_tokens=20,
                return_dict_in_generate=True,
                output_logits=True,
                custom_generate=custom_generate,
            ).logits
            for custom_generate in (None, graphed_decoding)
        ]
        torch.testing.assert_close(logits[1][1], logits[0][1], atol=0.02, rtol=0.02)
    counts = counts_of(model)
    assert counts.static_calls == 2 or all("capturing" in reason for reason in counts.reasons)


def test_keys_of_a_large_batch_are_in_memory_once() -> None:
    """Groups of the prompt write into the step's cache, and stock proves a new step with eight rows."""
    sizes = dict(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=128, hidden_size=256)
    config = transformers.Qwen3Config(vocab_size=60, intermediate_size=256, **sizes)
    model = tiny.randomise(transformers.Qwen3ForCausalLM(config)).eval().to("cuda", torch.bfloat16)
    lengths = torch.linspace(100, 2000, 64).long().cuda()
    mask = (torch.arange(2000, device="cuda") >= 2000 - lengths[:, None]).long()
    inputs = {"input_ids": torch.randint(3, 60, (64, 2000), device="cuda") * mask, "attention_mask": mask}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.generate(**inputs, max_new_tokens=16, pad_token_id=0, custom_generate=graphed_decoding)
    peak = torch.cuda.max_memory_allocated() - before
    assert counts_of(model).static_calls == 1 and steps_of(model).groups > 4
    cache = 64 * 2048 * 2 * 8 * 8 * 128 * 2  # rows, slots, keys and values, layers, heads, width, bytes
    assert peak < 1.3 * cache + 1.5e9


def test_steps_and_their_cache_go_when_an_allocation_fails() -> None:
    """As in a training step after `generate`."""
    model = TINY["qwen2_5_vl"].build().cuda()
    inputs = on_gpu(tiny.left_padded(model))
    both(model, inputs, max_new_tokens=20)
    [step] = steps_of(model).kept.values()
    cache = step.nbytes - step.graph_bytes
    del step
    held = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
    assert not steps_of(model).kept and torch.cuda.memory_allocated() <= held - cache
    both(model, inputs, max_new_tokens=20)
    assert counts_of(model).static_calls == 2 and len(steps_of(model).kept) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longest", [9, 400])
def test_rows_that_have_ended_leave_steps(dtype: torch.dtype, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of their own and on one axis. Each smaller step is proven beside stock; in fp32 tokens are stock's."""
    monkeypatch.setattr(model_in_loop, "WORTH_A_CAPTURE", 1)
    qwen3 = TINY["qwen3_vl"]
    rope = qwen3.text["rope_parameters"] | {"mrope_section": [12, 10, 10]}
    heads = replace(qwen3, text=qwen3.text | {"head_dim": 64, "rope_parameters": rope})  # of which there are kernels
    model = heads.build().to("cuda", dtype)
    lengths = torch.tensor([longest] + [9] * 47, device="cuda")
    mask = (torch.arange(longest, device="cuda") >= longest - lengths[:, None]).long()
    options = dict(eos_token_id=list(range(3, 60, 7)), pad_token_id=0, max_new_tokens=150)
    for _ in range(2):
        ids = torch.randint(3, 60, (48, longest), device="cuda") * mask
        inputs = {"input_ids": ids, "attention_mask": mask}
        if dtype == torch.float32:
            both(model, inputs, **options)
        else:
            model.generate(**inputs, **options, custom_generate=graphed_decoding)
    steps = steps_of(model)
    [step] = steps.kept.values()
    assert counts_of(model).static_calls == 2 and not counts_of(model).reasons
    assert steps.rows_left >= 48 and len(step.smaller) > 1 and set(step.smaller) <= {36, 27, 20, 15, 11, 8}
    assert all(smaller.replay is not None for smaller in step.smaller.values())
    assert (step.room.offsets_B is not None) == (longest == 400)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_that_wait_begin_between_replays(family: str) -> None:
    """The room is used again by the next call, and rows leave once none waits any more."""
    model = TINY[family].build().cuda()
    row = on_gpu(tiny.left_padded(model))
    inputs = {name: torch.cat([value] * 15) for name, value in row.items()}
    decode = partial(graphed_decoding, max_rows=10)
    for ends in (list(range(3, 50, 9)), list(range(3, 50, 20)), None):
        both(model, inputs, max_new_tokens=40, custom_generate=decode, eos_token_id=ends, pad_token_id=2)
    assert steps_of(model).rows_waited == 60 and not steps_of(model).divided and not counts_of(model).reasons
