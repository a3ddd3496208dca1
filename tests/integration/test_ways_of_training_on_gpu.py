"""Ways of training a whole model on a GPU with `patch(model)` as it is, beside the same without CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.libraries import TOWER_LINEARS, lora
from support.uses import base_of, trained_parameters
from tiny import TINY, chat_inputs, relative_error, tower_of
from torch import nn

import hf_vit_accel

pytestmark = pytest.mark.gpu

STEPS = 6
MEASURED = 2
"""The last steps, whose memory is compared: captures are over by then."""
GRID = [(1, 16, 16), (1, 16, 12)]
STATIC_BYTES = 6 << 20
"""Static pixels and outputs of the largest call that is replayed: much beside this small tower alone."""
STEPS_REPLAYED = "training steps were replayed"

_QWEN = TINY["qwen2_5_vl"]
LARGER = replace(
    _QWEN,
    vision=_QWEN.vision
    | dict(depth=8, hidden_size=640, num_heads=8, intermediate_size=1280, fullatt_block_indexes=[3, 7]),
)
"""A tower whose gradients and activations (60 and 70 MB in bf16) are large beside what an allocator rounds."""


@dataclass
class Training:
    model: nn.Module
    context: Callable[[], Any] = nullcontext  # of a forward
    accumulated: int = 1  # backward passes to a step of the optimizer
    gradients: list[list[torch.Tensor]] = field(default_factory=list)  # of the tower, by step

    def run(self) -> int:
        """Train for all steps; return the largest memory of the last ones."""
        optimizer = torch.optim.AdamW(trained_parameters(self.model), lr=1e-5)
        for step in range(STEPS):
            if step == STEPS - MEASURED:
                torch.cuda.reset_peak_memory_stats()
            for part in range(self.accumulated):
                inputs = inputs_for(self.model, seed=step * self.accumulated + part)
                with self.context():
                    loss = self.model(**inputs).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(trained_parameters(self.model), 1.0)
            self.remember_gradients()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()

    def remember_gradients(self) -> None:
        """Copy the gradients of the tower to the host."""
        copies = []
        for parameter in trained_parameters(tower_of(base_of(self.model))):
            if parameter.grad is not None:
                gradient: Any = parameter.grad
                copies.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).cpu())
        self.gradients.append(copies)


def inputs_for(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Make a chat with two pictures, and its own tokens as labels."""
    inputs = {name: value.to("cuda") for name, value in chat_inputs(base_of(model), GRID, seed).items()}
    inputs["pixel_values"] = inputs["pixel_values"].to(tower_of(base_of(model)).patch_embed.proj.weight.dtype)
    return inputs | {"labels": inputs["input_ids"]}


@pytest.fixture
def process_group() -> Iterator[ExitStack]:
    """Start an NCCL group of this process alone."""
    with ExitStack() as stack:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        stack.callback(torch.distributed.destroy_process_group)
        yield stack


def plain(model: nn.Module) -> Training:
    """Train as TRL does: a loop of forward, backward, clipping and optimizer."""
    return Training(model)


def ddp(model: nn.Module) -> Training:
    return Training(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True))


def fsdp2(model: nn.Module) -> Training:
    """Shard every block of the tower, and the model."""
    from torch.distributed.fsdp import fully_shard

    tower: Any = tower_of(model)
    for block in tower.blocks:
        fully_shard(block)
    return Training(fully_shard(model))


def adapted(model: nn.Module) -> Training:
    pytest.importorskip("peft")
    with ExitStack() as stack:
        return Training(lora(TOWER_LINEARS)(model, stack).train())


def accumulating(model: nn.Module) -> Training:
    """Add the gradients of two backward passes."""
    return Training(model, accumulated=2)


def checkpointed(model: Any) -> Training:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Training(model)


def autocast(model: nn.Module) -> Training:
    """Keep weights in fp32, and compute in bf16."""
    return Training(model.float(), context=lambda: torch.autocast("cuda", dtype=torch.bfloat16))


def frozen(model: nn.Module) -> Training:
    """Train the text alone."""
    tower_of(model).requires_grad_(False)
    return Training(model)


WAYS: dict[Callable[[Any], Training], str] = {
    plain: STEPS_REPLAYED,
    ddp: STEPS_REPLAYED,
    fsdp2: "FSDP2 gathers weights again at every call",
    adapted: "might act otherwise at a later call",
    accumulating: STEPS_REPLAYED,
    checkpointed: "gradient checkpointing runs layers again",
    autocast: STEPS_REPLAYED,
    frozen: "replayed",
}
"""What `status` says of the last call."""


def build() -> Any:
    """Build the model in bf16 on the GPU, with the same weights each time."""
    return deepcopy(LARGER.build()).to("cuda", torch.bfloat16).train()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_way_of_training(way: Callable[[Any], Training], process_group: ExitStack) -> None:
    results: dict[object, Training] = {}
    peaks: dict[object, int] = {}
    lines: dict[object, str] = {}
    for graphs in (False, "auto"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = hf_vit_accel.patch(build(), cuda_graphs=graphs)
        results[graphs] = way(model)
        peaks[graphs] = results[graphs].run() - before
        status = hf_vit_accel.status(base_of(results[graphs].model)).towers[0]
        has_replayed = status.training is not None and status.training.replays > 0
        lines[graphs] = f"{status}\n{STEPS_REPLAYED if has_replayed else ''}"
        hf_vit_accel.unpatch(base_of(results[graphs].model))
        results[graphs].model = nn.Module()
        del model
    check_gradients(results["auto"].gradients, results[False].gradients)
    assert peaks["auto"] <= 1.03 * peaks[False] + STATIC_BYTES, peaks
    assert WAYS[way] in lines["auto"], lines["auto"]


def check_gradients(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert len(actual) == len(expected) == STEPS
    for step, (gradients, others) in enumerate(zip(actual, expected, strict=True)):
        assert len(gradients) == len(others)
        for gradient, other in zip(gradients, others, strict=True):
            assert relative_error(gradient, other) < 5e-2, step
