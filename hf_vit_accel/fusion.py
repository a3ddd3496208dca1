"""Which operations of a tower run fused, decided ahead of time, and the callables that the fast path is made of.

`fuse_tower` looks at every module once and chooses for each a fused operation or the module itself, so that nothing is
chosen in a layer. Weights are read from their modules at every call: what changes there is seen.

`T` packed patch rows, `P` pixels of a patch, `E` width, `F` width of the MLP, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_vit_accel.contract import makes_angles
from hf_vit_accel.ops.activation import linear_gelu_tanh, pad_swiglu, quick_gelu_, swiglu
from hf_vit_accel.ops.launch import why_not_descriptors, why_not_triton
from hf_vit_accel.ops.linear_activation import linear_quick_gelu, linear_swiglu
from hf_vit_accel.ops.norm import add_norm_
from hf_vit_accel.ops.patch_embed import patch_embed
from hf_vit_accel.ops.positions import add_positions_
from hf_vit_accel.ops.rope import rope_, rope_reference_
from hf_vit_accel.structure import is_plain

__all__ = ["PARTS", "Fusion", "Layer", "fuse_tower"]

PARTS: Mapping[str, str] = {
    "patch_embed": "the convolution as one matrix product over the flattened weight",
    "positions": "interpolated position embeddings gathered, weighted and added in one kernel",
    "norms": "residual addition and normalisation in one kernel",
    "rope": "rotation of q and k in one kernel, in place on the packed projection",
    "mergers": "the residual addition before a merger and its normalisation in one kernel",
    "mlp": "the activation in its product's kernel, or as one of its own",
    "window_attention": "short windows attended by one kernel, rotation included",
}
"""What `fuse` may name."""

NormOp = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
TensorOp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block. norm1, norm2: (x, delta) -> (x + delta, norm of it), x possibly in place. mlp: rows to their delta."""

    norm1: NormOp
    attention: Any
    norm2: NormOp
    mlp: TensorOp


@dataclass(frozen=True, kw_only=True, eq=False)
class Fusion:
    """The operations of one tower on one device in one dtype. fused: parts that are; unfused: the others, and why.

    tables: rows and positions (T, 2) to cos and sin (T, D). merge, deepstack: (x, delta) -> (x + delta, what the merger
    makes of it), x possibly in place. norms, modules: the attributes of the blocks' norms, and of other modules that
    are not only weights.
    """

    layers: tuple[Layer, ...]
    embed: TensorOp
    add_positions: Callable[..., torch.Tensor]
    tables: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    merge: NormOp
    deepstack: tuple[NormOp, ...]
    fused: frozenset[str]
    unfused: Mapping[str, str]
    norms: tuple[dict[str, Any], ...]
    modules: tuple[dict[str, Any], ...]

    def constants(self) -> list[Any]:
        """What the operations read from their modules beside weights, as it is now."""
        attentions = [vars(layer.attention) for layer in self.layers]
        return [
            [norm.get("eps", norm.get("variance_epsilon")) for norm in self.norms],
            [(attention["num_heads"], attention["head_dim"]) for attention in attentions],
            list(map(dict, self.modules)),
        ]


def fuse_tower(
    tower: Any, parts: frozenset[str], device: torch.device, dtype: torch.dtype, no_kernels: str | None = None
) -> Fusion:
    """Choose the operations for a tower: those of `parts` that fit fused, everything else as its modules do it.

    no_kernels: why the Triton kernels are not to be used, beside what the device and the dtype tell.
    """
    no_kernels = why_not_triton(device, dtype) or no_kernels
    unfused = {part: "not asked for" for part in PARTS if part not in parts}

    def wanted(part: str, why_not: str | None) -> bool:
        if part not in unfused and why_not is not None:
            unfused[part] = why_not
        return part not in unfused

    blocks = list(tower.blocks)
    embedding, convolution = tower.patch_embed, tower.patch_embed.proj
    fused_embed = wanted("patch_embed", _against_embed(embedding, convolution))
    embedding = _fused_embed(convolution) if fused_embed else _owned(embedding)
    table = getattr(tower, "pos_embed", None)
    no_table = "the tower has no position table" if table is None else no_kernels or is_plain(table, nn.Embedding)
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
    fused_norms = wanted("norms", no_kernels or next(filter(None, map(_against_norm, norms)), None))
    fused_mlp = wanted("mlp", no_kernels or next(filter(None, (_against_mlp(block.mlp) for block in blocks)), None))
    # In place only on what a plain Linear has just made: another module might keep its output.
    qkv = next(filter(None, (is_plain(block.attn.qkv, nn.Linear) for block in blocks)), None)
    rotary = is_plain(tower.rotary_pos_emb)
    fused_rope = wanted("rope", no_kernels or qkv or rotary)
    no_windows = None if hasattr(tower, "window_size") else "the tower has no windows"
    wanted("window_attention", no_windows or no_kernels or qkv or rotary)
    mlps = [_mlp(block.mlp, device) if fused_mlp else block.mlp for block in blocks]
    norm_of = _fused_norm if fused_norms else _norm
    mergers = [tower.merger, *getattr(tower, "deepstack_merger_list", ())]
    fused_mergers = wanted("mergers", no_kernels or next(filter(None, map(_against_merger, mergers)), None))
    # Norms that are not fused have been shown x, and may keep it: then nothing is written to it in place.
    merge_of = partial(_fused_merge, in_place=fused_norms) if fused_mergers else _merge
    merge, *deepstack = map(merge_of, mergers)
    return Fusion(
        layers=tuple(
            Layer(norm1=norm_of(block.norm1), attention=block.attn, norm2=norm_of(block.norm2), mlp=mlp)
            for block, mlp in zip(blocks, mlps, strict=True)
        ),
        embed=embedding,
        add_positions=_positions(table, fused=wanted("positions", no_table)),
        tables=_tables(tower),
        rotate=rope_ if fused_rope else _rope_apart,
        merge=merge,
        deepstack=tuple(deepstack),
        fused=frozenset(PARTS) - unfused.keys(),
        unfused=unfused,
        norms=tuple(map(vars, norms)),
        modules=tuple(map(vars, _with_attributes(tower, norms, fused_mlp=fused_mlp))),
    )


