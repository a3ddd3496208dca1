"""What frameworks do to a model, in its smallest form and without them. Each habit keeps the tower fast and exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from support.stacks import expect_same_and_fast
from support.towers import TOWERS
from tiny import TINY, chat_inputs, checkpoint_layers, tower_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

import hf_vit_accel

Model = Any
GRID = [(1, 8, 6), (1, 4, 10)]


def train(model: Model, **options: Any) -> Tensor:
    """Return the loss of a step and all gradients; drop those from the model."""
    inputs = chat_inputs(model, GRID)
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False, **options).loss
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return torch.cat([loss.detach().reshape(1), *gradients])


def wrap_for_training(model: Model) -> Tensor:
    """ms-swift, `patch_frozen_module`: a wrapper that runs a frozen tower without gradients, before training begins."""
    tower = tower_of(model)
    inner = tower.forward

    def outer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(any(parameter.requires_grad for parameter in module.parameters())):
            return inner(*args, **kwargs)

    tower.forward = MethodType(wraps(inner)(outer), tower)
    return train(model)


def wrap_at_load(model: Model) -> Tensor:
    """ms-swift, `_patch_qwen3_vl_vision_kwargs`: a wrapper that drops arguments of a packed text."""
    tower = tower_of(model)
    inner = tower.forward
    tower.forward = lambda *args, **kwargs: inner(
        *args, **{name: value for name, value in kwargs.items() if not name.startswith(("cu_seq_lens", "max_length"))}
    )
    return train(model)


def give_the_tower_a_method(model: Model) -> Tensor:
    """ms-swift: a tower gets a `get_input_embeddings` of its own."""
    tower = tower_of(model)
    tower.get_input_embeddings = lambda: tower.patch_embed
    return train(model)


def ask_for_hidden_states(model: Model) -> Tensor:
    """colpali-engine, `ColQwen2_5.forward`, and sentence-transformers with such an output: the model gets the flag."""
    return train(model, output_hidden_states=True)


def ask_for_the_module(model: Model) -> Tensor:
    """LLaMA-Factory, `get_custom_gradient_checkpointing_func`: it asks a function for its module, `func.__self__`."""
    checkpoint_layers(model.train(), reentrant=True)
    model.enable_input_require_grads()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = with_a_module(module._gradient_checkpointing_func)
    return train(model)


def with_a_module(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def custom(function: Any, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(function, "func", function)
        module = (
            bound.__self__ if hasattr(bound, "__self__") else function.args[0]
        )  # the latter from transformers 5.9 on
        if any(parameter.requires_grad for parameter in module.parameters()):
            args[0].requires_grad_(True)
        return checkpoint(function, *args, **kwargs)

    return custom


def toggle_checkpointing(model: Model) -> Tensor:
    """TRL, `GRPOTrainer`: rollouts without gradient checkpointing, steps with it."""
    results = []
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    for _ in range(3):
        disable()
        with torch.no_grad():
            results.append(model(**chat_inputs(model, GRID)).logits.flatten())
        checkpoint_layers(model.train(), reentrant=False)
        results.append(train(model))
    return torch.cat(results)


HABITS = (
    wrap_for_training,
    wrap_at_load,
    give_the_tower_a_method,
    ask_for_hidden_states,
    ask_for_the_module,
    toggle_checkpointing,
)


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_of_frameworks(family: str, habit: Callable[[Model], Tensor]) -> None:
    stock = habit(TINY[family].build())
    model = hf_vit_accel.patch(TINY[family].build())
    expect_same_and_fast(stock, habit(model), model)


@pytest.mark.parametrize("wrap", [wrap_for_training, wrap_at_load], ids=lambda habit: habit.__name__)
def test_patched_after_the_wrap(wrap: Callable[[Model], Tensor]) -> None:
    model = TINY["qwen3_vl"].build()
    stock = wrap(model)
    hf_vit_accel.patch(model)
    expect_same_and_fast(stock, train(model), model)


def test_a_config_that_names_the_attention(tmp_path: Path) -> None:
    """verl, `override_config`: it sets attributes of a config that has another attention, and loads with it."""
    stock = TINY["qwen2_5_vl"].build()
    stock.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
    config.vision_config._attn_implementation = "flash_vit_auto"
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, config=config)
    expect_same_and_fast(train(stock), train(model), model)
    assert model.model.language_model.config._attn_implementation == "sdpa"
