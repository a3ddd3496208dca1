"""How people wrap and call a patched model: accelerate, checkpointing, DDP, `generate`, hooks, meta, own metadata."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from matrix import flat
from support.towers import ONE_TOWER, TOWERS
from tiny import (
    GRIDS,
    TINY,
    assert_close,
    chat_inputs,
    left_padded,
    pixels_for,
    relative_error,
    tower_of,
)
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hf_vit_accel
from hf_vit_accel.tower.forward import AcceleratedForward
from hf_vit_accel.tower.state import state_of

AUTO = "flash_vit_auto"
WAYS = ["patch", "name"]
Grid = list[tuple[int, int, int]]


# (Whole models of those in the matrix: test_registration.py, every time.)
@pytest.fixture(scope="module", params=[*ONE_TOWER, pytest.param("qwen3_vl_moe", marks=pytest.mark.matrix)])
def built(request: Any) -> Any:
    return TINY[request.param].build()


@pytest.fixture
def shared(built: Any) -> Iterator[Any]:
    """One model per family for tests that leave it as they found it; stock again even after one that failed."""
    yield built
    hf_vit_accel.unpatch(built)


@pytest.fixture(params=ONE_TOWER)
def model(request: Any) -> Any:
    return TINY[request.param].build()


def accelerate(model: Any, way: str) -> None:
    """Patched, or told the registered name as loading by it does."""
    if way == "patch":
        hf_vit_accel.patch(model)
    else:
        model.set_attn_implementation(AUTO)


def status_of(model: Any) -> Any:
    [status] = hf_vit_accel.status(model).towers
    return status


def check_calls(model: Any, fast: int, stock: int, *reasons: str) -> None:
    """So many calls went the fast path and the stock way, for these reasons and no others."""
    state, status = state_of(tower_of(model)), status_of(model)
    assert (state.calls, state.stock_calls) == (status.calls, status.stock_calls) == (fast, stock)
    assert status.fallbacks == dict(state.fallbacks)
    assert all(any(reason in found for reason in reasons) for found in state.fallbacks), state.fallbacks
    assert all(any(reason in found for found in state.fallbacks) for reason in reasons), state.fallbacks


def check_stock(model: Any, grid: Grid, expected: list[torch.Tensor], bound: float = 0.0) -> None:
    """After `unpatch` nothing of ours is left, and the tower computes what it did."""
    tower = tower_of(model)
    hf_vit_accel.unpatch(model)
    assert state_of(tower) is None and not status_of(model).patched
    assert not any(isinstance(value, AcceleratedForward) for value in vars(tower).values())
    assert tower.config._attn_implementation == "sdpa"
    assert_close(run(tower, grid), expected, bound)


def run(tower: Any, grid: Grid, **kwargs: Any) -> list[torch.Tensor]:
    """One forward without gradients on fp32 pixels on the CPU, wherever the weights are just now."""
    with torch.no_grad():
        return flat(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid), **kwargs))


def gradients(tower: Any, grid: Grid, forward: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """The gradients of pixels and of every parameter, each of which the loss depends on."""
    tower.zero_grad(set_to_none=True)
    pixels = pixels_for(tower, grid).requires_grad_()
    output = (forward or tower)(pixels, grid_thw=torch.tensor(grid))
    torch.stack([tensor.square().mean() for tensor in flat(output)]).sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())
    return [pixels.grad, *(parameter.grad for parameter in tower.parameters())]


# --- accelerate -----------------------------------------------------------------------------------------------------


class Recorder(ModelHook):
    """Counts forwards, before and after."""

    def __init__(self) -> None:
        self.before = self.after = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.before += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.after += 1
        return output


@pytest.mark.parametrize(
    ("when", "undo", "way"),
    [
        ("hooked before", "hook first", "patch"),
        ("hooked before", "patch first", "name"),
        ("hooked after", "hook first", "name"),
        ("hooked after", "patch first", "patch"),
    ],
)
def test_accelerate_hooks_on_the_tower_keep_the_fast_path(model: Any, when: str, undo: str, way: str) -> None:
    tower, grid, recorder = tower_of(model), GRIDS["images"], Recorder()
    expected, class_forward = run(tower, grid), type(tower).forward
    if when == "hooked after":
        accelerate(model, way)
    add_hook_to_module(tower, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    if when == "hooked before":
        accelerate(model, way)
    add_hook_to_module(tower, recorder, append=True)  # takes the first hook off and both on again
    assert_close(run(tower, grid), expected)
    check_calls(model, 1, 0)
    assert (recorder.before, recorder.after) == (1, 1) and not status_of(model).against_fast
    if undo == "hook first":
        remove_hook_from_module(tower)
        assert isinstance(vars(tower)["forward"], AcceleratedForward) and "_old_forward" not in vars(tower)
        assert_close(run(tower, grid), expected)
        check_calls(model, 2, 0)
        check_stock(model, grid, expected)
        assert recorder.before == 1
    else:
        check_stock(model, grid, expected)
        assert recorder.before == recorder.after == 2, "the hook outlives the patch"
        assert tower._old_forward.__func__ is class_forward and tower._old_forward.__self__ is tower
        remove_hook_from_module(tower)
    assert getattr(vars(tower).get("forward", class_forward), "__func__", class_forward) is class_forward
    assert_close(run(tower, grid), expected, 0.0)
    hf_vit_accel.patch(model, strict=True)
    assert_close(run(tower, grid), expected)
    check_calls(model, 1, 0)


@pytest.mark.parametrize("name", ["blocks.1", "blocks.2.attn", "blocks.0.attn.qkv", "merger"])
def test_accelerate_hooks_inside_run_as_in_stock(model: Any, name: str) -> None:
    tower, grid, recorder = tower_of(model), GRIDS["images"], Recorder()
    expected = run(tower, grid)
    hf_vit_accel.patch(model)
    add_hook_to_module(tower.get_submodule(name), recorder)
    assert_close(run(tower, grid), expected)
    assert recorder.before == recorder.after == 1
    own = ["has a forward of its own"] if name in ("blocks.1", "blocks.2.attn") else []
    check_calls(model, 0, 1, f"accelerate hooks on {name}", *own)
    assert f"accelerate hooks on {name}" in status_of(model).against_fast
    check_stock(model, grid, expected)
    assert recorder.before == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["offloaded before", "offloaded after"])
def test_cpu_offload_goes_the_stock_way(model: Any, when: str, way: str) -> None:
    tower, grid = tower_of(model), GRIDS["mixed"]
    inputs, arguments = chat_inputs(model, GRIDS["images"]), dict(max_new_tokens=3, do_sample=False)
    expected, tokens = run(tower, grid), model.generate(**inputs, **arguments)
    if when == "offloaded after":
        accelerate(model, way)
    cpu_offload(model, execution_device="cpu")
    if when == "offloaded before":
        accelerate(model, way)
    assert tower.patch_embed.proj.weight.device.type == "meta"
    assert_close(run(tower, grid), expected)
    assert torch.equal(model.generate(**inputs, **arguments), tokens)
    check_calls(model, 0, 2, "accelerate hooks on patch_embed")
    check_stock(model, grid, expected)
    remove_hook_from_submodules(model)
    assert tower.patch_embed.proj.weight.device.type == "cpu"
    assert_close(run(tower, grid), expected, 0.0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_device_map_through_the_tower_goes_the_stock_way(model: Any, when: str, tmp_path: Any) -> None:
    """Some layers offloaded, as where a tower does not fit; the passes that are asked for are not for this forward."""
    tower, grid = tower_of(model), GRIDS["mixed"]
    expected = run(tower, grid)
    places: dict[str, Any] = {name: "cpu" for name, _ in tower.named_children() if name != "blocks"}
    places |= {f"blocks.{index}": "disk" if index > 1 else "cpu" for index in range(len(tower.blocks))}
    if when == "before":
        hf_vit_accel.patch(model, max_rows=100)
    dispatch_model(tower, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    if when == "after":
        hf_vit_accel.patch(model, max_rows=100)
    assert tower.blocks[2].attn.qkv.weight.device.type == "meta"
    assert_close(run(tower, grid), expected)
    [status] = hf_vit_accel.status(model).towers
    assert (status.calls, status.stock_calls, status.passes) == (0, 1, None)
    assert any("accelerate hooks on blocks.2" in why for why in status.fallbacks)


def align(tower: Any, places: dict[str, Any]) -> None:
    """Hooks that bring inputs to a place, as accelerate puts them on every module for `device_map`."""
    for name, module in tower.named_modules():
        place = next((places[prefix] for prefix in places if prefix and name.startswith(prefix)), places[""])
        add_hook_to_module(module, AlignDevicesHook(execution_device=place))


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_that_only_align_devices_keep_the_fast_path_of_a_tower_on_one(model: Any, when: str) -> None:
    tower, grid = tower_of(model), GRIDS["mixed"]
    expected = run(tower, grid)
    if when == "before":
        hf_vit_accel.patch(model)
    align(tower, {"": "cpu"})
    if when == "after":
        hf_vit_accel.patch(model)
    assert_close(run(tower, grid), expected)
    check_calls(model, 1, 0)
    assert "patch_embed" in status_of(model).fused, "a hook that does nothing is no forward of the module's own"
    stock = tower.blocks[1].attn._old_forward
    tower.blocks[1].attn._old_forward = lambda *args, **kwargs: stock(*args, **kwargs) * 2
    changed = run(tower, grid)
    assert relative_error(changed[0], expected[0]) > 1e-2, "what a hook wraps is seen"
    check_calls(model, 1, 1, "has a forward of its own")


@pytest.mark.parametrize("places", [{"": "cpu", "blocks.2": torch.device("cpu")}, {"": None, "merger": "cpu"}], ids=str)
def test_hooks_that_align_to_several_places_go_the_stock_way(model: Any, places: dict[str, Any]) -> None:
    tower, grid = tower_of(model), GRIDS["mixed"]
    expected = run(tower, grid)
    hf_vit_accel.patch(model)
    align(tower, places)
    assert_close(run(tower, grid), expected)
    assert state_of(tower).calls == 0 and "accelerate hooks on " in status_of(model).against_fast[0]


def test_parameters_on_several_devices_go_the_stock_way(model: Any) -> None:
    tower = tower_of(model)
    align(tower, {"": "cpu"})
    tower.blocks[1].attn.qkv.weight = nn.Parameter(tower.blocks[1].attn.qkv.weight.to("meta"))
    hf_vit_accel.patch(model)
    assert status_of(model).against_fast == ("parameters on several devices",)


@pytest.mark.parametrize("patched_when", ["before", "meanwhile", "after"])
def test_after_offloading_the_fast_path_is_used_again(model: Any, patched_when: str) -> None:
    tower, grid = tower_of(model), GRIDS["mixed"]
    expected = run(tower, grid)
    if patched_when == "before":
        hf_vit_accel.patch(model)
        run(tower, grid)
    cpu_offload(model, execution_device="cpu")
    if patched_when == "meanwhile":
        hf_vit_accel.patch(model)
    assert_close(run(tower, grid), expected)
    remove_hook_from_submodules(model)
    if patched_when == "after":
        hf_vit_accel.patch(model)
    before = state_of(tower).calls, state_of(tower).stock_calls
    assert_close(run(tower, grid), expected)
    assert not status_of(model).against_fast
    assert (state_of(tower).calls, state_of(tower).stock_calls) == (before[0] + 1, before[1])
    check_stock(model, grid, expected)


@pytest.mark.parametrize(
    "name", ["blocks.1", "blocks.2.attn", "blocks.0.attn.qkv", "patch_embed", "patch_embed.proj", "merger"]
)
@pytest.mark.parametrize("patched_when", ["before", "after"])
def test_removed_accelerate_hooks_leave_nothing_behind(patched_when: str, name: str) -> None:
    """accelerate leaves the class's forward, bound, on the instance when it takes a hook off: the same as none."""
    model = TINY["qwen2_5_vl"].build()
    tower, grid = tower_of(model), GRIDS["images"]
    expected = run(tower, grid)
    with hf_vit_accel.patched(model):
        fused = status_of(model).fused
    if patched_when == "before":
        hf_vit_accel.patch(model)
    add_hook_to_module(tower.get_submodule(name), Recorder())
    run(tower, grid)
    remove_hook_from_module(tower.get_submodule(name))
    hf_vit_accel.patch(model)
    assert_close(run(tower, grid), expected)
    check_calls(model, 1, 0)
    assert status_of(model).fused == fused and "patch_embed" in fused
    check_stock(model, grid, expected)


