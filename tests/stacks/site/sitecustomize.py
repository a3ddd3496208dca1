"""Let torchvision and torchaudio be imported beside a CPU build of torch, where this folder is in PYTHONPATH.

PyPI has CUDA builds of both, whose libraries do not load beside a CPU torch. `import torchvision` then fails, since it
registers fakes of two operations; their schemas are enough for its transforms. No program here hears anything, so
torchaudio is empty.
"""

import importlib.machinery
import sys
from pathlib import Path


class Finder:
    """Make the imports work, just before they happen; do nothing where the libraries load."""

    kept = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        libraries = {"torchvision": "_C*.so", "torchaudio": "lib/_torchaudio.so"}  # torchvision 0.29 has _C_stable.so
        if name not in libraries:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None or all(map(cls.loads, Path(spec.origin).parent.glob(libraries[name]))):
            return spec
        if name == "torchaudio":
            return importlib.machinery.ModuleSpec(name, cls)
        cls.define_operations()
        return spec

    @staticmethod
    def loads(library):
        import torch

        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True

    @classmethod
    def define_operations(cls):
        import torch

        if cls.kept is None:
            cls.kept = torch.library.Library("torchvision", "DEF")
            for operation in ("nms", "qnms"):
                cls.kept.define(f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.insert(0, Finder)
