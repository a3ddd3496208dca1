"""Verify, then time whole vision towers: on this machine, in real shapes, every backend, and stock for comparison.

The files, in the order of a run: `towers` builds what is timed. `baselines` opens stock's best set-ups, `contenders`
chooses who runs. `work` runs a forward, or a forward and backward. `verify` compares with fp32, `measure` times.
`profile` says where the time goes. `report` writes tables, JSON and figures. The command line is `hf-vit-accel bench`.
"""

from hf_vit_accel.tools.bench.baselines import BASELINES
from hf_vit_accel.tools.bench.contenders import choose
from hf_vit_accel.tools.bench.measure import DTYPES, Row, bench, default_dtype, device_of_choice, measure
from hf_vit_accel.tools.bench.profile import Part
from hf_vit_accel.tools.bench.report import document, host, lines, plot, require_matplotlib, slower
from hf_vit_accel.tools.bench.towers import PEAK, SHAPES, SIZES, build_tower, matrix_flops, parse_size, peak_of

__all__ = [
    "BASELINES",
    "DTYPES",
    "PEAK",
    "SHAPES",
    "SIZES",
    "Part",
    "Row",
    "bench",
    "build_tower",
    "choose",
    "default_dtype",
    "device_of_choice",
    "document",
    "host",
    "lines",
    "matrix_flops",
    "measure",
    "parse_size",
    "peak_of",
    "plot",
    "require_matplotlib",
    "slower",
]
