"""Compute exactly while a proof runs in fp32: no product in TF32, and no attention that takes no fp32.

`T` packed patch rows, `R` rows of a segment, `H` heads, `D` head dim, `S1` segments and one more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_NAME = "flash_attn_varlen_func"
_OPTIONS = ("causal", "softmax_scale", "dropout_p")


def _exact_beside(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that attends to fp32 rows by segments, and calls the original for all others."""

    def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *offsets: Tensor, **options: object) -> Tensor:
        further = {name for name in options if name not in _OPTIONS and not name.startswith("max_seqlen")}
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
        original = namespace.get(_NAME)
        if callable(original) and not name.startswith(("torch.", "transformers.")):
            replaced.append((namespace, original))
            namespace[_NAME] = _exact_beside(original)
    try:
        yield
    finally:
        for namespace, original in replaced:
            namespace[_NAME] = original


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
