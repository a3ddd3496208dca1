"""Makes the table of whole towers: three models at six sizes, verified and timed; needs a CUDA device and matplotlib.

python examples/benchmark/towers.py [further options of `hf-vit-accel bench`]
"""

import sys
from pathlib import Path

from hf_vit_accel.cli import app

HERE = Path(__file__).parent
ARGUMENTS = {
    "--model": "qwen2.5-vl-7b,qwen3-vl-8b,qwen2-vl-7b",
    "--rounds": "3",
    "--baselines": "sdpa,flash_attention_3",
    "--backends": "auto,auto+graph,flashinfer_cudnn,flash_attention_3",
    "--json": str(HERE / "towers.json"),
    "--plot": str(HERE / "towers.png"),
}

if __name__ == "__main__":
    app(["bench", *(word for pair in ARGUMENTS.items() for word in pair), *sys.argv[1:]])
