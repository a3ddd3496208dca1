"""Run Triton kernels on a CPU: say whether Triton interprets them here, and make its interpreter faster."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels in this process. Triton reads the variable when a kernel is defined, so
`test_interpreted.py` starts a process for the interpreted tests."""


def speed_up_interpreter() -> None:
    """Skip work that Triton's interpreter repeats in every call of a kernel or helper.

    The interpreted tests of `make test` take 180 s of CPU time without this function, and 61 s with it.
    It changes three things, for a process that compiles no kernel:

    - The interpreter replaces the functions of `triton.language` once per process, and does not put them back.
    - It no longer repeats each 32-bit sum and product in 64 bits to find overflows.
    - It computes what follows from a dtype or a shape once (`remember_types`).
    """
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    language_modules = {"triton.language", "triton.language.core"}
    seen_functions: set[Any] = set()
    patched_modules: set[str] = set()
    keeps_patches = SimpleNamespace(restore=lambda: None)

    def patch_language_once(function: Any) -> Any:
        if function not in seen_functions:
            seen_functions.add(function)
            globals_of_function = function.__globals__.values()
            used_modules = {value.__name__ for value in globals_of_function if isinstance(value, ModuleType)}
            new_modules = (used_modules & language_modules) - patched_modules
            if new_modules:
                patched_modules.update(new_modules)
                patch_language(function)
        return keeps_patches

    interpreter._patch_lang = patch_language_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    remember_types()


def remember_types() -> None:
    """Compute the properties of a dtype, a type of blocks and a tensor once, not for every value of a kernel."""
    from triton.language import core
    from triton.runtime import interpreter

    numpy_dtype_of = interpreter._get_np_dtype
    make_block_type = core.block_type.__init__
    make_tensor = core.tensor.__init__
    tuples_equal = core.tuple.__eq__
    numpy_dtypes: dict[str, Any] = {}
    block_types: dict[Any, dict[str, Any]] = {}
    tensor_shapes: dict[str, tuple[Any, Any]] = {}

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype_of(dtype)
        return numpy_dtypes[dtype.name]

    def init_block_type(block_type: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in block_types:
            make_block_type(block_type, element_ty, shape)
            block_types[key] = vars(block_type).copy()
        vars(block_type).update(block_types[key], element_ty=element_ty)

    def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
        if type.name not in tensor_shapes:
            make_tensor(tensor, handle, type)
            tensor_shapes[type.name] = tensor.shape, tensor.numel
        tensor.handle = handle
        tensor.type = type
        tensor.dtype = type.scalar
        tensor.shape, tensor.numel = tensor_shapes[type.name]

    def equals(one: Any, other: Any) -> Any:
        return core.constexpr(one.values == other) if type(other) is list else tuples_equal(one, other)

    interpreter._get_np_dtype = numpy_dtype
    core.tuple.__eq__ = equals
    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor


if INTERPRETED:
    speed_up_interpreter()
