"""Fast, exact vision towers for Qwen-VL models in plain transformers.

The rooms, each importing only rooms before it: `config` (settings), `layout` (`grid_thw` to metadata on the host),
`machine` (what this machine can do), `watch` (whether values that others may change stayed) and `attached` (hooks and
methods of ours on modules); `families` (what differs between models); `versions` (what differs between versions of
transformers); `ops` and `backends` (the operations and the attention of a tower); `engine` (one call on one device);
`graphs` (the call replayed from a CUDA graph); `options` (long calls in passes, one picture for many, one call for many
ranks); `decoding` (`graphed_decoding`, which knows no tower); `tower` (the accelerated forward, its state and its
proof); `model` (the whole model around the tower); `status`, `api` and `calibration` (what users call); `tools` (the
command line). To follow a call, begin at `tower/forward.py`.

Examples:
    >>> model = hf_vit_accel.patch(model)
    >>> logits = model(**inputs).logits
    >>> hf_vit_accel.status(model).towers[0].calls, hf_vit_accel.status(model).towers[0].stock_calls
    (1, 0)
    >>> with hf_vit_accel.patched(model, attention="sdpa", fuse=False):
    ...     logits = model(**inputs).logits
    >>> model = hf_vit_accel.unpatch(model)

Importing registers the names "flashinfer_cudnn" and "flash_vit_auto" with transformers: now, or when transformers
imports its models' base class, which takes two seconds. It initialises no CUDA.
"""

import sys
from typing import TYPE_CHECKING, Any

from hf_vit_accel.api import patch, patched, unpatch, warmup
from hf_vit_accel.backends import BackendUnavailableError
from hf_vit_accel.calibration import calibrate
from hf_vit_accel.config import FlexConfig, Fp8Config, GraphConfig, ReuseConfig
from hf_vit_accel.machine import FallbackError
from hf_vit_accel.model.around import follow_name
from hf_vit_accel.options.ranks import RankError
from hf_vit_accel.status import ModelStatus, Status, TowerStatus, status
from hf_vit_accel.tower.loading import register
from hf_vit_accel.tower.on_import import after_import

if TYPE_CHECKING:
    from hf_vit_accel.decoding.loop import graphed_decoding

__version__ = "0.3.0"

__all__ = [
    "BackendUnavailableError",
    "FallbackError",
    "FlexConfig",
    "Fp8Config",
    "GraphConfig",
    "ModelStatus",
    "RankError",
    "ReuseConfig",
    "Status",
    "TowerStatus",
    "calibrate",
    "graphed_decoding",
    "patch",
    "patched",
    "status",
    "unpatch",
    "warmup",
]

after_import("transformers.modeling_utils", lambda: register(follow_name))


def __getattr__(name: str) -> Any:
    """Import `graphed_decoding` when it is used: transformers' generation takes a second."""
    if name != "graphed_decoding":
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    from hf_vit_accel.decoding.loop import graphed_decoding

    return graphed_decoding


def __dir__() -> list[str]:
    """List `graphed_decoding`, too, for completion and for Python's suggestions."""
    return sorted({*globals(), *__all__})
