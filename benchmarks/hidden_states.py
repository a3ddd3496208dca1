"""Time towers that also return the hidden state of every block, as colpali's models ask in every call.

python benchmarks/hidden_states.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b]

Towers run alone, with random weights in real shapes, in bf16. All contenders are compared with stock in fp32 before
anything is timed, and take turns. `not asked` is `patch(model)` without the request: what the request costs.
"""

from copy import deepcopy
from functools import partial

import torch
from measuring import DEVICE, ERROR_BAR, STEPS_UNTIL_STEADY, Row, largest_error, measure_models, time_rows
from torch import nn

from hf_vit_accel import patch, status
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.measure import draw_pixels
from hf_vit_accel.tools.bench.towers import SIZES, build_tower

INPUTS = "one 448²", "one 1024²", "16 x 512²"


def hidden_states_of(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Call a tower without gradients; return the hidden states."""
    with torch.no_grad():
        return list(tower(pixels_TP, grid_thw=grid, output_hidden_states=True).hidden_states)


def features_of(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> object:
    """Call a tower without the request."""
    with torch.no_grad():
        return tower(pixels_TP, grid_thw=grid)


def time_model(model: str, rounds: int) -> list[Row]:
    """Verify and time one tower with all inputs."""
    stock = build_tower(model, DEVICE, torch.bfloat16)
    ours, eager, not_asked = (deepcopy(stock) for _ in range(3))
    patch(ours)
    patch(eager, cuda_graphs=False)
    patch(not_asked)
    rows = []
    for size in INPUTS:
        pixels_TP = draw_pixels(stock, SIZES[size], 0)
        grid = torch.tensor(SIZES[size], device=DEVICE)
        exact = hidden_states_of(deepcopy(stock).float(), pixels_TP.float(), grid)
        own_error = largest_error(hidden_states_of(stock, pixels_TP, grid), exact)
        steps = {
            "stock": partial(hidden_states_of, stock, pixels_TP, grid),
            "patch(model)": partial(hidden_states_of, ours, pixels_TP, grid),
            "cuda_graphs=False": partial(hidden_states_of, eager, pixels_TP, grid),
            "not asked": partial(features_of, not_asked, pixels_TP, grid),
        }
        for _ in range(STEPS_UNTIL_STEADY):
            for name, step in steps.items():
                outputs = step()
                if name in ("patch(model)", "cuda_graphs=False"):
                    error = largest_error(outputs, exact)
                    assert error <= ERROR_BAR * own_error, (name, error, own_error)
        del exact, outputs
        rows += time_rows(steps, rounds, DEVICE, model=model, size=size, patches=rows_of(SIZES[size]))
    served = status(ours).towers[0]
    assert served.stock_calls == 0, served.fallbacks
    return rows


if __name__ == "__main__":
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b", time_model)
