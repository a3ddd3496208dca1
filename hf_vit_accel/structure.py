"""What stands inside a tower right now: hooks, replaced modules, foreign forwards, dtypes.

The fast path calls blocks' and attention modules' children itself, so anything that hangs on a block or an attention
module would be skipped. `Structure` reads the tower once and then tells, in some ten microseconds per forward, whether
anything changed and what stands against the fast path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["Structure"]

_BLOCK_PARAMETERS = {"self", "hidden_states", "cu_seqlens", "position_embeddings", "kwargs"}
_ATTENTION_PARAMETERS = _BLOCK_PARAMETERS | {"max_seqlen"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict)
)


class Structure:
    """One reading of a tower. `current()` is False once a module was added, removed or replaced."""

    def __init__(self, tower: nn.Module) -> None:
        modules = dict(tower.named_modules())
        below = {name: module for name, module in modules.items() if name}
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules.values()]
        self._hooks = [(name, vars(m)[kind]) for name, m in below.items() for kind in _HOOKS if kind in vars(m)]
        self._hook_dicts = [hooks for _, hooks in self._hooks]
        self._parameters = [module._parameters for module in modules.values() if module._parameters]
        self._instances = [(name, vars(module)) for name, module in below.items()]
        self._contract = tuple(_against_contract(tower))
        self.unfusable = dict(_unfusable(tower)) if not self._contract else {}

    def current(self) -> bool:
        """Whether the tower still holds the very modules that were read."""
        return all(tuple(children.values()) == held for children, held in self._children)

    def fusable(self, parts: frozenset[str]) -> frozenset[str]:
        """Those of the parts that can be fused here."""
        return parts - self.unfusable.keys()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The tower's parameters as they are now, whatever replaced them."""
        for parameters in self._parameters:
            for parameter in parameters.values():
                if parameter is not None:
                    yield parameter

    def reasons(self) -> list[str]:
        """Why the fast path would not do what the stock tower does; empty if it would."""
        reasons = list(self._contract)
        if any(self._hook_dicts):
            hooked = next((name for name, hooks in self._hooks if any(not _inert(h) for h in hooks.values())), None)
            if hooked is not None:
                reasons.append(f"hooks on {hooked}")
        if any(_GLOBAL_HOOKS):
            reasons.append("global module hooks")
        for name, instance in self._instances:
            if "_hf_hook" in instance:
                reasons.append(f"accelerate hooks on {name}")
                break
            if "forward" in instance and not name.endswith(("norm1", "norm2", "mlp", "qkv", "attn.proj")):
                reasons.append(f"{name} has a forward of its own")
                break
        dtypes = {parameter.dtype for parameter in self.parameters()}
        if len(dtypes) > 1:
            reasons.append(f"parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))})")
        return reasons


def _unfusable(tower: Any) -> Iterator[tuple[str, str]]:
    """Parts that must run as the tower's own modules, with the reason."""
    convolution = tower.patch_embed.proj
    if type(convolution) is not nn.Conv3d:
        yield "patch_embed", f"patch_embed.proj is a {type(convolution).__name__}, not a plain Conv3d"
    elif convolution.stride != convolution.kernel_size or convolution.groups != 1 or any(convolution.padding):
        yield "patch_embed", "patch_embed.proj is not a convolution whose stride is its kernel"
    elif not type(tower.patch_embed).forward.__module__.startswith("transformers.models."):
        yield "patch_embed", f"the forward of {type(tower.patch_embed).__name__} was replaced"


def _inert(hook: Callable[..., Any]) -> bool:
    """transformers' output-capturing hooks stay on after one use and do nothing until outputs are asked for again."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _against_contract(tower: nn.Module) -> Iterator[str]:
    """What of the code that the fast path stands for is not the code that it was written against."""
    convolution = getattr(getattr(tower, "patch_embed", None), "proj", None)
    if convolution is None or not hasattr(convolution, "weight"):
        yield "the tower has no patch_embed.proj with a weight"
    for name in ("rotary_pos_emb", "merger"):
        if not isinstance(getattr(tower, name, None), nn.Module):
            yield f"the tower has no module {name}"
    interpolation = (
        getattr(tower, "interpolation_mode", "bilinear"),
        getattr(tower, "interpolation_align_corners", True),
    )
    if interpolation != ("bilinear", True):
        yield f"positions are interpolated as {interpolation}, known is ('bilinear', True)"
    blocks = getattr(tower, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        yield "the tower has no list of blocks"
        return
    for index, block in enumerate(blocks):
        attention = getattr(block, "attn", None)
        parts = [getattr(block, name, None) for name in ("norm1", "norm2", "mlp")]
        parts += [getattr(attention, name, None) for name in ("qkv", "proj")]
        if not all(isinstance(part, nn.Module) for part in parts):
            yield f"blocks.{index} is not norm1, attn (qkv, proj), norm2, mlp"
            return
    for module, known in ((blocks[0], _BLOCK_PARAMETERS), (blocks[0].attn, _ATTENTION_PARAMETERS)):
        kind: Any = type(module)
        if len({type(block if module is blocks[0] else block.attn) for block in blocks}) > 1:
            yield f"blocks of several classes beside {kind.__name__}"
        if not kind.forward.__module__.startswith("transformers.models."):
            yield f"{kind.__name__}.forward was replaced by one from {kind.forward.__module__}"
        elif (found := set(inspect.signature(kind.forward).parameters)) != known:
            yield f"{kind.__name__}.forward takes {sorted(found)}, known is {sorted(known)}"
