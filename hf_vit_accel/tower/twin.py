"""The towers that a proof runs: tiny twins of a class, which run apart from the process around them, and clones."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_vit_accel.families import Config, Family, Tower
from hf_vit_accel.tower.exchanged import exchange, place_of
from hf_vit_accel.versions import is_adapter


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: object, **kwargs: object
) -> Tensor:
    """Compute `scaled_dot_product_attention` by products and a softmax."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    attend: Any = torch._scaled_dot_product_attention_math
    out: Tensor = attend(q, k, v, attn_mask, *args, **kwargs)[0]
    return out


_SDPA = functional.scaled_dot_product_attention
_INITIALISERS = ("uniform_", "normal_", "orthogonal_", "sparse_")


class Isolated(TorchFunctionMode):
    """Makes one thread's torch independent of the process: no random initialisation, no choice of SDP kernels."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return _plain_attention(*args, **kwargs)
        if getattr(func, "__name__", "").endswith(_INITIALISERS):
            return args[0] if args else kwargs["tensor"]  # the generator stays as it is
        return func(*args, **kwargs)


STOCK = "hf_vit_accel_stock"
"""The name of transformers' own sdpa attention for twins: anyone may register another function under the usual one."""


def build_twin(
    kind: Callable[[Config], Tower],
    config: Config,
    family: Family,
    exchanged: Mapping[str, Sequence[nn.Module]],
    device: torch.device,
    dtype: torch.dtype,
) -> Tower:
    """Build a tiny tower of a class, whose weights are random: none zero, and no norm's one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # slow; models have imported it

    transformers.modeling_utils.AttentionInterface.register(STOCK, sdpa_attention_forward)
    config = copy.deepcopy(config)
    for name, value in family.tiny.items():
        setattr(config, name, copy.deepcopy(value))
    config._attn_implementation_internal = STOCK
    config.attention_dropout = 0.0  # every call reads it anew
    config.return_dict = True
    config.output_hidden_states = False
    config.output_attentions = False
    with torch.device(device):
        twin = kind(config).to(dtype).eval()
    for path, module in twin.named_modules():
        if place_of(path) in exchanged:
            exchange(module, exchanged[place_of(path)][0])
        skip_global_hooks(module)
    draw_weights(twin, device, dtype)
    return twin


def clone_of(tower: nn.Module, dtype: torch.dtype | None = None) -> Tower:
    """Return a stock clone without hooks, all of whose parameters are trained."""
    clone = copy.deepcopy(tower)
    for module in clone.modules():
        attributes = vars(module)
        if module is clone or "_hf_hook" in attributes:
            for name in ("forward", "_old_forward", "_hf_hook", "_hf_vit_accel", "_hf_vit_accel_hooks"):
                attributes.pop(name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            attributes[name] = OrderedDict()
        if is_adapter(module):  # our operations apply an adapter's dropout, but at random
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
    return (clone if dtype is None else clone.to(dtype)).requires_grad_()


def draw_weights(tower: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace all parameters by random ones, wherever a patched torch has put them."""
    generator = torch.Generator("cpu").manual_seed(0)
    for module in tower.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32)
                if values.dim() > 1:
                    values /= values[0].numel() ** 0.5
                else:
                    values = values * 0.1 + float(name == "weight")
                values = values.to(device, dtype)
                module._parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)


@torch.no_grad()
def shrink_weights(tower: nn.Module) -> None:
    """Make the residual stream so small that the epsilon of a norm counts."""
    for name, parameter in tower.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            parameter.mul_(0.02)


def skip_global_hooks(module: nn.Module) -> None:
    """Call a module without global hooks: users' global hooks are not for the twin, and would count its calls.

    `nn.Module.compile` sets this attribute too. The dictionaries of global hooks cannot be emptied for a moment, since
    other threads run their modules meanwhile.
    """
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if not any(hooks):
        module._compiled_call_impl = partial(_call, module)


ARGUMENTS = "_hf_vit_accel_arguments"  # of the last call of a twin's module


def _call(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Call a module's forward and its own hooks: transformers records hidden states by such hooks."""
    vars(module)[ARGUMENTS] = args, kwargs
    output = module.forward(*args, **kwargs)
    for hook in module._forward_hooks.values():
        hook(module, args, output)
    return output


# --- exact attention and products, while a proof runs in fp32 ----------------------------------------------------
# `R` rows of a segment, `H` heads, `D` head dim, `S1` segments and one more.

_FLASH_ATTENTION = "flash_attn_varlen_func"
_KNOWN_OPTIONS = ("causal", "softmax_scale", "dropout_p")


def _exact_beside(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that attends to fp32 rows by segments, and calls the original for all others."""

    def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *offsets: Tensor, **options: object) -> Tensor:
        further = {name for name in options if name not in _KNOWN_OPTIONS and not name.startswith("max_seqlen")}
        is_plain = len(offsets) > 1 and torch.equal(offsets[0], offsets[1]) and not further
        if q_THD.dtype != torch.float32 or not is_plain or options.get("dropout_p"):
            return original(q_THD, k_THD, v_THD, *offsets, **options)
        causal = bool(options.get("causal"))
        scale = options.get("softmax_scale")
        assert scale is None or isinstance(scale, float)
        rows = offsets[0].diff().tolist()
        outs = []
        for q, k, v in zip(q_THD.split(rows), k_THD.split(rows), v_THD.split(rows), strict=True):
            q_HRD, k_HRD, v_HRD = (x.transpose(0, 1) for x in (q, k, v))
            out = functional.scaled_dot_product_attention(q_HRD, k_HRD, v_HRD, is_causal=causal, scale=scale)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    return attend


@contextmanager
def attending_in_fp32(tower: nn.Module) -> Iterator[None]:
    """Replace FlashAttention-2 in the files of a tower's classes, for rows in fp32 alone."""
    files = {type(module).__module__ for module in tower.modules()}
    replaced = []
    for name in files:
        namespace = vars(sys.modules[name])
        original = namespace.get(_FLASH_ATTENTION)
        if callable(original) and not name.startswith(("torch.", "transformers.")):
            replaced.append((namespace, original))
            namespace[_FLASH_ATTENTION] = _exact_beside(original)
    try:
        yield
    finally:
        for namespace, original in replaced:
            namespace[_FLASH_ATTENTION] = original


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32, whatever the process allows: TF32 would differ by more than the bounds."""
    backends: Any = torch.backends
    settings = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    former = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, former, strict=True):
            setting.fp32_precision = value
