"""The table of changes between calls: a user changes something, and the next calls compute what stock's compute then.

Rows are changes; `WHY` has the reason in `status` if later calls run stock. Columns are ways to call: eager, replayed,
with features of earlier calls, a copy under `like`, decoding. Graphs are truly recorded: a replay reads the tensors of
its capture, whatever modules hold now.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from support import copies
from support.decoding import both, counts_of
from support.recorded_ops import OperationRecorder
from support.towers import SHALLOW
from test_text_layers import compare, counts
from tiny import TINY, assert_close, outputs_of, pixels_for, randomise, tower_of
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

import hf_vit_accel
from hf_vit_accel import GraphConfig, ReuseConfig

GRID = [(1, 4, 12), (1, 12, 4)]
ROUNDS = 2
"""Calls before and after a change: the last one is replayed, or reuses features."""


@dataclass(frozen=True)
class Part:
    """The layers of a tower or of a text model, under one set of names."""

    root: Any
    layers: nn.ModuleList
    attention: Any  # of the last layer
    linear: str  # the name of the last linear of that attention, which is square
    norm: Any  # the first one of the last layer
    rotary: Any
    rotate: str  # the name of the function in the file of the attention that rotates

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.attention, self.linear).weight


def part_of_tower(tower: Any) -> Part:
    block = tower.blocks[-1]
    rotate = "apply_rotary_pos_emb_vision"
    return Part(tower, tower.blocks, block.attn, "proj", block.norm1, tower.rotary_pos_emb, rotate)


def part_of_text(model: Any) -> Part:
    text = model.model.language_model
    layer = text.layers[-1]
    rotate = "apply_rotary_pos_emb"
    return Part(model, text.layers, layer.self_attn, "o_proj", layer.input_layernorm, text.rotary_emb, rotate)


# --- changes ----------------------------------------------------------------------------------------------------------


Change = Callable[[Part], object]


def write(part: Part) -> None:
    with torch.no_grad():
        part.weight.mul_(1.5)


def resize(part: Part) -> None:
    """Give a weight other memory, as FSDP does when it gathers."""
    with torch.no_grad():
        part.weight.set_(part.weight * 1.5)


def exchange(part: Part) -> None:
    layer = copy.deepcopy(part.layers[-1])
    for weight in layer.parameters():
        weight.data.mul_(1.5)
    part.layers[len(part.layers) - 1] = layer


def scaled(function: Any) -> Any:
    """Return a function whose results are larger."""

    def scale(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        return results * 1.5 if isinstance(results, Tensor) else tuple(result * 1.5 for result in results)

    return scale


def set_epsilon(part: Part) -> None:
    setattr(part.norm, "variance_epsilon" if hasattr(part.norm, "variance_epsilon") else "eps", 0.5)


def switch_adapter(part: Part) -> None:
    getattr(part.attention, part.linear).enable_adapters(enabled=False)


def scale_adapter(part: Part) -> None:
    getattr(part.attention, part.linear).scaling["default"] *= 3


def replace_buffer(part: Part) -> None:
    part.rotary.inv_freq = part.rotary.inv_freq * 3


def merge_adapter(part: Part) -> None:
    """Scale the adapter, and merge it into the weight in place."""
    scale_adapter(part)
    getattr(part.attention, part.linear).merge()


def set_class_of_layer(part: Part) -> None:
    """Of the first layer: the norm of the merger undoes what scales the last one's output."""
    kind = type(part.layers[0])
    part.layers[0].__class__ = type("Mine", (kind,), {"forward": scaled(kind.forward)})


def hook_in_a_new_dict(part: Part) -> None:
    """Replace the dict of hooks, as programs do to clear it, then register a hook."""
    part.norm._forward_hooks = OrderedDict()
    part.norm.register_forward_hook(lambda module, args, output: output * 1.5)


