"""Hooks on blocks, mergers and the patch embedding, and inside them, run on the fast path and see what stock's see."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.faults import raises
from support.patching import assert_fast, training_step
from support.towers import alike
from tiny import GRIDS, TINY, assert_close, checkpoint_layers, outputs_of, pixels_for, run_tower, tower_of
from torch import Tensor, nn

import hf_vit_accel
from hf_vit_accel.tower import state as state_module

GRID = GRIDS["mixed"]


@pytest.fixture(params=["qwen2_5_vl", *alike("qwen3_vl", "qwen2_vl")])
def tower(request: pytest.FixtureRequest) -> Any:
    return tower_of(TINY[request.param].build())


def parts_of(tower: Any) -> list[nn.Module]:
    """Return the modules that are hooked: parts, one module inside each, and blocks of both kinds."""
    parts = [tower.patch_embed, tower.merger, *getattr(tower, "deepstack_merger_list", ())[:1]]
    first, second, *_ = tower.blocks
    in_blocks = [first, first.attn.qkv, second, second.attn, second.mlp, second.norm1]
    return parts + [list(part.modules())[-1] for part in parts] + in_blocks


def tensors_in(values: Any) -> list[Tensor]:
    """Return copies of tensors, and of those in tuples: `position_embeddings` is a pair."""
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item.detach().clone() for item in flat if isinstance(item, Tensor)]


def hook(tower: Any, names: list[Any] | None = None) -> tuple[list[Tensor], list[Any]]:
    """Hook the forward, before and after, doubling outputs; return what hooks see, and their handles."""
    seen: list[Tensor] = []
    handles = []
    names = [] if names is None else names

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        names.append(sorted(kwargs))
        seen.extend(tensors_in([*args, *[kwargs[name] for name in sorted(kwargs)]]))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        seen.extend(tensors_in([output]))
        return output * 2 if isinstance(output, Tensor) else None

    for part in parts_of(tower):
        handles += [part.register_forward_pre_hook(before, with_kwargs=True), part.register_forward_hook(after)]
    return seen, handles


def compare(tower: Any, run: Callable[[Any], list[Tensor]], calls: int | None = None) -> None:
    """Run the same on a stock tower and a patched one: the results are equal, and so many calls fast."""
    expected = run(copy.deepcopy(tower))
    hf_vit_accel.patch(tower)
    assert_close(run(tower), expected)
    if calls is not None:
        assert_fast(tower, calls)


def test_hooks_see_and_change_what_stocks_do(tower: Any) -> None:
    names: dict[Any, list[Any]] = {}

    def run(each: Any) -> list[Tensor]:
        unhooked = run_tower(each, GRID)
        seen, handles = hook(each, names.setdefault(each, []))
        outputs = run_tower(each, GRID)
        for handle in handles:
            handle.remove()
        count = len(seen)
        assert_close(run_tower(each, GRID), unhooked)
        assert len(seen) == count
        return [*outputs, *seen]

    compare(tower, run, calls=3)
    expected_names, actual_names = names.values()
    assert actual_names == expected_names, "the keyword arguments are those of stock"


def test_hooks_on_one_block_after_another_build_nothing_anew(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of every layer hook one at a time: a called block takes the place of its layer's operations."""
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    monkeypatch.setattr(state_module, "build", raises(AssertionError("operations are built again")))
    for block in tower.blocks:
        seen: list[nn.Module] = []
        handle = block.attn.register_forward_hook(lambda module, *_: seen.append(module))  # noqa: B023
        run_tower(tower, GRID)
        handle.remove()
        assert seen == [block.attn]
    assert_fast(tower)


def test_a_hook_on_a_part_that_is_not_called_by_itself_sends_the_call_to_stock(tower: Any) -> None:
    calls = []

    def run(each: Any) -> list[Tensor]:
        each.rotary_pos_emb.register_forward_hook(lambda module, _, output: calls.append(module))
        return run_tower(each, GRID)

    compare(tower, run)
    assert len(set(calls)) == 2
    [reason] = hf_vit_accel.status(tower).towers[0].fallbacks
    assert reason == "hooks on rotary_pos_emb"


