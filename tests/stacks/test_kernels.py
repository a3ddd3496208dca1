"""transformers' `use_kernels=True` on tiny captioners; its kernels are a repository on this machine."""

import json
import sys
from collections.abc import Iterator

import pytest
import torch
from captioner.processors import load_processor
from kernels import LocalLayerRepository, Mode, use_kernel_mapping
from support.stacks import Checkpoint, Job, Names, every_family, inputs_of, pictures, recipe
from transformers import AutoModelForImageTextToText, PreTrainedModel

import hf_vit_accel

LAYERS = """
import torch
from torch import nn

class layers:
    class RMSNorm(nn.Module):
        weight: torch.Tensor
        variance_epsilon: float

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            CALLS.append("RMSNorm")
            scale = torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (hidden_states * scale)

    class SiLU(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            CALLS.append("SiLU")
            return input * torch.sigmoid(input)

    class GeluTanh(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            CALLS.append("GeluTanh")
            return nn.functional.gelu(input, approximate="tanh")

CALLS = []
"""
NAMES = ("RMSNorm", "SiLU", "GeluTanh")


@pytest.fixture(scope="module", autouse=True)
def _repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write the kernels as a repository of the Hub has them, and map names of layers to them."""
    root = tmp_path_factory.mktemp("kernels")
    build = root / "build" / "torch-cpu"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(LAYERS)
    names = {"name": "tiny-layers", "id": "tiny_layers", "version": 1, "license": "Apache-2.0"}
    (build / "metadata.json").write_text(json.dumps(names | {"python-depends": [], "backend": {"type": "cpu"}}))
    repositories = {name: LocalLayerRepository(root, layer_name=name) for name in NAMES}
    modes = Mode.INFERENCE, Mode.TRAINING
    with use_kernel_mapping({name: {"cpu": dict.fromkeys(modes, of)} for name, of in repositories.items()}):
        yield


def results(model: PreTrainedModel, inputs: Names) -> torch.Tensor:
    """Return logits and all gradients."""
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([tensor.flatten() for tensor in (logits, *gradients)])


@every_family
@pytest.mark.parametrize("order", ["loaded with kernels", "patched first"])
def test_use_kernels(order: str, family: str, checkpoint: Checkpoint) -> None:
    """The tower is fast, and the language model keeps its kernels."""
    path = checkpoint(family)
    inputs = inputs_of(load_processor(path), pictures(1)[0])
    names = {"AutoModelForImageTextToText": AutoModelForImageTextToText, "name": path}
    stock = recipe("use_kernels").run(patched=False, names=names)["model"]
    if order == "patched first":
        model = hf_vit_accel.patch(AutoModelForImageTextToText.from_pretrained(path))
        model.use_kernels = True
    else:
        model = recipe("use_kernels").run(patched=True, names=names)["model"]
    expected = results(stock, inputs)
    job = Job("kernels", f"use_kernels=True, {order}: logits, gradients", "use_kernels")
    job.expect(family, expected, results(model, inputs), model)
    assert {"RMSNorm", "SiLU"} <= set(sys.modules["tiny_layers"].CALLS)
