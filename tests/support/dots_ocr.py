"""A tiny tower in the manner of dots.ocr's remote code: own classes, two attentions, pixels cast to bf16 by default.

`T` packed patch rows, `E` width, `H` heads, `D` head dim, `M` merged tokens.
"""

import torch
from tiny import randomise
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from support.copies import QWEN2


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, _: Tensor, *lengths: int) -> Tensor:
    """Attend within segments as the package flash_attn does: in half precision alone."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    rows = offsets.diff().tolist()
    outs = []
    for parts in zip(q.split(rows), k.split(rows), v.split(rows), strict=True):
        out = functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in parts))
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


class DotsVisionConfig(PretrainedConfig):
    """The config; transformers has none of that type."""

    model_type = "tiny_dots_vision"

    def __init__(self, **kwargs: object) -> None:
        self.embed_dim = 32
        self.hidden_size = 24
        self.intermediate_size = 44
        self.num_hidden_layers = kwargs.pop("depth", 5)
        self.num_attention_heads = 2
        self.num_channels = 3
        self.patch_size = 2
        self.spatial_merge_size = 2
        self.temporal_patch_size = kwargs.pop("temporal_patch_size", 1)
        self.post_norm = kwargs.pop("post_norm", True)
        self.attention = kwargs.pop("attention", "sdpa")
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    """Normalises in fp32, and rounds before it scales."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.square().mean(-1, keepdim=True).add(self.eps).rsqrt()).type_as(x) * self.weight


class PatchEmbed(nn.Module):
    """Embeds the first frame of patches, and normalises."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.shape = config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size
        self.temporal_patch_size = config.temporal_patch_size
        self.proj = nn.Conv2d(config.num_channels, config.embed_dim, config.patch_size, config.patch_size)
        self.norm = RMSNorm(config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x.view(-1, *self.shape)[:, :, 0]).flatten(1))


class Preprocessor(nn.Module):
    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.patchifier = PatchEmbed(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.patchifier(x)


class VisionRotaryEmbedding(nn.Module):
    """Returns the angles of positions 0 to a length."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self.register_buffer("inv_freq", 10000.0**-exponents, persistent=False)

    def forward(self, seqlen: int) -> Tensor:
        steps = torch.arange(seqlen, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        return torch.outer(steps, self.inv_freq)


class Attention(nn.Module):
    """Attends within frames, by a mask or by FlashAttention."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=False)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        tables = rotary_pos_emb.cos().repeat(1, 2), rotary_pos_emb.sin().repeat(1, 2)
        q, k = QWEN2.apply_rotary_pos_emb_vision(q, k, *tables)
        if self.config.attention == "flash_attention_2":
            longest = int(cu_seqlens.diff().max())
            out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
        else:
            frames = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1).to(cu_seqlens), cu_seqlens.diff())
            mask = frames[:, None] == frames
            out = functional.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), attn_mask=mask)
            out = out.transpose(0, 1)
        return self.proj(out.flatten(1))


class SwiGLU(nn.Module):
    """The MLP, whose activation is a function."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.embed_dim, bias=False)
        self.fc3 = nn.Linear(config.embed_dim, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.silu(self.fc1(x)) * self.fc3(x))


class Block(nn.Module):
    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.norm1 = RMSNorm(config.embed_dim)
        self.mlp = SwiGLU(config)
        self.norm2 = RMSNorm(config.embed_dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cu_seqlens, rotary_pos_emb)
        return x + self.mlp(self.norm2(x))


class DotsVisionTransformer(PreTrainedModel):
    """The tower, whose class has the name of the remote one."""

    config_class = DotsVisionConfig

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_embed = Preprocessor(config)
        self.rotary_pos_emb = VisionRotaryEmbedding(config.embed_dim // config.num_attention_heads)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        if config.post_norm:
            self.post_trunk_norm = RMSNorm(config.embed_dim)
        self.merger = QWEN2.PatchMerger(config.hidden_size, config.embed_dim, config.spatial_merge_size)

    def angles(self, grid_thw: Tensor) -> Tensor:
        """Return the angles of all rows, merge block by merge block."""
        merge = self.spatial_merge_size
        positions = []
        for t, h, w in grid_thw.tolist():
            rows, columns = (x.flatten() for x in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
            both = torch.stack((rows, columns), -1).view(h // merge, merge, w // merge, merge, 2)
            positions.append(both.transpose(1, 2).reshape(-1, 2).repeat(t, 1))
        table = self.rotary_pos_emb(int(grid_thw[:, 1:].max()))
        return table[torch.cat(positions).to(table.device)].flatten(1)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, bf16: bool = True) -> Tensor:
        if bf16:
            hidden_states = hidden_states.bfloat16()
        x = self.patch_embed(hidden_states)
        angles = self.angles(grid_thw)
        lengths = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
        cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        for block in self.blocks:
            x = block(x, cu_seqlens, angles)
        if self.config.post_norm:
            x = self.post_trunk_norm(x)
        return self.merger(x)


def build(dtype: torch.dtype = torch.bfloat16, **fields: object) -> DotsVisionTransformer:
    """Build a tower with random weights, none of them trivial."""
    return randomise(DotsVisionTransformer(DotsVisionConfig(**fields)).eval()).to(dtype)
