"""Test `patch(like=...)` on a GPU: copies in bf16 take kernels and backends, as exactly as their own code."""

import copy
from functools import partial

import pytest
import torch
from support import dots_ocr
from support.copies import COPIES, build
from support.tensors import flat
from torch import Tensor, nn

import hf_vit_accel
from hf_vit_accel.families import FAMILIES_OF_COPIES

pytestmark = pytest.mark.gpu
GRIDS = {"small": [(1, 4, 6), (2, 8, 10), (1, 2, 18)], "large": [(1, 64, 48)] * 3}
CASES = {case: partial(build, kind) for case, kind in COPIES.items()}
CASES["dots_ocr", ""] = partial(dots_ocr.build, torch.float32)
"""How to build a copy in fp32, by the name of its family and the version of transformers that it looks like."""
OPTIONS = {family.name: family.options_of_proof for family in FAMILIES_OF_COPIES}


def run(tower: nn.Module, grid: list[tuple[int, int, int]], seed: int, **options: object) -> list[Tensor]:
    """Return all tensors of a call on random patches."""
    parameters = list(tower.patch_embed.parameters())
    weight = next(parameter for parameter in parameters if parameter.dim() > 3)
    rows = sum(t * h * w for t, h, w in grid)
    pixels = torch.randn(rows, weight[0].numel(), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        output = tower(pixels.bfloat16().to(weight), torch.tensor(grid, device="cuda"), **options)
    return flat(output)


def distance(outputs: list[Tensor], exact: list[Tensor]) -> float:
    """Return the sum of the squared relative errors."""
    pairs = zip(outputs, exact, strict=True)
    return float(sum((x.float() - y).norm() ** 2 / y.norm() ** 2 for x, y in pairs))


@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize(("family", "version"), CASES)
def test_a_copy_in_bf16_is_as_exact_as_its_own_code(family: str, version: str, size: str) -> None:
    """Over five seeds, the error against fp32 is at most 1.1 times that of the copy's own code."""
    exact_tower = CASES[family, version]().cuda()
    stock_tower = copy.deepcopy(exact_tower).to(torch.bfloat16)
    tower = hf_vit_accel.patch(copy.deepcopy(stock_tower), like={type(stock_tower).__name__: family}, strict=True)
    ours = 0.0
    stock = 0.0
    for seed in range(5):
        exact = run(exact_tower, GRIDS[size], seed, **OPTIONS[family])
        ours += distance(run(tower, GRIDS[size], seed), exact)
        stock += distance(run(stock_tower, GRIDS[size], seed), exact)
    assert ours**0.5 <= 1.1 * stock**0.5
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls, status.family) == (5, 0, family)
    assert {"norms", "rope"} <= set(status.fused), str(status)


@pytest.mark.parametrize(("family", "version"), CASES)
def test_gradients_of_a_copy_in_bf16_are_as_exact(family: str, version: str) -> None:
    exact_tower = CASES[family, version]().cuda()
    results = []
    for dtype, like in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, family)):
        tower = copy.deepcopy(exact_tower).to(dtype)
        if like is not None:
            hf_vit_accel.patch(tower, like={type(tower).__name__: like}, strict=True)
        weight = next(parameter for parameter in tower.patch_embed.parameters() if parameter.dim() > 3)
        pixels = torch.randn(24, weight[0].numel(), generator=torch.Generator().manual_seed(9)).bfloat16()
        options = OPTIONS[family] if dtype == torch.float32 else {}
        output = tower(pixels.to(weight), torch.tensor([(1, 4, 6)], device="cuda"), **options)
        sum(tensor.float().square().sum() for tensor in flat(output)).backward()
        results.append(torch.cat([parameter.grad.flatten().float() for parameter in tower.parameters()]))
    exact, stock, ours = results
    assert (ours - exact).norm() <= 1.3 * (stock - exact).norm(), "one seed: the mean is 1.1 at most"