def other_config(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.spatial_merge_size = 4
    return config


def set_heads_of_a_layer(part: Part) -> None:
    width = part.attention.head_dim
    part.attention.qkv = nn.Linear(part.attention.qkv.in_features, 3 * width)
    part.attention.proj = nn.Linear(width, 2 * width)
    part.attention.num_heads = 1
    randomise(part.attention)


def remove_a_layer(part: Part) -> None:
    part.root.blocks = part.layers[:1]


def assign_state(part: Part) -> None:
    state = {name: x * 1.5 for name, x in part.root.state_dict().items()}
    part.root.load_state_dict(state, assign=True)


def other(module: Any) -> Any:
    """Return a copy of a module with other weights."""
    module = copy.deepcopy(module)
    for weight in module.parameters():
        weight.data.mul_(-1.5)
    return module


def replace_text(part: Part) -> None:
    part.root.model.language_model = other(part.root.model.language_model)
    hf_vit_accel.patch(part.root, text=True)


def remove_a_layer_of_text(part: Part) -> None:
    text = part.root.model.language_model
    del text.layers[0]
    text.config.num_hidden_layers = len(text.layers)
    text.config.layer_types = ["full_attention"] * len(text.layers)
    for index, layer in enumerate(text.layers):
        layer.self_attn.layer_idx = index


def prune_weight(part: Part) -> None:
    linear = getattr(part.attention, part.linear)
    prune.l1_unstructured(linear, "weight", 0.9)  # sets a hook
    prune.remove(linear, "weight")


def set_plain_weight(part: Part) -> None:
    """FSDP of torch 1 shows gathered weights as tensors that are no parameters, others in every forward."""
    linear = getattr(part.attention, part.linear)
    weight = linear.weight.detach() * 1.5
    del linear.weight
    linear.weight = weight


def replace_parameters(part: Part) -> None:
    """ZeRO-3 of DeepSpeed sets dictionaries of its own."""
    linear = getattr(part.attention, part.linear)
    vars(linear)["_parameters"] = OrderedDict(weight=nn.Parameter(linear.weight.detach() * 1.5), bias=linear.bias)


class Computing(nn.Module):
    """A linear of 8 bits, with a dtype to compute in, as bitsandbytes' `Linear4bit`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter((linear.weight * 200).to(torch.int8), requires_grad=False)
        self.compute_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype) / 200).to(x.dtype)


def hold_function(part: Part) -> None:
    """Qwen3.5 of transformers 5.4 to 5.10 does. Users replace those of flash-linear-attention by torch's."""
    mlp = part.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = scaled(abs)


def patched_function(part: Part) -> AbstractContextManager[Any]:
    """Replace a function of the file, as Liger's patches of transformers do."""
    file = sys.modules[type(part.attention).__module__]
    return mock.patch.object(file, part.rotate, scaled(getattr(file, part.rotate)))


def patched_method(part: Part) -> AbstractContextManager[Any]:
    """Replace the forward of a class, as Unsloth does."""
    kind = type(part.norm)
    return mock.patch.object(kind, "forward", scaled(kind.forward))


def hooked_globally(part: Part) -> AbstractContextManager[Any]:
    kind = type(part.norm)
    return register_module_forward_hook(lambda module, _, output: output * 1.5 if type(module) is kind else None)


def replaced_function(name: str, change: Callable[[Any], object]) -> Callable[[Part], AbstractContextManager[Any]]:
    """Return a context in which a function that the tower's file names has other results."""

    def replaced(part: Part) -> AbstractContextManager[Any]:
        file = sys.modules[type(part.root).__module__]
        function = getattr(file, name, None)
        if function is None:
            pytest.skip("this transformers has no such function")
        return mock.patch.object(file, name, lambda *args, **kwargs: change(function(*args, **kwargs)))

    return replaced


CHANGES: dict[str, Change] = {
    "a weight replaced": lambda part: setattr(
        getattr(part.attention, part.linear), "weight", nn.Parameter(part.weight.detach() * 1.5)
    ),
    "a weight written": write,
    "a weight written through .data": lambda part: part.weight.data.mul_(1.5),
    "a weight with other .data": lambda part: setattr(part.weight, "data", part.weight * 1.5),
    "a weight transposed": lambda part: setattr(part.weight, "data", part.weight.data.t()),
    "a weight over other memory": resize,
    "a module exchanged": exchange,
    "an attribute": lambda part: setattr(part.attention, "scaling", 0.9),
    "an epsilon": set_epsilon,
    "a forward of an instance": lambda part: setattr(part.norm, "forward", scaled(part.norm.forward)),
    "a hook": lambda part: part.norm.register_forward_hook(lambda module, args, output: output * 1.5),
    "a hook in a new dict": hook_in_a_new_dict,
    "an adapter switched off": switch_adapter,
    "an adapter scaled": scale_adapter,
    "an adapter merged": merge_adapter,
    "another dtype": lambda part: part.root.double(),
    "a buffer written": lambda part: part.rotary.inv_freq.mul_(3),
    "a buffer replaced": replace_buffer,
    "the class of a module": lambda part: setattr(part.layers[-1].mlp.act_fn, "__class__", nn.Tanh),
}
OF_TOWERS: dict[str, Change] = {
    "a field of the config": lambda part: setattr(part.root.config, "spatial_merge_size", 4),
    "the config": lambda part: setattr(part.root, "config", other_config(part.root.config)),
    "a list in place": lambda part: part.root.deepstack_visual_indexes.__setitem__(
        0, 1 - part.root.deepstack_visual_indexes[0]
    ),
    "layers in another order": lambda part: part.layers.insert(0, part.layers.pop(1)),
}
ONCE: dict[str, Change] = {
    "heads of a layer": set_heads_of_a_layer,
    "the class of a layer": set_class_of_layer,
    "fewer layers": remove_a_layer,
    "a window's size": lambda part: setattr(part.root, "window_size", 16),
    "layers with windows": lambda part: setattr(part.root, "fullatt_block_indexes", [0]),
    "layers with windows, in place": lambda part: part.root.fullatt_block_indexes.append(0),
}
"""Changes of towers that every way of calling sees by the same means as others: they run eagerly alone."""
OF_TEXTS: dict[str, Change] = {
    "a state assigned": assign_state,
    "a larger vocabulary": lambda part: part.root.resize_token_embeddings(80),
    "a head": lambda part: setattr(part.root, "lm_head", other(part.root.lm_head)),
    "a text model": replace_text,
    "a layer less": remove_a_layer_of_text,
    "a weight pruned": prune_weight,
    "a weight that is no parameter": set_plain_weight,
    "a dictionary of parameters": replace_parameters,
    "a dtype": lambda part: setattr(part.attention.o_proj, "compute_dtype", torch.bfloat16),
    "a function": lambda part: setattr(part.layers[0].mlp, "act_fn", scaled(nn.functional.silu)),
}
BEFORE: dict[str, Change] = {
    "a weight that is no parameter": set_plain_weight,
    "a dtype": lambda part: setattr(part.attention, "o_proj", Computing(part.attention.o_proj)),
    "a function": hold_function,
}
"""What a text model has before a change."""
OF_THE_PROCESS: dict[str, Callable[[Part], AbstractContextManager[Any]]] = {
    "a function of the file": patched_function,
    "a method of a class": patched_method,
    "a global hook": hooked_globally,
}
OF_THE_PROCESS_ONCE = {
    "rotate_half": replaced_function("rotate_half", lambda result: result * 0.5),
    "get_vision_position_ids": replaced_function("get_vision_position_ids", lambda result: result * 2),
    "get_vision_attention_seqlens": replaced_function(
        "get_vision_attention_seqlens", lambda result: (result[0][[0, -1]], result[1] and int(result[0][-1]))
    ),
    "get_vision_window_index": replaced_function(
        "get_vision_window_index", lambda result: (result[0].flip(0), *result[1:])
    ),
    "get_vision_interpolation_indices_and_weights": replaced_function(
        "get_vision_interpolation_indices_and_weights", lambda result: (result[0], result[1] * 2)
    ),
}

WHY = {
    "a field of the config": "two values of spatial_merge_size",
    "the config": "two values of spatial_merge_size",
    "an attribute": "scale attention differently",
    "heads of a layer": "layers have different heads",
    "the class of a layer": "layer 0 has a Mine",
    "a global hook": "global module hooks",
    "a function of the file": "relative error",
} | {name: "computes something else" for name in OF_THE_PROCESS_ONCE if "_" in name}
"""The reason why calls after a change run stock, in `status`. Calls after all others are fast."""
WHY_OF_COPIES = {
    "an attribute": "is no copy of qwen3_vl",
    "a hook": "hooks on blocks.1.norm1",
    "a hook in a new dict": "hooks on blocks.1.norm1",
}
"""The same where a copy differs."""


# --- consumers --------------------------------------------------------------------------------------------------------


def run(tower: Any, *, trains: bool) -> list[Tensor]:
    """Return the outputs of a call, and all gradients of a training step."""
    dtype = tower.patch_embed.proj.weight.dtype
    pixels = pixels_for(tower, GRID, dtype=dtype)
    with torch.set_grad_enabled(trains):
        outputs = outputs_of(tower(pixels, torch.tensor(GRID)))
    if not trains:
        return outputs
    tower.zero_grad()
    outputs[1].square().sum().backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return [output.detach() for output in outputs] + gradients


def adapted(model: Any, target: str) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False)
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model)
    return model.eval()