def test_gradients_through_hooks_are_stocks(tower: Any) -> None:
    def run(each: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        hook(each)
        for part in parts_of(each):
            part.register_full_backward_hook(lambda _, __, dout: seen.extend(tensors_in(dout)))
            part.register_full_backward_pre_hook(lambda _, dout: seen.extend(tensors_in(dout)))
        return [*training_step(each, GRID), *seen]

    compare(tower, run, calls=1)


def test_hooked_calls_are_neither_cut_nor_reused(tower: Any) -> None:
    grid = [(1, 4, 4), (1, 4, 4)]
    pixels = pixels_for(tower, grid[:1]).repeat(2, 1)
    hf_vit_accel.patch(tower, reuse=True, max_rows=16)
    calls: list[int] = []
    tower.merger.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        tower(pixels, grid_thw=torch.tensor(grid))
    [status] = hf_vit_accel.status(tower).towers
    why = "hooks see each call of their module"
    expected = {f"equal pictures are encoded again: {why}": 1, f"not cut by max_rows: {why}": 1}
    assert (status.calls, len(calls)) == (1, 1) and status.fallbacks == expected


@pytest.mark.parametrize("name", ["cu_seqlens", "position_embeddings"])
def test_changed_arguments_reach_the_block(tower: Any, name: str) -> None:
    """Let layer 1 attend over all rows, or turn its positions around."""

    def change(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if name == "cu_seqlens":
            return args, kwargs | {name: kwargs[name][[0, -1]]}
        return args, kwargs | {name: tuple(table.flip(0) for table in kwargs[name])}

    def run(each: Any) -> list[Tensor]:
        unchanged = run_tower(each, GRID)
        each.blocks[1].register_forward_pre_hook(change, with_kwargs=True)
        outputs = run_tower(each, GRID)
        assert any(not torch.allclose(*pair, atol=1e-3) for pair in zip(outputs, unchanged, strict=True))
        return outputs

    compare(tower, run, calls=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_hooked_block_is_checkpointed_once(tower: Any, reentrant: bool) -> None:
    def run(each: Any) -> list[Tensor]:
        checkpoint_layers(each.train(), reentrant=reentrant)
        seen: list[Tensor] = []
        for module in (each.blocks[0], each.blocks[2], each.blocks[2].mlp):
            module.register_forward_hook(lambda _, __, output: seen.extend(tensors_in([output])))
        return [*training_step(each, GRID), *seen]

    compare(tower, run)


def test_a_steering_vector_learns_on_a_frozen_tower(tower: Any) -> None:
    """A hook adds a trained vector to the rows of layer 0: nothing of the tower itself requires a gradient."""

    def run(each: Any) -> list[Tensor]:
        weight = each.requires_grad_(False).blocks[0].norm1.weight
        vector = torch.linspace(-1, 1, len(weight)).requires_grad_()
        each.blocks[0].register_forward_hook(lambda _, __, output: output + vector)
        outputs = outputs_of(each(pixels_for(each, GRID), grid_thw=torch.tensor(GRID)))
        sum(output.square().mean() for output in outputs).backward()
        return [*(output.detach() for output in outputs), vector.grad]

    compare(tower, run, calls=1)


def test_fewer_rows_are_refused(tower: Any) -> None:
    """Stock fails in the next layer's rotation; our kernels would read beyond the rows."""
    hf_vit_accel.patch(tower)
    tower.blocks[1].register_forward_hook(lambda _, __, output: output[:-4])
    with pytest.raises(ValueError, match="from the hooks of a block"):
        run_tower(tower, GRID)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kept_rows_stay(tower: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep inputs and outputs without a copy, and return an input: later layers do not write to them."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # stock's convolution would use it

    def run(each: Any) -> list[Tensor]:
        kept: list[Tensor] = []
        each.blocks[0].register_forward_hook(lambda _, args, output: kept.extend([args[0], output]))
        each.blocks[2].register_forward_hook(lambda _, args, output: kept.append(args[0]) or args[0])
        return [*run_tower(each, GRID), *kept]

    compare(tower.to(device), run, calls=1)
