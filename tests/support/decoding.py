"""Compare `graphed_decoding` with stock's `generate`, every output, and replay steps without Python on a CPU."""

import inspect
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache

import hf_vit_accel
from hf_vit_accel.decoding import model_in_loop, waiting
from hf_vit_accel.decoding import steps as steps_module
from hf_vit_accel.decoding.steps import DecodeSteps, steps_of
from support.recorded_ops import OperationRecorder


@dataclass(frozen=True)
class Counts:
    """The calls that a model decoded by static steps, and the reasons of the others."""

    static_calls: int
    reasons: dict[str, int]


def add_adapters(model: Any) -> None:
    """Add random LoRA adapters "one" and "two" to the language model."""
    peft = pytest.importorskip("peft")
    for name in ("one", "two"):
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=2)
        model.add_adapter(config, name)
    model.eval()


def change_model(model: Any, rng: random.Random) -> None:
    """Choose one of the adapters, or none. Sometimes change a weight, in place or for another tensor."""
    model.set_adapter(rng.choice(["one", "two"]))
    (model.disable_adapters if rng.random() < 0.5 else model.enable_adapters)()
    weight = rng.choice([module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)])
    changed = weight.detach() * rng.uniform(0.9, 1.1)
    kind = rng.randrange(6)
    if kind == 0:
        weight.data = changed
    elif kind == 1:
        weight.data.copy_(changed)


def counts_of(model: Any) -> Counts:
    """Return what `status` counts for a model."""
    steps: DecodeSteps = steps_of(model)
    return Counts(steps.decoded, dict(steps.stock_reasons))


def both(model: Any, inputs: dict[str, Any], seed: int = 0, **kwargs: Any) -> Any:
    """Generate by stock and by `graphed_decoding`; expect equal outputs, and return ours.

    Args:
        model: The model.
        inputs: Its inputs.
        seed: Seeds torch's generator before either call.
        kwargs: Arguments of `generate`. Functions named `make_...` make a new argument for either call.
    """
    outputs = []
    for custom_generate in (None, kwargs.pop("custom_generate", hf_vit_accel.graphed_decoding)):
        new = {name.removeprefix("make_"): make() for name, make in kwargs.items() if name.startswith("make_")}
        plain = {name: value for name, value in kwargs.items() if not name.startswith("make_")}
        torch.manual_seed(seed)
        outputs.append(model.generate(**inputs, **plain, **new, custom_generate=custom_generate))
        outputs.append(torch.get_rng_state())
    stock, stock_rng, ours, our_rng = outputs
    assert torch.equal(stock_rng, our_rng), "another number of random values was drawn"
    assert_equal_outputs(ours, stock)
    return ours


def assert_equal_outputs(ours: Any, stock: Any, mask: Tensor | None = None) -> None:
    """Expect outputs of one class and one structure, equal to rounding; with a mask, wherever there are tokens.

    What lies outside of the mask must be finite. Caches are compared by all that their layers hold.
    """
    assert type(ours) is type(stock)
    if isinstance(stock, Tensor):
        assert ours.shape == stock.shape and ours.dtype == stock.dtype
        assert mask is None or torch.isfinite(ours).all()
        if mask is not None and ours.shape[:2] == mask.shape:
            ours, stock = ours[mask], stock[mask]
        torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)
    elif isinstance(stock, tuple | list):
        assert len(ours) == len(stock)
        for item, expected in zip(ours, stock, strict=True):
            assert_equal_outputs(item, expected, mask)
    elif isinstance(stock, dict):  # as every output class
        assert list(ours) == list(stock)
        assert_equal_outputs(list(ours.values()), list(stock.values()), mask)
    elif isinstance(stock, Cache):
        assert_equal_outputs([vars(layer) for layer in ours.layers], [vars(layer) for layer in stock.layers], mask)
    else:
        assert ours == stock


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[OperationRecorder]:
    """Capture steps on the CPU, and replay their operations alone. Return the class, which only this test changes."""

    class RecorderOfTest(OperationRecorder):
        pass

    monkeypatch.setattr(steps_module, "CudaRecorder", RecorderOfTest)
    monkeypatch.setattr(steps_module, "can_capture", lambda device: True)
    return RecorderOfTest


@pytest.fixture(params=["replayed", pytest.param("run", marks=pytest.mark.matrix)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: steps are replayed, or run by Python. Short texts are decoded by steps, too."""
    for module in (model_in_loop, waiting):
        monkeypatch.setattr(module, "FEWEST", 1)
    if request.param == "replayed":
        request.getfixturevalue("recorder")
    return str(request.param)


def argument_names() -> set[str]:
    """Return all names that this transformers' `generate` takes, from its signature and its config."""
    from transformers import GenerationConfig, GenerationMixin

    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return parameters | fields | {"tokenizer", "past_key_values"}
