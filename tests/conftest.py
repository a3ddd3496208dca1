"""Shared set-up: tests marked gpu run only where a CUDA device is present, those marked matrix only with --matrix."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of new processes, too: tensors are tiny, more threads would only wait

# A fork frees no garbage of its parent: the destructor of a process group would wait for threads that no fork has.
os.register_at_fork(after_in_child=gc.freeze)

settings.register_profile("few", deadline=None, max_examples=30)
settings.register_profile("all", deadline=None)  # noxfile.py passes --hypothesis-profile=all
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)  # in every run
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="run every cell of the matrix, not one of each row")


def pytest_configure(config: pytest.Config) -> None:
    """Import torch and the shared fixtures, which takes seconds, unless this process only distributes tests."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    torch.set_num_threads(1)  # as for new processes, if torch was imported before OMP_NUM_THREADS was set
    # After a fork the first thread that computes replaces torch's pool. Two threads that load weights may meet there.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    for fixtures in ("towers", "references", "cpu_graphs", "faults", "decoding"):
        config.pluginmanager.import_plugin(f"support.{fixtures}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    deselected_markers = []
    if not config.getoption("--matrix"):
        deselected_markers.append("matrix")
    if not torch.cuda.is_available():
        deselected_markers.append("gpu")

    selected = []
    deselected = []
    for item in items:
        is_deselected = any(item.get_closest_marker(marker) for marker in deselected_markers)
        (deselected if is_deselected else selected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected

    from support.lacking import reason_to_skip

    for item in selected:
        reason = reason_to_skip(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exempt all present objects from garbage collection, one of which took 0.3 s, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
