"""Importing the package costs little: what it imports is counted, since seconds depend on the machine."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

import hf_vit_accel
from hf_vit_accel.tower.on_import import after_import

ROOT = Path(__file__).resolve().parents[2]

LIGHT = """
import gc, os, sys, traceback, warnings, torch, transformers
before = set(sys.modules)
import hf_vit_accel
from hf_vit_accel.tower import loading, on_import
new = set(sys.modules) - before
slow = ("transformers.modeling_utils", "transformers.generation", "torch._dynamo", "torch._inductor")
assert not [name for name in sorted(new) if name.startswith(slow)]
"""
"""Import the package, and refuse slow modules that come with it: those of models and of the compiler."""

WAYS = {
    "module": "import transformers.modeling_utils",
    "file": "from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel",
    "two threads": (
        "from threading import Thread\n"
        "thread = Thread(target=lambda: transformers.PreTrainedModel)\nthread.start()\n"
        "transformers.PreTrainedModel\nthread.join()"
    ),
}
"""Ways to import models."""

LOAD = """
assert "transformers.modeling_utils" not in sys.modules
assert any(isinstance(finder, on_import._Finder) for finder in sys.meta_path)
exec(imports)
assert not any(isinstance(finder, on_import._Finder) for finder in sys.meta_path)
module = sys.modules["transformers.modeling_utils"]
assert type(module.__spec__.loader).__module__ != on_import.__name__ and module.__loader__ is module.__spec__.loader
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
except hf_vit_accel.BackendUnavailableError:
    pass
else:
    raise AssertionError("loaded")
from hf_vit_accel.ops import launch
kernels = [value for value in gc.get_objects() if isinstance(value, launch.Kernel)]
assert len(kernels) > 15 and not any(kernel._jit_function for kernel in kernels)
"""
"""Import models by one of the ways, after the package, then load a tower by name.

No source of a kernel is read before its first launch: for all kernels that takes as long as the rest of the import.
"""

FORKED = """
import torch._dynamo, torch.distributed.tensor.parallel  # torch's own part of the import of models, once for all ways
for way, imports in WAYS.items():
    if not (child := os.fork()):
        try:
            exec(LOAD)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, way
"""


def test_importing_is_cheap_and_registers_names_once_models_are_imported() -> None:
    """One new process checks everything: it forks for every way to import models, since a start takes seconds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    code = f"WAYS = {WAYS!r}\nLOAD = {LOAD!r}\n{LIGHT}{FORKED}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


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


class _AsksAll:
    """A finder that asks all finders, as those of wrapt and of a second copy of this package do."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        others = [finder for finder in sys.meta_path if finder is not self]
        return next((spec for finder in others if (spec := finder.find_spec(name, None, target))), None)


@pytest.mark.parametrize("is_first", [True, False])
def test_another_finder_that_asks_all_finders(is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"asked_by_all_{is_first}.py").write_text("")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    calls: list[str] = []
    if not is_first:
        sys.meta_path.insert(0, _AsksAll())
    after_import(f"asked_by_all_{is_first}", lambda: calls.append("called"))
    if is_first:
        sys.meta_path.insert(0, _AsksAll())
    importlib.import_module(f"asked_by_all_{is_first}")
    assert calls == ["called"]


def test_a_function_that_is_imported_later_is_listed_and_suggested() -> None:
    assert {"graphed_decoding", "patch"} <= set(dir(hf_vit_accel))
    with pytest.raises(AttributeError) as caught:
        _ = hf_vit_accel.graph_decoding
    assert (caught.value.name, caught.value.obj) == ("graph_decoding", hf_vit_accel), "Python suggests from these"
