"""Test modules that treat each row alone: the table of them is true, and other modules get all rows at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import activations

from hf_vit_accel.ops.rows import TABLE, reasons_mixing

WIDTH = 8
SIZED: dict[type, Callable[[], nn.Module]] = {
    nn.Linear: lambda: nn.Linear(WIDTH, WIDTH),
    nn.LayerNorm: lambda: nn.LayerNorm(WIDTH),
    nn.RMSNorm: lambda: nn.RMSNorm(WIDTH),
    activations.ClippedGELUActivation: lambda: activations.ClippedGELUActivation(-10, 10),
    nn.Sequential: lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
}
"""How to make a module that needs arguments."""

ROW_CLASSES = [kind for entry in TABLE for kind in entry.classes if "forward" in vars(kind) and not entry.of_patches]


def assert_row_by_row(module: nn.Module) -> None:
    """Compare a module on all rows with the module on one row after the other."""
    rows = 3 * torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module.eval().double()
    with torch.no_grad():
        torch.testing.assert_close(module(rows), torch.cat([module(row) for row in rows.split(1)]))


@pytest.mark.parametrize("kind", [kind for kind in ROW_CLASSES if kind is not nn.Embedding], ids=lambda k: k.__name__)
def test_declared_modules_of_torch_treat_each_row_by_itself(kind: type[nn.Module]) -> None:
    module = SIZED.get(kind, kind)()
    assert_row_by_row(module)
    assert reasons_mixing(module.modules(), proven=()) == []


@pytest.mark.parametrize("name", activations.ACT2CLS)
def test_activations_of_transformers_treat_each_row_by_itself(name: str) -> None:
    module = activations.ACT2FN[name]
    reasons = reasons_mixing(module.modules(), proven=())
    if isinstance(module, nn.RReLU | nn.PReLU):
        assert reasons, "random in training, or of channels"
        return
    assert_row_by_row(module)
    assert reasons == []


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_a_convolution_counts_only_where_patches_are_its_batch(kind: type[nn.Module]) -> None:
    convolution = kind(3, WIDTH, kernel_size=2)
    images = torch.randn(6, 3, *[2] * (2 if kind is nn.Conv2d else 3))
    with torch.no_grad():
        torch.testing.assert_close(convolution(images), torch.cat([convolution(image) for image in images.split(1)]))
    assert reasons_mixing([convolution], proven=(), patches=[None, nn.Sequential(convolution)]) == []
    assert "may mix rows" in reasons_mixing([convolution], proven=())[0]
    assert "may mix rows" in reasons_mixing([convolution], proven=[kind])[0], "the twin's convolution embeds patches"


class OwnLinear(nn.Linear):
    """Subclass Linear, as a library does to compute something else."""


class Own(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def replaced() -> nn.Module:
    """Return a Linear whose forward was replaced on the instance."""
    linear = nn.Linear(WIDTH, WIDTH)
    vars(linear)["forward"] = lambda x: x.mean(0, keepdim=True).expand_as(x)
    return linear


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "a TransformerEncoderLayer is inside": lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH),
    "a BatchNorm1d is inside": lambda: nn.BatchNorm1d(WIDTH),
    "a LayerNorm((6, 8), eps=1e-05, elementwise_affine=True": lambda: nn.LayerNorm((6, WIDTH)),
    "a OwnLinear is inside": lambda: OwnLinear(WIDTH, WIDTH),
    "a test_rows.Own is neither torch's nor transformers'": lambda: Own(nn.Linear(WIDTH, WIDTH)),
    "a Linear has a forward of its own": replaced,
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_any_other_module_may_mix_rows(reason: str) -> None:
    [sentence] = reasons_mixing(nn.Sequential(nn.Linear(WIDTH, WIDTH), UNKNOWN[reason]()).modules(), proven=())
    assert sentence.startswith(reason) and sentence.endswith("may mix rows of several images")


def test_a_forward_of_torch_that_was_replaced_may_mix_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x.flip(0))
    assert reasons_mixing([nn.Linear(WIDTH, WIDTH)], proven=()) == [
        "the forward of Linear was replaced by another, and may mix rows of several images"
    ]