EXACT = GraphConfig(max_tokens=64, exact_after=1)
CONSUMERS: dict[str, dict[str, Any]] = {
    "eager": dict(cuda_graphs=False),
    "training": dict(cuda_graphs=False),
    "replayed": dict(cuda_graphs=EXACT),
    "replayed training": dict(cuda_graphs=EXACT),
    "reuse": dict(reuse=ReuseConfig(across_calls=True)),
    "a copy": dict(like={"CopyOfQwen3": "qwen3_vl"}),
    "a replayed copy": dict(like={"CopyOfQwen3": "qwen3_vl"}, cuda_graphs=EXACT),
}

OF_COPIES = ("an epsilon", "a method of a class")


WINDOWS = replace(TINY["qwen2_5_vl"], vision=TINY["qwen2_5_vl"].vision | dict(depth=2, fullatt_block_indexes=[1]))


def stock_tower(consumer: str, name: str) -> Any:
    if "copy" in consumer:
        return copies.build(copies.CopyOfQwen3, depth=2).eval()
    tower = tower_of((WINDOWS if "window" in name else SHALLOW).build()).requires_grad_("training" in consumer)
    return adapted(tower, r".*attn\.proj") if "adapter" in name else tower


def differs(outputs: list[Tensor], former: list[Tensor]) -> bool:
    if [(x.shape, x.dtype) for x in outputs] != [(x.shape, x.dtype) for x in former]:
        return True
    return not all(torch.allclose(x, y, 1e-3) for x, y in zip(outputs, former, strict=True))