# --- training, modes, other parameters ------------------------------------------------------------------------------


def test_a_checkpointed_tower_runs_fast_and_is_recomputed_fast(model: Any) -> None:
    """Reentrant checkpointing of the whole tower: the first pass is without gradients, the second with them."""
    tower, twin, grid = tower_of(model), tower_of(copy.deepcopy(model)), GRIDS["mixed"]
    hf_vit_accel.patch(model)

    def forward(pixels: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        return checkpoint(lambda pixels: tuple(flat(tower(pixels, grid_thw))), pixels, use_reentrant=True)

    assert_close(gradients(tower, grid, forward), gradients(twin, grid))
    check_calls(model, 2, 0)


@pytest.mark.parametrize("whole", [True, False])
def test_checkpointing_that_ends_early_is_no_fault(references: Any, model: Any, whole: bool) -> None:
    """Without re-entering, what runs again ends by an error as soon as all that was saved is there: in an operation."""
    tower, twin, grid = tower_of(model), tower_of(copy.deepcopy(model)), GRIDS["mixed"]
    if not whole:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.train()
    hf_vit_accel.patch(model)

    def forward(pixels: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        run = lambda pixels: tuple(flat(tower(pixels, grid_thw)))  # noqa: E731
        return checkpoint(run, pixels, use_reentrant=False) if whole else run(pixels)

    for _ in range(2):
        assert_close(gradients(tower, grid, forward), gradients(twin, grid))
    assert status_of(model).stock_calls == 0 and not state_of(tower).faults


def test_inference_mode_and_then_training(model: Any) -> None:
    tower, twin, grid = tower_of(model), tower_of(copy.deepcopy(model)), GRIDS["mixed"]
    with torch.inference_mode():
        expected = flat(twin(pixels_for(twin, grid), grid_thw=torch.tensor(grid)))
        hf_vit_accel.patch(model)
        found = flat(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)))
    assert all(tensor.is_inference() for tensor in found)
    assert_close(found, expected)
    check_calls(model, 1, 0)
    tower.requires_grad_(False)  # features of a frozen tower, from the layout cached above, train a head
    head = nn.Linear(32, 1)
    head(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)).pooler_output).sum().backward()
    assert head.weight.grad is not None and state_of(tower).routes.cache.hits == 1
    check_calls(model, 2, 0)
    tower.requires_grad_(True)
    assert_close(gradients(tower, grid), gradients(twin, grid))
    check_calls(model, 3, 0)
    for of in (tower, twin):
        torch.optim.SGD(of.parameters(), lr=0.1).step()
    assert relative_error(run(tower, grid)[0], expected[0]) > 1e-5
    assert_close(run(tower, grid), run(twin, grid))
    check_calls(model, 5, 0)


