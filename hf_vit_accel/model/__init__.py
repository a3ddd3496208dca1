"""The whole model around the tower: positions, placeholders, and one call of the tower a forward."""

from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Find `decode_steps` in its former place, where programs that measure decoding look for it."""
    if name != "decode_steps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_vit_accel.decoding import steps

    return steps
