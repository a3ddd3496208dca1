"""verl: the steps in which its FSDP engine builds a model, with its own forward for the family, on one CPU rank.

Its engine finds a device by CUDA alone, so the test gives it a mesh on the CPU. No rollout runs.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captioner.processors import load_processor
from support.stacks import Checkpoint, Job, every_family, inputs_of, pictures, read_recipe
from torch import Tensor, nn
from verl.trainer.config import CheckpointConfig
from verl.utils import fsdp_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import transformer_impl


@pytest.fixture(autouse=True)
def _one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transformer_impl, "log_gpu_memory_usage", lambda *_, **__: None)
    monkeypatch.setattr(fsdp_utils, "get_device_id", lambda: torch.device("cpu"))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def settings_of_the_recipe() -> dict[str, Any]:
    """Return the settings of a model that the recipe adds to the command line."""
    command = read_recipe("verl.diff")
    ((names, value),) = re.findall(r"\.override_config\.(\S+)=(\S+)", command)
    override: Any = value
    for name in reversed(names.split(".")):
        override = {name: override}
    (library,) = re.findall(r"\.model\.external_lib=(\S+)", command)
    return {"external_lib": library, "override_config": override}


def build(path: str, *, patched: bool, **options: Any) -> nn.Module:
    """Build and shard a model as verl's worker does."""
    settings = settings_of_the_recipe() if patched else {}
    override = {"attn_implementation": "sdpa"} | settings.pop("override_config", {})  # its default needs flash-attn
    model = HFModelConfig(path=path, override_config=override, use_remove_padding=False, **settings, **options)
    in_fp32 = {"model_dtype": "float32", "mixed_precision": {"param_dtype": "fp32"}}
    (strategy,) = re.findall(r"\.actor\.strategy=(\S+)", read_recipe("verl.diff"))
    config = FSDPEngineConfig(strategy=strategy, use_torch_compile=False, **in_fp32)
    engine = transformer_impl.FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(), CheckpointConfig())
    engine.device_mesh = torch.distributed.init_device_mesh("cpu", (1,))
    module = engine._build_module()
    if model.lora_rank:
        torch.manual_seed(0)
        module = engine._build_lora_module(module)
    return engine._build_fsdp_module(module).train()


@every_family
@pytest.mark.parametrize("way", ["all weights", "LoRA"])
def test_the_engine_s_model(family: str, way: str, checkpoint: Checkpoint) -> None:
    inputs = inputs_of(load_processor(checkpoint(family)), pictures(1)[0])
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand(4, 1, -1)  # of text, and three of M-RoPE
    runs = []
    for patched in (False, True):
        module = build(checkpoint(family), patched=patched, **({"lora_rank": 4} if way == "LoRA" else {}))
        logits = module(**inputs).logits
        logits.square().mean().backward()
        gradients = [parameter.grad.full_tensor() for parameter in module.parameters() if parameter.grad is not None]
        runs.append(flat([logits.detach(), *gradients]))
    Job("verl", f"FSDP2 engine, {way}, checkpointing", "verl").expect(family, *runs, module, bound=1e-3)


def flat(tensors: list[Tensor]) -> Tensor:
    """Join tensors, each divided by its size, so that all count."""
    return torch.cat([tensor.flatten() / tensor.norm().clamp_min(1e-6) for tensor in tensors])
