"""Wrap or change a model as libraries do: PEFT, accelerate, torch.distributed, torch.compile, Liger, transformers.

See `support.changes` for what a change is.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from tiny import tower_of
from torch import nn

from support.changes import Change

TOWER_LINEARS = r".*visual\.blocks\..*(qkv|proj|fc1|fc2|linear_fc1|linear_fc2)"
TEXT_LINEARS = r".*language_model.*(q_proj|v_proj)"


def lora(pattern: str, *steps: str) -> Change:
    """Add random LoRA matrices to the modules that a pattern matches; then "merge" or "unmerge" them, step by step."""

    def change(model: nn.Module, _: ExitStack) -> nn.Module:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=pattern, init_lora_weights=False)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).eval()
        for step in steps:
            getattr(adapted, f"{step}_adapter")()
        return adapted

    return change


def lora_unloaded(model: nn.Module, stack: ExitStack) -> nn.Module:
    """Add LoRA to the tower, merge it and take PEFT's modules away."""
    return lora(TOWER_LINEARS)(model, stack).merge_and_unload().eval()


def dispatched(model: nn.Module, stack: ExitStack) -> nn.Module:
    """Put hooks on the tower and the language model as `device_map` does; the latter's weights are on disk."""
    from accelerate import dispatch_model

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    places = {"model.visual": "cpu", "model.language_model": "disk", "lm_head": "cpu"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def offloaded(model: nn.Module, _: ExitStack) -> nn.Module:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device="cpu")
    return model


class Handler:
    """An object that keeps the forward, as accelerate's `ConvertOutputsToFp32` does."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def start_process_group(stack: ExitStack) -> None:
    """Start a gloo group of this process alone, which ends with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    store = torch.distributed.FileStore(f"{folder}/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    stack.callback(torch.distributed.destroy_process_group)


def ddp(model: nn.Module, stack: ExitStack) -> nn.Module:
    start_process_group(stack)
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(*, blocks: bool) -> Change:
    """Shard the model with FSDP2; with `blocks`, each block of the tower by itself first."""

    def change(model: nn.Module, stack: ExitStack) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        start_process_group(stack)
        mesh = init_device_mesh("cpu", (1,))
        if blocks:
            for block in tower_of(model).blocks:
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return change


# --- torch.compile ----------------------------------------------------------------------------------------------------
# The backend "eager" is enough: it decides nothing about what is traced.


def compiled_model(model: nn.Module, stack: ExitStack) -> nn.Module:
    stack.callback(torch._dynamo.reset)
    return torch.compile(model, backend="eager")


def compiled_tower(model: nn.Module, stack: ExitStack) -> nn.Module:
    stack.callback(torch._dynamo.reset)
    model.model.visual = torch.compile(model.model.visual, backend="eager")
    return model


def compiled_in_place(model: nn.Module, stack: ExitStack) -> nn.Module:
    stack.callback(torch._dynamo.reset)
    tower_of(model).compile(backend="eager")
    return model


def norms_bound(model: nn.Module, _: ExitStack) -> nn.Module:
    """Bind another forward to each norm of the blocks, as Liger and `kernels` do."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return type(self).forward(self, x) * 1.5

    for block in tower_of(model).blocks:
        for norm in (block.norm1, block.norm2):
            norm.forward = MethodType(forward, norm)
    return model


def rotation_replaced(model: nn.Module, stack: ExitStack) -> nn.Module:
    """Replace the rotation of queries and keys in transformers' module, as Liger does for Qwen3-VL."""
    module = sys.modules[type(model).__module__]
    stock = module.apply_rotary_pos_emb_vision
    stack.callback(setattr, module, "apply_rotary_pos_emb_vision", stock)
    module.apply_rotary_pos_emb_vision = lambda q, k, cos, sin: stock(q, k, cos, -sin)
    return model


def liger(*, classes: bool) -> Change:
    """Apply Liger on the GPU: to this instance, or to transformers' classes before another instance is built."""

    def change(model: nn.Module, stack: ExitStack) -> nn.Module:
        from liger_kernel.transformers import monkey_patch

        apply = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
        options = dict(fused_linear_cross_entropy=False)
        model = model.cuda()
        module = sys.modules[type(model).__module__]
        stack.callback(vars(module).update, dict(vars(module)))
        # Stock's convolution would round fp32 to TF32, which the product in its place does not.
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        torch.backends.cudnn.allow_tf32 = False
        if not classes:
            apply(**options, model=model)
            return model
        apply(**options)
        twin = type(model)._from_config(model.config).eval().cuda()
        twin.load_state_dict(model.state_dict())
        return twin

    return change


def fused_patch_embed(model: nn.Module, stack: ExitStack) -> nn.Module:
    """Load the model with transformers' fusion of patch embeddings; the stack removes what the fusion registers."""
    from transformers import conversion_mapping, monkey_patching

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    model.save_pretrained(folder)
    for kind in {module.config.model_type for module in model.modules() if hasattr(module, "config")}:
        mapping = conversion_mapping.get_checkpoint_conversion_mapping(kind) or []
        stack.callback(conversion_mapping.register_checkpoint_conversion_mapping, kind, mapping, overwrite=True)
    stack.callback(monkey_patching.clear_patch_mapping)
    fused = type(model).from_pretrained(folder, fusion_config={"patch_embeddings": True}).eval()
    linear = tower_of(fused).patch_embed.linear_proj
    convolution = tower_of(model).patch_embed.proj
    with torch.no_grad():  # transformers 5.23 does not convert these weights for two of the families
        linear.weight.copy_(convolution.weight.flatten(1))
        if convolution.bias is not None:
            linear.bias.copy_(convolution.bias)
    return fused
