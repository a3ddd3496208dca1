"""Importing the package in a new process. One process checks everything, since a start takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

START = """
import os, sys
sys.dont_write_bytecode = True
import torch
torch.set_num_threads(1)
import transformers.integrations.sdpa_attention, transformers.masking_utils, transformers.modeling_utils
from tiny import GRIDS, TINY, run_tower, tower_of
"""

GONE = """
from transformers import modeling_utils
kind = modeling_utils.PreTrainedModel
# Renamed: transformers itself calls them by the new names, and finds ours gone.
kind.choose = kind.get_correct_attn_implementation
del modeling_utils.lazy_import_flash_attention, kind.get_correct_attn_implementation
import hf_vit_accel
from tiny import *
kind._check_and_adjust_attn_implementation = lambda self, name, *args, **kwargs: kind.choose(self, name)
for family in ("qwen2_5_vl", "qwen3_vl"):
    model = TINY[family].build()
    tower = tower_of(model)
    expected = run_tower(tower, GRIDS["mixed"])
    hf_vit_accel.patch(model, strict=True)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert hf_vit_accel.status(model).towers[0].calls == 1
    hf_vit_accel.unpatch(model)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)
    for name in ("flash_vit_auto", {"vision_config": "flashinfer_cudnn"}):
        try:
            TINY[family].build(attn_implementation=name)
        except ValueError as error:
            assert "has no transformers.modeling_utils.lazy_import_flash_attention" in str(error), error
            assert "has no PreTrainedModel.get_correct_attn_implementation" in str(error), error
            assert "Use hf_vit_accel.patch" in str(error), error
        else:
            raise AssertionError("loaded by name")
"""
"""Delete and rename functions of transformers: importing and `patch` work; loading by name says what is missing."""

QUIET = """
import socket, sys
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
phase, before = "import", set(sys.modules)  # torchvision among them, where it is installed
import hf_vit_accel
phase = "before"
assert not torch.cuda.is_initialized()
heavy = {"flashinfer", "cudnn", "flash_attn_interface", "torchvision"} - before
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not any("modeling_qwen" in name for name in sys.modules)
import hf_vit_accel.tools.cli
assert not torch.cuda.is_initialized() and not heavy & set(sys.modules)
models = [TINY[name].build() for name in ("qwen2_5_vl", "qwen3_vl")]
for model in models:
    run_tower(tower_of(model), GRIDS["mixed"])
phase = "use"
for model in models:
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
"""Importing and patching open no file, no socket and no process: an audit hook watches, and is tested at the end.

CUDA stays untouched, by the command line, too.
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

FORKED = """
if not (child := os.fork()):
    try:
        exec(GONE)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "functions that are gone"
"""


def test_what_a_new_process_does() -> None:
    folder = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "0",
    }
    code = START + FORKED.replace("GONE", repr(GONE)) + QUIET + LAST
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("hf-vit-accel "), done.stderr[-3000:]
    assert done.stderr == "version printed\n"