def cases() -> Iterator[Any]:
    """Yield every consumer with every change; most of copies and of steps, which watch as calls do, in the matrix."""
    for name in (*ONCE, *OF_THE_PROCESS_ONCE):
        yield "eager", name
    for consumer in CONSUMERS:
        for name in (*CHANGES, *OF_TOWERS, *OF_THE_PROCESS):
            if "copy" in consumer and ("config" in name or "adapter" in name):
                continue  # no copy reads that field or has adapters: see `test_like.py`
            is_of_all = consumer in ("eager", "replayed") or name in OF_COPIES
            is_of_all &= consumer not in ("training", "a replayed copy")
            yield pytest.param(consumer, name, marks=[] if is_of_all else [pytest.mark.matrix])


@pytest.mark.usefixtures("quick_proof")
@pytest.mark.filterwarnings("ignore:.*stays stock")
@pytest.mark.parametrize(("consumer", "name"), list(cases()))
def test_no_call_of_a_tower_is_stale(recorded: type[OperationRecorder], consumer: str, name: str) -> None:
    stock = stock_tower(consumer, name)
    tower = copy.deepcopy(stock)
    hf_vit_accel.patch(tower, **CONSUMERS[consumer])
    trains = "training" in consumer
    before = run(stock, trains=trains)
    for _ in range(ROUNDS):
        assert_close(run(tower, trains=trains), before, 1e-4)
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls == 0, str(status)
    assert "replayed" not in consumer or "adapter" in name or recorded.replays > 0, str(status)
    contexts = OF_THE_PROCESS | OF_THE_PROCESS_ONCE
    with contexts[name](part_of_tower(tower)) if name in contexts else nullcontext():
        if name not in contexts:
            for changed in (stock, tower):
                (CHANGES | OF_TOWERS | ONCE)[name](part_of_tower(changed))
        after = run(stock, trains=trains)
        for _ in range(ROUNDS):
            assert_close(run(tower, trains=trains), after, 1e-4)
        [status] = hf_vit_accel.status(tower).towers
    assert differs(after, before), "the change matters"
    why = WHY_OF_COPIES.get(name, WHY.get(name)) if "copy" in consumer else WHY.get(name)
    assert status.stock_calls == (0 if why is None else ROUNDS), str(status)
    assert why is None or any(why in reason for reason in status.fallbacks), str(status)


@pytest.mark.parametrize("name", [*CHANGES, *OF_TEXTS, *OF_THE_PROCESS])
def test_no_decoded_token_is_stale(recorder: type[OperationRecorder], name: str) -> None:
    """Nor hidden states under `text=True`. `test_prefill.py` switches between two adapters."""
    model = TINY["qwen3_vl"].build()
    if "adapter" in name:
        adapted(model, r".*language_model.*\.o_proj")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 3, 3]])}
    options = dict(max_new_tokens=9, output_logits=True, return_dict_in_generate=True)
    part = part_of_text(model)
    BEFORE.get(name, lambda part: None)(part)
    hf_vit_accel.patch(model, text=True)
    before = both(model, inputs, **options)
    compare(model, inputs)
    assert counts_of(model).static_calls == 1 and recorder.replays > 0 and counts(model)[0] == 1
    with OF_THE_PROCESS[name](part) if name in OF_THE_PROCESS else nullcontext():
        if name not in OF_THE_PROCESS:
            (CHANGES | OF_TEXTS)[name](part)
        after = both(model, inputs, **options)
        compare(model, inputs)
    is_seen = name != "another dtype"  # logits are in fp32 always
    assert differs(list(after.logits), list(before.logits)) == is_seen, "the change matters"
    assert name not in OF_TEXTS or counts_of(model).static_calls == 2, str(counts_of(model))
