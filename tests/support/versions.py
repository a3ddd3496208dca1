"""Use towers in several ways under one version of transformers, for the table of versions in SUPPORT.md.

A cell says whether a use of a tower is fast. A use that does not give stock's results fails the test instead.
"""

import copy
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from tiny import checkpoint_layers, relative_error
from torch import nn

import hf_vit_accel
from hf_vit_accel.families import Tower
from hf_vit_accel.families.interface import named_tensors
from support.families import CLASSES, GRIDS, inputs, run, trained

RECORD = Path(__file__).parents[1] / "versions.json"
"""Class of a tower -> version of transformers -> use -> "fast", or why it is stock."""
NAME = "flash_vit_auto"
ENCODES_AGAIN = 0 if hasattr(transformers.GenerationMixin, "_supports_mm_encoder_outputs") else 2
"""More calls of a tower in a first call of decoding, which stock checks. Since 5.18 `generate` encodes once for all."""
Tensors = Iterable[torch.Tensor | None]
Cells = dict[str, str]
Record = dict[str, dict[str, Cells]]


def vision_function(name: str) -> Callable[..., torch.Tensor]:
    """Return a function of transformers that computes metadata; skip the test where transformers lacks it."""
    module = pytest.importorskip("transformers.vision_utils", reason="this transformers has no module vision_utils")
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no function {name}")
    function: Callable[..., torch.Tensor] = getattr(module, name)
    return function


def verdict(tower: Tower) -> str:
    """Return "fast" if all calls since `patch` were, else the reason why they were not."""
    [status] = hf_vit_accel.status(tower).towers
    assert status.calls + status.stock_calls > 0
    return "fast" if not status.stock_calls and not status.fallbacks else "; ".join(status.fallbacks)


def assert_equal(actual: Tensors, expected: Tensors, bound: float) -> None:
    """Expect dtypes of stock, None where stock has None, and errors below the bound."""
    pairs = list(zip(actual, expected, strict=True))
    assert [x is None for x, _ in pairs] == [y is None for _, y in pairs]
    pairs = [(x, y) for x, y in pairs if x is not None]
    assert [(x.dtype, x.shape) for x, _ in pairs] == [(y.dtype, y.shape) for _, y in pairs]
    total = sum(float(y.detach().double().norm()) for _, y in pairs)
    errors = [float((x.double() - y.double()).norm()) / (float(y.double().norm()) + 1e-3 * total) for x, y in pairs]
    assert max(errors) < bound, errors


def outputs(tower: Tower) -> str:
    """Compare outputs of images and of a clip, without gradients."""
    expected = [run(tower, grid) for grid in GRIDS]
    hf_vit_accel.patch(tower)
    for grid, stock in zip(GRIDS, expected, strict=True):
        assert_equal(run(tower, grid), stock, 1e-5)
    return verdict(tower)


def gradients(tower: Tower) -> str:
    """Compare outputs and the gradients of pixels and all parameters."""
    return trained_beside_stock(tower, 1e-5)


def trained_beside_stock(tower: Tower, bound: float) -> str:
    """Compare outputs, and gradients to ten times the bound."""
    expected = trained(tower, GRIDS[1])
    hf_vit_accel.patch(tower)
    actual = trained(tower, GRIDS[1])
    assert_equal(actual[0], expected[0], bound)
    assert_equal(actual[1], expected[1], 10 * bound)
    return verdict(tower)


def by_name(tower: Tower) -> str:
    """Load by name, and set the name later."""
    expected = run(tower, GRIDS[1])
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        tower.save_pretrained(folder)
        loaded = type(tower).from_pretrained(folder, attn_implementation=NAME, config=tower.config)
        stock = type(tower).from_pretrained(folder, config=tower.config)
    stock.set_attn_implementation(NAME)
    for named in (loaded.eval(), stock.eval()):
        assert named.config._attn_implementation == NAME
        assert_equal(run(named, GRIDS[1]), expected, 1e-5)
        verdicts.append(verdict(named))
    return verdicts[0] if len(set(verdicts)) == 1 else "; ".join(verdicts)


