"""Importing the package costs little: what it imports is counted, since seconds depend on the machine."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vit_accel.tower.on_import import after_import

ROOT = Path(__file__).resolve().parents[2]

LIGHT = """
import sys, torch, transformers
before = set(sys.modules)
import hf_vit_accel
new = set(sys.modules) - before
slow = ("transformers.modeling_utils", "transformers.generation", "torch._dynamo", "torch._inductor")
print([name for name in sorted(new) if name.startswith(slow)])
"""
"""Import the package, and print which slow modules came with it: those of models and of the compiler."""

LOAD = """
import sys, warnings
import hf_vit_accel
from hf_vit_accel.tower import loading, on_import
assert "transformers.modeling_utils" not in sys.modules
assert any(isinstance(finder, on_import._Finder) for finder in sys.meta_path)
{imports}
assert not any(isinstance(finder, on_import._Finder) for finder in sys.meta_path)
module = sys.modules["transformers.modeling_utils"]
assert type(module.__spec__.loader).__module__ != on_import.__name__ and module.__loader__ is module.__spec__.loader
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
config = transformers.Qwen3VLConfig().vision_config
config.update(dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32))
config.deepstack_visual_indexes = [0]
tower = Qwen3VLVisionModel._from_config(config, attn_implementation="flash_vit_auto")
tower(torch.rand(16, 3 * 2 * 16 * 16), grid_thw=torch.tensor([[1, 4, 4]]))
assert hf_vit_accel.status(tower).towers[0].calls == 1
assert loading.MISSING == []
try:
    Qwen3VLVisionModel._from_config(config, attn_implementation="flashinfer_cudnn")
except hf_vit_accel.BackendUnavailableError as error:
    print("refused by us")
else:
    print("loaded")
"""
"""Import the package first and models by some other way, then load a tower by name."""


def run(code: str) -> str:
    """Run code in a new process; return the last line that it prints. Some versions of transformers print notes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_importing_brings_no_slow_module() -> None:
    assert run(LIGHT) == "[]"


@pytest.mark.parametrize(
    "imports",
    [
        "import transformers\nimport transformers.modeling_utils",
        "import transformers\nfrom transformers import Qwen3VLForConditionalGeneration",
        "from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel\nimport transformers",
        "from threading import Thread\nimport transformers\n"
        "thread = Thread(target=lambda: transformers.PreTrainedModel)\nthread.start()\n"
        "transformers.PreTrainedModel\nthread.join()",
    ],
    ids=["module", "model", "file", "two threads"],
)
def test_names_are_registered_once_models_are_imported(imports: str) -> None:
    assert run(LOAD.replace("{imports}", imports)) == "refused by us"


def test_after_an_import_that_failed_the_next_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_first.py").write_text("import math\nif not hasattr(math, 'fails_never'): raise OSError")
    calls: list[str] = []
    after_import("fails_first", lambda: calls.append("called"))
    with pytest.raises(OSError):
        importlib.import_module("fails_first")
    assert not calls
    monkeypatch.setattr(math, "fails_never", True, raising=False)
    module = importlib.import_module("fails_first")
    assert calls == ["called"]
    after_import("fails_first", lambda: calls.append("at once"))
    importlib.reload(module)
    assert calls == ["called", "at once"]
