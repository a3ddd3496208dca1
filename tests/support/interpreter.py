"""Run Triton kernels on a CPU: say whether Triton interprets them here, and make its interpreter faster."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels in this process. Triton reads the variable when a kernel is defined, so
`test_interpreted.py` starts a process for the interpreted tests."""
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_interpreted.py runs it")
DEVICES = [
    pytest.param("cpu", id="interpreted", marks=interpreted),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]
"""Where kernels run in tests."""


def speed_up_interpreter() -> None:
    """Skip work that Triton's interpreter repeats in every call of a kernel or helper.

    The changes are for a process that compiles no kernel:

    - The interpreter replaces the functions of `triton.language` once per process, and does not put them back.
    - It no longer repeats each 32-bit sum and product in 64 bits to find overflows.
    - It looks up numpy's dtype of a type once, not by a table that every value makes anew.
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

    look_up_dtype = interpreter._get_np_dtype
    dtypes_by_name: dict[str, Any] = {}

    def look_up_dtype_once(triton_type: Any) -> Any:
        if triton_type.name not in dtypes_by_name:
            dtypes_by_name[triton_type.name] = look_up_dtype(triton_type)
        return dtypes_by_name[triton_type.name]

    interpreter._patch_lang = patch_language_once
    interpreter._get_np_dtype = look_up_dtype_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    speed_up_interpreter()