@pytest.mark.parametrize("wrap", [nn.Parameter, torch.Tensor.detach], ids=["parameters", "tensors"])
def test_functional_call_uses_the_given_parameters(shared: Any, wrap: Callable[..., torch.Tensor]) -> None:
    tower, grid = tower_of(shared), GRIDS["mixed"]
    before = run(tower, grid)
    given = {name: wrap(parameter.detach() * 1.25) for name, parameter in tower.named_parameters()}

    def call() -> list[torch.Tensor]:
        kwargs = {"grid_thw": torch.tensor(grid)}
        with torch.no_grad():
            return flat(functional_call(tower, given, (pixels_for(tower, grid),), kwargs))

    expected = call()
    assert relative_error(expected[0], before[0]) > 0.05
    with hf_vit_accel.patched(shared):
        assert_close(run(tower, grid), before)
        assert_close(call(), expected)
        assert_close(run(tower, grid), before)
        if wrap is nn.Parameter:
            check_calls(shared, 3, 0)
        else:
            check_calls(shared, 2, 1, "parameters of a class of their own (Tensor)")
    check_stock(shared, grid, before)


@pytest.mark.parametrize("warm", [True, False], ids=["known layout", "new layout"])
def test_gradients_of_a_functional_call(shared: Any, warm: bool) -> None:
    tower, grid = tower_of(shared), GRIDS["images"]
    given = {name: parameter.detach() * 1.25 for name, parameter in tower.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = pixels_for(tower, grid), torch.tensor(grid)
        return functional_call(tower, parameters, inputs).pooler_output.square().mean()

    expected, usual = torch.func.grad(loss)(given), gradients(tower, grid)
    with hf_vit_accel.patched(shared):
        if warm:
            tower(pixels_for(tower, grid), torch.tensor(grid))
        found = torch.func.grad(loss)(given)
        check_calls(shared, warm, 1, "parameters of a class of their own", "a transform of torch.func")
        assert_close(gradients(tower, grid), usual)  # no layout was kept that ends with the transform
    tower.zero_grad()
    assert found["blocks.0.attn.qkv.weight"].norm() > 0
    assert_close(list(found.values()), list(expected.values()))


# --- generate and features ------------------------------------------------------------------------------------------


GENERATE: dict[str, tuple[Callable[[Any], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "left-padded batch": (left_padded, {}),
    "beams": (left_padded, {"num_beams": 2}),
    "video": (lambda model: chat_inputs(model, GRIDS["video"]), {}),
    "image and video": (lambda model: chat_inputs(model, [(1, 4, 6), (2, 6, 4)]), {"num_beams": 2}),
}


def count_calls(tower: nn.Module, act: Callable[[], Any]) -> tuple[int, Any]:
    """How often the tower is called, by a hook on the tower itself, and what comes of it."""
    called: list[int] = []
    handle = tower.register_forward_hook(lambda *_: called.append(1))
    try:
        result = act()
    finally:
        handle.remove()
    return len(called), result


@pytest.mark.parametrize(("case", "way"), [(case, WAYS[at % 2]) for at, case in enumerate(GENERATE)])
@pytest.mark.parametrize("built", TOWERS, indirect=True)
def test_generate_is_token_identical_twice_in_a_row(shared: Any, case: str, way: str) -> None:
    make, kwargs = GENERATE[case]
    tower, inputs = tower_of(shared), make(shared)

    def generate() -> torch.Tensor:
        return shared.generate(**inputs, **kwargs, max_new_tokens=6, do_sample=False)

    called, expected = count_calls(tower, generate)
    assert called > 0
    accelerate(shared, way)
    assert torch.equal(generate(), expected)
    check_calls(shared, called, 0)
    assert torch.equal(generate(), expected)
    check_calls(shared, 2 * called, 0)
    assert state_of(tower).routes.cache.hits >= called
    hf_vit_accel.unpatch(shared)
    assert torch.equal(generate(), expected)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("built", TOWERS, indirect=True)
def test_features_equal_stock(shared: Any, kind: str) -> None:
    tower, grid = tower_of(shared), GRIDS["images" if kind == "image" else "video"]

    @torch.no_grad()
    def features() -> Any:
        return getattr(shared, f"get_{kind}_features")(pixels_for(tower, grid), torch.tensor(grid))

    expected = features()
    with hf_vit_accel.patched(shared, strict=True):
        found = features()
        check_calls(shared, 1, 0)
    assert type(found) is type(expected) and list(found) == list(expected)
    assert len(found.pooler_output) == len(grid)
    assert_close(flat(found), flat(expected))


def test_encoded_once_the_tower_does_not_run_in_generate(shared: Any) -> None:
    if "mm_encoder_outputs" not in inspect.signature(shared.forward).parameters:
        pytest.skip("this transformers takes no encoder outputs")
    tower, inputs, arguments = tower_of(shared), left_padded(shared), dict(max_new_tokens=6, do_sample=False)
    expected = shared.generate(**inputs, **arguments)
    pixels = inputs.pop("pixel_values")
    with hf_vit_accel.patched(shared):
        with torch.no_grad():
            encoded = shared.get_image_features(pixels, inputs["image_grid_thw"])
        check_calls(shared, 1, 0)
        for _ in range(2):
            called, found = count_calls(
                tower,
                lambda: shared.generate(**inputs, mm_encoder_outputs={"image": copy.copy(encoded)}, **arguments),
            )
            assert called == 0 and torch.equal(found, expected)
        check_calls(shared, 1, 0)


# --- what is handed to patch ----------------------------------------------------------------------------------------


class Retriever(nn.Module):
    """Holds a model and calls its tower directly, as retrieval models do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vlm, self.head = model.model, nn.Linear(32, 4)

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return self.head(self.vlm.visual(pixels, grid_thw=grid_thw).pooler_output)


HANDLES: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "model": (lambda model: model, "model.visual"),
    "base model": (lambda model: model.model, "visual"),
    "tower": (tower_of, ""),
    "wrapper": (Retriever, "vlm.visual"),
    "wrapped twice": (lambda model: nn.Sequential(Retriever(model)), "0.vlm.visual"),
}


@pytest.mark.parametrize("handle", HANDLES)
def test_whatever_holds_a_tower_can_be_handed_over(shared: Any, handle: str) -> None:
    make, path = HANDLES[handle]
    tower, held, grid = tower_of(shared), make(shared), GRIDS["images"]
    wrapper = Retriever(shared)

    @torch.no_grad()
    def features() -> torch.Tensor:
        return wrapper(pixels_for(tower, grid), torch.tensor(grid))

    expected, through_wrapper = run(tower, grid), features()
    assert hf_vit_accel.patch(held) is held
    assert status_of(held).path == path and status_of(held).patched
    assert_close(run(tower, grid), expected)
    assert_close([features()], [through_wrapper])
    check_calls(held, 2, 0)
    assert hf_vit_accel.unpatch(held) is held
    check_stock(shared, grid, expected)


# --- dtypes and classes of parameters -------------------------------------------------------------------------------


def test_parameters_of_several_dtypes_go_the_stock_way(model: Any) -> None:
    tower, grid = tower_of(model).bfloat16(), GRIDS["image"]
    for block in tower.blocks:
        block.norm1.float()
        block.norm2.float()
    rms = hasattr(tower.blocks[0].norm1, "variance_epsilon")  # gives fp32 back, which no bf16 Linear takes
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rms):
        expected = run(tower, grid)
        hf_vit_accel.patch(model)
        assert_close(run(tower, grid), expected, 2e-2)
        check_calls(model, 0, 1, "several dtypes (torch.bfloat16, torch.float32)")
        check_stock(model, grid, expected)
    hf_vit_accel.patch(model.float())
    run(tower, grid)
    check_calls(model, 1, 0)


LINEARS = r".*blocks\.\d+\..*(qkv|proj|fc1|fc2|linear_fc1|linear_fc2|gate_proj|up_proj|down_proj)"
TUNERS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False),
    "DoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False, use_dora=True),
    "LoHa": lambda peft: peft.LoHaConfig(r=4, target_modules=LINEARS, init_weights=False),
    "IA3": lambda peft: peft.IA3Config(target_modules=LINEARS, feedforward_modules=[], init_ia3_weights=False),
}


@pytest.mark.parametrize(
    ("tuner", "autocast"),
    [("LoRA", False), ("LoRA", True), ("DoRA", True), ("LoHa", False), ("IA3", True)],
)
def test_adapters_in_fp32_beside_weights_in_bf16(tuner: str, autocast: bool) -> None:
    """As PEFT makes them of a model in bf16, whatever it is trained by: adapters cast what they take and give."""
    peft = pytest.importorskip("peft")
    model = TINY["qwen2_5_vl"].build().bfloat16()
    torch.manual_seed(0)
    tower, grid = tower_of(peft.get_peft_model(model, TUNERS[tuner](peft))), GRIDS["images"]
    adapters = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    assert adapters and {parameter.dtype for parameter in adapters} == {torch.float32}

    def step(tower: Any) -> list[torch.Tensor]:
        tower.zero_grad(set_to_none=True)
        weight = next(tower.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and weight.dtype != torch.float32):
            outputs = flat(tower(pixels_for(tower, grid).to(weight.dtype), grid_thw=torch.tensor(grid)))
        assert len({output.dtype for output in outputs}) == 1 and outputs[0].dtype == weight.dtype
        torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
        trained = [parameter.grad for parameter in tower.parameters() if parameter.requires_grad]
        return [*(output.detach().float() for output in outputs), *trained]

    exact, expected = step(copy.deepcopy(tower).float()), step(tower)
    hf_vit_accel.patch(model)
    found = step(tower)
    check_calls(model, 1, 0)
    for one, other, reference in zip(found, expected, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, reference) <= 1.5 * relative_error(other, reference) + 2**-8
    hf_vit_accel.unpatch(model)
    assert all(map(torch.equal, step(tower), expected))


def test_an_adapter_over_a_weight_of_another_dtype_goes_the_stock_way(model: Any) -> None:
    """Adapters are left out of the question, not what they adapt, nor what is trained whole beside them."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model.bfloat16(), peft.LoraConfig(r=4, target_modules=LINEARS))
    tower, grid = tower_of(adapted), GRIDS["image"]
    hf_vit_accel.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        run(tower, grid)
        check_calls(model, 1, 0)
        tower.blocks[1].attn.proj.base_layer.float()
        run(tower, grid)
    check_calls(model, 1, 1, "several dtypes (torch.bfloat16, torch.float32)")


def test_a_module_trained_whole_in_another_dtype_goes_the_stock_way(model: Any) -> None:
    """PEFT names copies for `modules_to_save` as it names adapters, but casts nothing around them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*blocks\.\d+\.attn\.proj", modules_to_save=["norm1"])
    tower, grid = tower_of(peft.get_peft_model(model.bfloat16(), config)), GRIDS["image"]
    for name, parameter in tower.named_parameters():
        if "modules_to_save" in name:
            parameter.data = parameter.data.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(tower, grid)
        hf_vit_accel.patch(model)
        assert_close(run(tower, grid), expected)
    check_calls(model, 0, 1, "several dtypes (torch.bfloat16, torch.float32)")


class Tripled(nn.Parameter):
    """A parameter whose class changes what a Linear computes with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 3 if func is nn.functional.linear else result


@pytest.mark.parametrize("name", ["blocks.1.attn.qkv", "blocks.2.mlp", "merger"])
def test_parameters_of_a_class_of_their_own_are_used(model: Any, name: str) -> None:
    tower, grid = tower_of(model), GRIDS["images"]
    before = run(tower, grid)
    linear = next(module for module in tower.get_submodule(name).modules() if isinstance(module, nn.Linear))
    plain, linear.weight = linear.weight, Tripled(linear.weight.detach().clone())
    expected = run(tower, grid)
    assert max(map(relative_error, expected, before)) > 0.05
    hf_vit_accel.patch(model)
    assert_close(run(tower, grid), expected)
    check_calls(model, 0, 1, "parameters of a class of their own (Tripled)")
    linear.weight = plain
    assert_close(run(tower, grid), before)
    check_calls(model, 1, 1, "parameters of a class of their own (Tripled)")
    check_stock(model, grid, before)


# --- meta -----------------------------------------------------------------------------------------------------------


def fill(model: Any, stock: Any) -> None:
    """Bring a model from the meta device to the CPU with the weights of another, and the buffers that are not saved."""
    model.to_empty(device="cpu")
    model.load_state_dict(stock.state_dict())
    for name, buffer in stock.named_buffers():
        model.get_buffer(name).copy_(buffer)


@pytest.mark.parametrize(("way", "used"), [("built by name", True), ("patch", False), ("name", True)])
def test_from_the_meta_device(shared: Any, way: str, used: bool) -> None:
    tower, grid = tower_of(shared), GRIDS["mixed"]
    inputs, arguments = left_padded(shared), dict(max_new_tokens=4, do_sample=False)
    expected, tokens = run(tower, grid), shared.generate(**inputs, **arguments)
    kwargs = {"attn_implementation": AUTO} if way == "built by name" else {}
    with torch.device("meta"):
        model = type(shared)._from_config(copy.deepcopy(shared.config), **kwargs).eval()
    if not kwargs:
        accelerate(model, way)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert status_of(model).patched and "patched" in str(hf_vit_accel.status(model))
    if used:
        with torch.no_grad():
            pixels = pixels_for(tower, grid, device="meta")
            shapes = flat(tower_of(model)(pixels, grid_thw=torch.tensor(grid)))
        assert [x.shape for x in shapes] == [x.shape for x in expected] and {x.device.type for x in shapes} == {"meta"}
    fill(model, shared)
    assert_close(run(tower_of(model), grid), expected)
    check_calls(model, 1 + used, 0)
    assert torch.equal(model.generate(**inputs, **arguments), tokens)
    check_stock(model, grid, expected)


# --- metadata from the caller ---------------------------------------------------------------------------------------


def supplied(tower: Any, grid: Grid) -> dict[str, dict[str, Any]]:
    """For every keyword that the tower takes, values that the grid would not give."""
    rows, generator = sum(t * h * w for t, h, w in grid), torch.Generator().manual_seed(0)
    cases: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": torch.randint(0, 9, (rows, 2), generator=generator)},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, rows // 2 // 4 * 4, rows], dtype=torch.int32)},
        "max_seqlen": {"max_seqlen": rows},
    }
    if hasattr(tower, "window_size"):
        halves = torch.tensor([0, rows // 8 * 4, rows], dtype=torch.int32)
        order = torch.randperm(rows // 4, generator=generator)
        cases["window"] = {"window_index": order, "cu_window_seqlens": halves}
    if hasattr(tower, "pos_embed"):
        indices = torch.randint(0, 36, (rows, 4), generator=generator)
        weights = torch.rand(rows, 4, generator=generator)
        cases["interpolation"] = {"interp_indices": indices, "interp_weights": weights}
    everything: dict[str, Any] = {}
    for case in cases.values():
        everything |= case
    return cases | {"everything": everything}


@pytest.mark.parametrize("way", WAYS)
def test_metadata_of_the_caller_goes_the_stock_way(shared: Any, way: str) -> None:
    tower, grid = tower_of(shared), GRIDS["mixed"]
    before, cases = run(tower, grid), supplied(tower, grid)
    expected = {name: run(tower, grid, **copy.deepcopy(kwargs)) for name, kwargs in cases.items()}
    for name, outputs in expected.items():
        assert relative_error(outputs[0], before[0]) > 1e-3 or name == "max_seqlen", f"{name} matters in stock"
    accelerate(shared, way)
    for count, (name, kwargs) in enumerate(cases.items(), 1):
        kept = copy.deepcopy(kwargs)
        assert_close(run(tower, grid, **kwargs), expected[name])
        check_calls(shared, 0, count, "the caller supplies sequence metadata")
        assert all(torch.equal(torch.as_tensor(kwargs[key]), torch.as_tensor(kept[key])) for key in kept)
    assert_close(run(tower, grid), before)
    check_calls(shared, 1, len(cases), "the caller supplies sequence metadata")
    check_stock(shared, grid, before)


# --- outputs asked for otherwise ------------------------------------------------------------------------------------


# --- layouts, models and configs side by side -----------------------------------------------------------------------


def test_two_models_one_patched(model: Any) -> None:
    tower, other = tower_of(model), tower_of(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    grids = "image", "mixed"
    expected = {grid: (run(tower, GRIDS[grid]), run(other, GRIDS[grid])) for grid in grids}
    class_forward, own = type(tower).forward, sorted(vars(other))
    hf_vit_accel.patch(model)
    for grid, (of_tower, of_other) in expected.items():
        assert_close(run(tower, GRIDS[grid]), of_tower)
        assert_close(run(other, GRIDS[grid]), of_other, 0.0)
    check_calls(model, len(grids), 0)
    assert sorted(vars(other)) == own and type(tower).forward is class_forward
    assert not status_of(other).patched and status_of(other).attention == "sdpa"
    for grid, (of_tower, of_other) in expected.items():
        check_stock(model, GRIDS[grid], of_tower)
        assert_close(run(other, GRIDS[grid]), of_other, 0.0)


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("at once", "sdpa"),
        ("at once", "eager"),
        ("first", "eager"),
        ("last", "sdpa"),
    ],
)
def test_two_towers_of_one_config(model: Any, order: str, name: str) -> None:
    """Unpatched together, in the order in which they were patched, or in the reverse order."""
    model.set_attn_implementation({"vision_config": name})
    one, grid = tower_of(model), GRIDS["mixed"]
    two = type(one)(one.config).eval()
    two.load_state_dict({key: value * 1.25 for key, value in one.state_dict().items()})
    both = nn.ModuleList([one, two])
    assert one.config is two.config and one.config._attn_implementation == name
    expected = run(one, grid), run(two, grid)

    def check() -> None:
        for tower, outputs in zip(both, expected, strict=True):
            assert_close(run(tower, grid), outputs)

    hf_vit_accel.patch(one)
    check()
    check_calls(one, 1, 0)
    assert state_of(two) is None, "stock, under the shared config's new name"
    hf_vit_accel.patch(two)
    check()
    check_calls(one, 2, 0)
    check_calls(two, 1, 0)
    if order == "at once":
        hf_vit_accel.unpatch(both)
    else:
        towers = (one, two) if order == "first" else (two, one)
        hf_vit_accel.unpatch(towers[0])
        check()
        assert state_of(towers[0]) is None and state_of(towers[1]).stock_calls == 0
        hf_vit_accel.unpatch(towers[1])
    assert one.config._attn_implementation == name and state_of(one) is state_of(two) is None
    for tower, outputs in zip(both, expected, strict=True):
        assert_close(run(tower, grid), outputs, 0.0)