def autocast(tower: Tower) -> str:
    """Compare dtypes under autocast, and errors with those of stock, of outputs and of all gradients."""
    exact = trained(tower, GRIDS[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = trained(tower, GRIDS[1])
        hf_vit_accel.patch(tower)
        actual = trained(tower, GRIDS[1])
    assert [(x.dtype, x.shape) for x in actual[0]] == [(x.dtype, x.shape) for x in stock[0]]
    for ours, theirs, true in zip(actual[0], stock[0], exact[0], strict=True):
        assert relative_error(ours, true) <= 1.3 * relative_error(theirs, true), "one seed: the mean is 1.1 at most"
    joined = [torch.cat([x.flatten() for x in results[1] if x is not None]) for results in (actual, stock, exact)]
    assert relative_error(joined[0], joined[2]) <= 1.3 * relative_error(joined[1], joined[2])
    return verdict(tower)


def lora(tower: Tower) -> str:
    """Train adapters on every Linear of the blocks."""
    blocks = [name for name, module in tower.named_modules() if isinstance(module, nn.ModuleList)]
    linears = [
        name
        for name, module in tower.named_modules()
        if type(module) is nn.Linear and any(name.startswith(f"{block}.") for block in blocks)
    ]
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=linears, init_lora_weights=False), tower)
    return trained_beside_stock(tower, 1e-4)


def accumulated(tower: Tower) -> Tensors:
    """Return the outputs of a tower, and the gradients that its backward pass leaves on the parameters."""
    tower.zero_grad()
    _, pixels, grid_thw = inputs(tower, GRIDS[1])
    tensors = list(named_tensors(tower(pixels, grid_thw=grid_thw)).values())
    sum(tensor.square().mean() for tensor in tensors).backward()
    return [*(tensor.detach() for tensor in tensors), *(parameter.grad for parameter in tower.parameters())]


def checkpointing(tower: Tower) -> str:
    """Run layers again in the backward pass, in both of torch's ways."""
    verdicts = []
    for reentrant in (False, True):
        checkpointed = copy.deepcopy(tower)
        if not checkpointed.supports_gradient_checkpointing:
            return "transformers does not checkpoint it"
        checkpoint_layers(checkpointed.train(), reentrant=reentrant)
        expected = accumulated(checkpointed)
        hf_vit_accel.patch(checkpointed)
        assert_equal(accumulated(checkpointed), expected, 1e-4)
        verdicts.append(verdict(checkpointed))
    return verdicts[0] if len(set(verdicts)) == 1 else "; ".join(verdicts)


USES: Mapping[str, Callable[[Tower], str]] = {
    "outputs": outputs,
    "gradients": gradients,
    "by name": by_name,
    "autocast": autocast,
    "LoRA": lora,
    "checkpointing": checkpointing,
}
"""Uses of a tower. Each compares with stock, and returns its cell."""


def read() -> Record:
    record: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def write(name: str, cells: Cells) -> None:
    """Record the cells of a tower under this version of transformers."""
    record = read()
    record.setdefault(name, {})[transformers.__version__] = cells
    record[name] = {version: record[name][version] for version in sorted(record[name], key=_as_numbers)}
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")


def _as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:3] if part.isdigit()]


def table() -> list[tuple[str, ...]]:
    """Return the rows of the table of versions: a tower, versions with equal cells, and the cells."""
    rows: list[tuple[str, ...]] = []
    record = read()
    for family, _, name in CLASSES:
        groups: list[tuple[list[str], Cells]] = []
        for version, cells in record.get(name, {}).items():
            if groups and groups[-1][1] == cells:
                groups[-1][0].append(version)
            else:
                groups.append(([version], cells))
        for versions, cells in groups:
            span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
            rows.append((family.name, f"`{name}`", span, *(_cell(cells[use]) for use in USES)))
    return rows


def _cell(cell: str) -> str:
    return "fast" if cell == "fast" else f"stock: {cell}"


def takes_other_arguments(module: str, name: str) -> bool:
    """Return whether this transformers has a class of a tower that is called in another way."""
    kind = getattr(pytest.importorskip(module), name, None)
    return kind is not None and "grid_thw" not in inspect.signature(kind.forward).parameters
