"""Run `hf-vit-accel bench` with more stock set-ups and more shapes: `baselines.py` and `shapes.py` add them.

python benchmarks/towers.py --baselines sdpa,graph,compile+graph --sizes "one 448²" --json build/small.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where a module runs it: slowed.py, without.py
import shapes  # noqa: F401
from baselines import BASELINES

from hf_vit_accel.tools import bench

bench.BASELINES |= BASELINES  # before the command line lists them

if __name__ == "__main__":
    from hf_vit_accel.tools.cli import app

    app(["bench", *sys.argv[1:]], prog_name="benchmarks/towers.py")
