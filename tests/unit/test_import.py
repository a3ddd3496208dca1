"""Importing the package costs little, disturbs nothing, and registers names once models are imported."""

import importlib
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

import hf_vit_accel
from hf_vit_accel.tower.on_import import after_import

TESTS = Path(__file__).parents[1]

START = """
import gc, os, socket, sys, warnings
sys.dont_write_bytecode = True
import torch, transformers
torch.set_num_threads(1)
"""

WATCH = """
FORBIDDEN = ("socket.", "pickle.", "marshal.loads", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork",
             "os.remove", "os.rename", "os.mkdir", "urllib.", "http.client.", "ftplib.", "shutil.", "tempfile.")
QUIET = ("open", "exec", "compile", "import", "ctypes.dlopen")  # besides, while a model is patched and used
DRIVER = "libnvidia-ml.so.1"  # what torch counts CUDA devices by
seen, phase = [], "before"

def hook(event, args):
    if phase == "before":
        return
    if event.startswith(FORBIDDEN) and (phase == "use" or not event.startswith("marshal.")):
        seen.append((phase, event, str(args)[:200]))
    elif event in QUIET and phase == "use" and args[0] != DRIVER:
        seen.append((phase, event, str(getattr(args[0], "co_filename", args[0]))[:200]))
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((phase, event, str(args)[:200]))

sys.addaudithook(hook)
"""
"""Importing and patching open no file, no socket and no process: an audit hook watches, and is tested at the end."""

IMPORT = """
phase, before = "import", set(sys.modules)  # torchvision among them, where it is installed
import hf_vit_accel
phase = "before"
new = set(sys.modules) - before
slow = ("transformers.modeling_utils", "transformers.generation", "torch._dynamo", "torch._inductor")
assert not [name for name in sorted(new) if name.startswith(slow)]
heavy = {"flashinfer", "cudnn", "flash_attn_interface", "torchvision"} - before
import hf_vit_accel.tools.cli
assert not torch.cuda.is_initialized() and not heavy & set(sys.modules)
"""
"""Import the package, and refuse slow modules that come with it: those of models and of the compiler.

They are counted, since seconds depend on the machine. CUDA stays untouched, by the command line, too.
"""

LOAD = """
from threading import Thread
from hf_vit_accel.tower import on_import
assert "transformers.modeling_utils" not in sys.modules
assert any(isinstance(finder, on_import._Finder) for finder in sys.meta_path)
thread = Thread(target=lambda: transformers.PreTrainedModel)
thread.start()
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
thread.join()
assert not any(isinstance(finder, on_import._Finder) for finder in sys.meta_path)
module = sys.modules["transformers.modeling_utils"]
assert type(module.__spec__.loader).__module__ != on_import.__name__ and module.__loader__ is module.__spec__.loader
"""
"""Import models by their file, while another thread asks for them by name."""

USE = """
from tiny import GRIDS, TINY, run_tower, tower_of
model = TINY["qwen2_5_vl"].build()
run_tower(tower_of(model), GRIDS["mixed"])
phase = "use"
for arguments in ({}, {"attention": "sdpa", "fuse": False}, {"attention": "flex"}, {"cuda_graphs": True}):
    hf_vit_accel.patch(model, **arguments)
    run_tower(tower_of(model), GRIDS["mixed"])
    str(hf_vit_accel.status(model))
    hf_vit_accel.unpatch(model)
phase = "before"
assert not seen, seen
for event, act in {"socket": socket.socket, "open": lambda: open(sys.executable, "rb").close()}.items():
    phase = "use"
    act()
    phase = "before"
    assert any(name.startswith(event) for _, name, _ in seen), f"the hook missed {event}"
    seen.clear()
"""

BY_NAME = """
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
config = transformers.Qwen3VLConfig().vision_config
config.update(dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32))
config.deepstack_visual_indexes = [0]
tower = Qwen3VLVisionModel._from_config(config, attn_implementation="flash_vit_auto")
tower(torch.rand(16, 3 * 2 * 16 * 16), grid_thw=torch.tensor([[1, 4, 4]]))
assert hf_vit_accel.status(tower).towers[0].calls == 1
try:
    Qwen3VLVisionModel._from_config(config, attn_implementation="flashinfer_cudnn")
except hf_vit_accel.BackendUnavailableError:
    pass
else:
    raise AssertionError("loaded")
from hf_vit_accel.ops import launch
warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
kernels = [value for value in gc.get_objects() if isinstance(value, launch.Kernel)]
assert len(kernels) > 15 and not any("jit_function" in vars(kernel) for kernel in kernels)
"""
"""Load a tower by name.

No source of a kernel is read before its first launch: for all kernels that takes as long as the rest of the import.
"""

LAST = """
import runpy
class Leaky:
    def __del__(self, write=os.write): write(2, b"nanobind: leaked 123 instances!\\n")
sys.leaky = Leaky()
sys.argv = ["hf-vit-accel", "--version"]
try: runpy.run_module("hf_vit_accel", run_name="__main__")
finally: print("version printed", file=sys.stderr)
"""
"""The command hides what C++ bindings write to standard error when Python tears their modules down."""

PROGRAM = START + WATCH + IMPORT + LOAD + USE + BY_NAME + LAST
"""One process for all checks, since a start takes seconds."""


def test_what_a_new_process_does() -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("hf-vit-accel "), done.stderr[-3000:]
    assert done.stderr == "version printed\n"


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