def _tables(tower: Any) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin by the tower's own module, whatever its frequencies."""
    rotary = tower.rotary_pos_emb
    if not makes_angles(tower):
        return rotary  # type: ignore[no-any-return]

    def tables(x_TE: torch.Tensor, positions_T2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half_TD = rotary(positions_T2)  # the angles of one half
        angles_TD = torch.cat((half_TD, half_TD), dim=-1)
        return angles_TD.cos(), angles_TD.sin()

    return tables


def _rope_apart(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    return rope_reference_(qkv_T3HD.clone(), cos_TD, sin_TD)


def _owned(embedding: nn.Module) -> TensorOp:
    """The module's own result, copied: the residual stream is written in place, and a module may keep what it made."""
    return lambda x_TP: embedding(x_TP).clone(memory_format=torch.contiguous_format)


def _fused_embed(convolution: Any) -> TensorOp:
    return lambda x_TP: patch_embed(x_TP, convolution.weight, convolution.bias)


def _positions(table: Any, *, fused: bool) -> Callable[..., torch.Tensor]:
    if fused:
        return lambda x_TE, indices_T4, weights_T4: add_positions_(x_TE, table.weight, indices_T4, weights_T4)

    def add(x_TE: torch.Tensor, indices_T4: torch.Tensor, weights_T4: torch.Tensor) -> torch.Tensor:
        taps_T4E: torch.Tensor = table(indices_T4) * weights_T4[:, :, None]
        return x_TE + taps_T4E.sum(1).to(x_TE.dtype)

    return add


def _against_embed(embedding: Any, convolution: Any) -> str | None:
    if why := is_plain(convolution, nn.Conv3d):
        return why
    if convolution.stride != convolution.kernel_size or convolution.groups != 1 or any(convolution.padding):
        return "patch_embed.proj is not a convolution whose stride is its kernel"
    return is_plain(embedding)


def _is_rms(norm: Any) -> bool:
    return hasattr(norm, "variance_epsilon")


def _against_norm(norm: Any) -> str | None:
    if _is_rms(norm):
        return is_plain(norm)
    if why := is_plain(norm, nn.LayerNorm):
        return why
    if norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1:
        return "a LayerNorm without weight or bias, or over several dimensions"
    return None


def _norm(norm: nn.Module) -> NormOp:
    def add_norm(x_TE: torch.Tensor, delta_TE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        return x_TE, norm(x_TE)

    return add_norm


def _fused_norm(norm: Any) -> NormOp:
    rms = _is_rms(norm)

    def add_norm(x_TE: torch.Tensor, delta_TE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if rms:
            return x_TE, add_norm_(x_TE, delta_TE, norm.weight, None, norm.variance_epsilon, rms=True)
        return x_TE, add_norm_(x_TE, delta_TE, norm.weight, norm.bias, norm.eps, rms=False)

    return add_norm


def _with_attributes(tower: Any, norms: list[Any], *, fused_mlp: bool) -> Iterator[nn.Module]:
    """Modules whose attributes decide what is computed: all but plain Linears and what the layers never call."""
    unread = {id(module) for block in tower.blocks for module in (tower, block, block.attn)}
    unread |= {id(norm) for norm in norms if _against_norm(norm) is None}
    if fused_mlp:
        unread |= {id(module) for block in tower.blocks for module in block.mlp.modules()}
    for module in tower.modules():
        if id(module) not in unread and type(module) is not nn.Linear:
            yield module


def _rest_of_merger(merger: Any) -> tuple[Any, TensorOp]:
    """(norm, what follows it), by the names that the families use."""
    if hasattr(merger, "ln_q"):
        return merger.ln_q, merger.mlp
    return merger.norm, lambda x_ME: merger.linear_fc2(merger.act_fn(merger.linear_fc1(x_ME)))


_MERGERS = ("PatchMerger", "Qwen2_5_VLPatchMerger", "Qwen3VLVisionPatchMerger", "Qwen3VLMoeVisionPatchMerger")


def _against_merger(merger: Any) -> str | None:
    if type(merger).__name__ not in _MERGERS:
        return f"{type(merger).__name__} is not a merger that is known"
    return is_plain(merger) or _against_norm(_rest_of_merger(merger)[0])


def _merge(merger: Any) -> NormOp:
    def merge(x_TE: torch.Tensor, delta_TE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        # The module may keep what it is given or hand it on, and the next norm writes in place.
        return x_TE.clone(), merger(x_TE)

    return merge


def _fused_merge(merger: Any, *, in_place: bool) -> NormOp:
    norm, rest = _rest_of_merger(merger)
    add_norm, merged_width = _fused_norm(norm), merger.hidden_size

    def merge(x_TE: torch.Tensor, delta_TE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x_TE = x_TE if in_place else x_TE.clone()
        shape = -1, norm.weight.shape[0]  # deepstack mergers normalise merged tokens, the others patches
        _, normed = add_norm(x_TE.view(shape), None if delta_TE is None else delta_TE.reshape(shape))
        return x_TE, rest(normed.view(-1, merged_width))

    return merge


_ACTIVATIONS = {"GELUTanh": "gelu_tanh", "QuickGELUActivation": "quick_gelu", "SiLUActivation": "silu"}


def _parts_of_mlp(mlp: Any) -> tuple[list[Any], Any, Any]:
    """(products before the activation, activation, product after it), by the names that the families use."""
    if hasattr(mlp, "gate_proj"):
        return [mlp.gate_proj, mlp.up_proj], mlp.act_fn, mlp.down_proj
    if hasattr(mlp, "linear_fc1"):
        return [mlp.linear_fc1], mlp.act_fn, mlp.linear_fc2
    return [mlp.fc1], mlp.act, mlp.fc2


def _against_mlp(mlp: Any) -> str | None:
    if why := is_plain(mlp):
        return why
    try:
        before, activation, after = _parts_of_mlp(mlp)
    except AttributeError:
        return f"{type(mlp).__name__} is not an MLP that is known"
    for linear in (*before, after):
        if why := is_plain(linear, nn.Linear):
            return why
        if linear.bias is None:
            return "a Linear of the MLP has no bias"
    name = type(activation).__name__
    if why := is_plain(activation):
        return why
    if (_ACTIVATIONS.get(name) == "silu") != (len(before) == 2) or name not in _ACTIVATIONS:
        return f"the activation {name} is not one that the kernels know for this MLP"
    return None


def _mlp(mlp: Any, device: torch.device) -> TensorOp:
    before, activation, after = _parts_of_mlp(mlp)
    kind, first = _ACTIVATIONS[type(activation).__name__], before[0]
    in_one = why_not_descriptors(device) is None and first.weight.shape[1] % 8 == 0
    if kind == "silu":
        return (_linear_swiglu if in_one else _swiglu)(first, before[1], after)
    if kind == "gelu_tanh":
        return lambda x_TE: F.linear(linear_gelu_tanh(x_TE, first.weight, first.bias), after.weight, after.bias)
    if in_one and first.weight.shape[0] % 8 == 0:
        return lambda x_TE: F.linear(linear_quick_gelu(x_TE, first.weight, first.bias), after.weight, after.bias)
    return lambda x_TE: F.linear(quick_gelu_(F.linear(x_TE, first.weight, first.bias)), after.weight, after.bias)


# Qwen2.5-VL's width of 3420 sends cuBLAS to kernels of a third of the speed (H200, 16384 rows: 616-650 us a product
# against 203 at 3424). So the weights are read where alignment does not matter, or padded with zeros, which change
# nothing, into scratch memory that lives for this layer. Nothing of it is kept, so there is nothing to go stale, and
# the parameters stay as they are for optimizers and checkpoints. (Views of padded storage cost nothing, but
# safetensors, fused optimizers and whoever looks for shared storage take such parameters for something else.)


def _linear_swiglu(gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> TensorOp:
    def mlp(x_TE: torch.Tensor) -> torch.Tensor:
        h_TG, down_EG = linear_swiglu(x_TE, gate.weight, up.weight, gate.bias, up.bias, down.weight)
        return F.linear(h_TG, down_EG, down.bias)

    return mlp


def _swiglu(gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> TensorOp:
    def mlp(x_TE: torch.Tensor) -> torch.Tensor:
        if gate.weight.shape[0] % 8 == 0:
            gate_TF, up_TF = F.linear(x_TE, gate.weight, gate.bias), F.linear(x_TE, up.weight, up.bias)
            return F.linear(swiglu(gate_TF, up_TF), down.weight, down.bias)
        weight, bias, down_weight = pad_swiglu(gate.weight, up.weight, gate.bias, up.bias, down.weight)
        return F.linear(swiglu(*F.linear(x_TE, weight, bias).chunk(2, dim=-1)), down_weight, down.bias)

    return mlp
