"""Test every operation of `ops.TABLE` in towers: by the kernels' references on a CPU, and compiled on a GPU."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patching import status_of
from support.references import fuse_only
from tiny import GRIDS, TINY, assert_close, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.families import family_of
from hf_vit_accel.ops import TABLE, mlp

GRID = GRIDS["mixed"]


def test_windows_too_long_for_the_kernel_are_planned(references: list[str]) -> None:
    tiny = copy.deepcopy(TINY["qwen2_5_vl"])
    tiny.vision["window_size"] = 64  # 8 x 8 merged tokens, 256 rows
    model = tiny.build()
    expected = run_tower(tower_of(model), [(1, 24, 20)])
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), [(1, 24, 20)]), expected)
    assert "window_attention" not in references and set(status_of(model).backends) == {"full", "window"}


class Around(nn.Module):
    """Wrap one module of the tower in a module of another library."""

    def __init__(self, inner: nn.Module, change: Any) -> None:
        super().__init__()
        self.inner = inner
        self.change = change

    @property
    def proj(self) -> Any:
        return self.inner.proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.inner, x)


def surround(tower: nn.Module, name: str, change: Any) -> None:
    parent, _, child = name.rpartition(".")
    setattr(tower.get_submodule(parent), child, Around(tower.get_submodule(name), change))


def test_checkpoints_of_others_are_complete(references: list[str], model: Any, tmp_path: Path) -> None:
    """Save by accelerate and safetensors, which drop or refuse shared and strided parameters."""
    from accelerate import Accelerator
    from safetensors.torch import load_file, save_file

    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), GRID)
    Accelerator(cpu=True).save_model(model, str(tmp_path))
    save_file(tower_of(model).state_dict(), tmp_path / "tower.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    tower_names = [name for name in before if ".visual." in f".{name}"]
    assert len(tower_names) > 20 and all(torch.equal(saved[name], before[name]) for name in tower_names)


@pytest.mark.parametrize(("width", "padded"), [(212, True), (216, False)])
def test_without_descriptors_widths_are_padded_only_where_they_need_it(
    references: list[str], monkeypatch: pytest.MonkeyPatch, width: int, padded: bool
) -> None:
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: "not this GPU")
    fuse_only(monkeypatch, {"mlp"})
    for family, kernels in (
        ("qwen2_vl", {"quick_gelu_"}),
        ("qwen2_5_vl", {"swiglu", "pad_swiglu"} if padded else {"swiglu"}),
    ):
        tiny = copy.deepcopy(TINY[family])
        tiny.vision["intermediate_size"] = width
        model = tiny.build()
        expected = run_tower(tower_of(model), GRID)
        references.clear()
        hf_vit_accel.patch(model)
        assert_close(run_tower(tower_of(model), GRID), expected)
        assert set(references) == kernels


@pytest.mark.parametrize("name", ["patch_embed", "blocks.1.attn.qkv", "deepstack_merger_list.0"])
def test_outputs_that_modules_store_are_not_written_to(references: list[str], name: str) -> None:
    """Let a module store its output or return its input: no later addition or rotation changes it."""
    model = TINY["qwen3_vl"].build()
    stored = {}
    tower = tower_of(model)
    surround(tower, name, lambda inner, x: stored.setdefault("it", x if name.startswith("deepstack") else inner(x)))
    expected = [run_tower(tower, GRID) for _ in range(2)]
    stored.clear()
    hf_vit_accel.patch(model)
    for outputs in expected:
        assert_close(run_tower(tower, GRID), outputs)


@pytest.mark.parametrize(
    "name", ["blocks.3.norm2", "blocks.0.norm2", "blocks.2.norm1", "merger", "deepstack_merger_list.0"]
)
def test_inputs_that_modules_store_are_not_written_to(references: list[str], model: Any, name: str) -> None:
    """Let a module store its input and return another tensor: the stored input stays unchanged."""
    tower = tower_of(model)
    stored = []
    if not any(module_name == name for module_name, _ in tower.named_modules()):
        pytest.skip("the family has no such module")
    surround(tower, name, lambda inner, x: (stored.append((x, x.clone())), inner(x))[1])
    hf_vit_accel.patch(model)
    outputs = run_tower(tower, GRID)
    module_input, input_before = stored[0]
    assert torch.equal(module_input, input_before) and status_of(model).calls == 1
    outputs[0].zero_()
    assert torch.equal(module_input, input_before)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_everything_that_applies_is_fused(model: Any, dtype: torch.dtype) -> None:
    tower_ = tower_of(model.to("cuda", dtype))
    hf_vit_accel.patch(model, strict=True)
    run_tower(tower_, GRID)
    status = status_of(model)
    parts = family_of(tower_).parts(tower_)
    assert set(status.fused) == {operation.name for operation in TABLE if operation.subjects(parts)}
    assert status.calls == 1
    model.float()
    run_tower(tower_, GRID)
    assert status_of(model).fused == ("patch_embed",)
    assert "the dtype is float32" in status_of(model).unfused["norms"]
