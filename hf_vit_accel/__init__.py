"""Fast, exact vision towers for Qwen-VL models in plain transformers.

Reading order, the way of the data: `api` (what users call), `tower` (the accelerated forward, in five steps), `guard`
(why a call cannot be fast) with `upstream` (what transformers computes, proven by running it), `inputs` and `metadata`
(a call read; its grid to arrays), `route` (all decisions for one layout), `encoder` (the loop over the layers), `ops`
and `backends` (the operations and attention it is made of), `graphs` (the whole encoder replayed), `passes` (a long
call cut), `data_parallel` (a call shared by `ranks`, after a `split`) and `reuse` (equal images encoded once),
`families` (what differs between models), `config` (settings), `registration` (load-time names), `scales` and
`calibration` (FP8), `report` (what `status` tells).

Importing registers the names "flashinfer_cudnn" and "flash_vit_auto" with transformers. It initialises no CUDA.
"""

from hf_vit_accel.api import patch, patched, unpatch, warmup
from hf_vit_accel.backends import BackendUnavailableError
from hf_vit_accel.calibration import calibrate
from hf_vit_accel.config import FlexConfig, Fp8Config, GraphConfig, ReuseConfig
from hf_vit_accel.env import FallbackError
from hf_vit_accel.ranks import RankError
from hf_vit_accel.registration import register
from hf_vit_accel.report import Status, TowerStatus, status

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "FallbackError",
    "FlexConfig",
    "Fp8Config",
    "GraphConfig",
    "RankError",
    "ReuseConfig",
    "Status",
    "TowerStatus",
    "calibrate",
    "patch",
    "patched",
    "status",
    "unpatch",
    "warmup",
]

register()
