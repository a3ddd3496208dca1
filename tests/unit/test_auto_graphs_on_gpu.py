"""`patch(model)` on a GPU, in programs where a capture might hurt: threads, forks, profilers, little memory."""

import copy
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.graphs import Grid, SpoilingWait, draw_grid, poison_before_use
from tiny import TINY, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import ReuseConfig
from hf_vit_accel.tools.bench import build_tower
from hf_vit_accel.tower.state import state_of

pytestmark = pytest.mark.gpu

IMAGE: Grid = [(1, 6, 8)]
CALLS = 2000


@pytest.fixture
def tower() -> nn.Module:
    """A tower in bf16 on the GPU, patched with the default options."""
    model = TINY["qwen3_vl"].build().to("cuda", torch.bfloat16)
    return hf_vit_accel.patch(tower_of(model))


def status_line(tower: nn.Module) -> str:
    """Return what `status` says of the last inference call."""
    graphs = hf_vit_accel.status(tower).towers[0].graphs
    return str(None if graphs is None else graphs.last)


def is_close(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether outputs in bf16 are equal up to rounding."""
    return all(relative_error(x, y) < 2e-2 for x, y in zip(outputs, expected, strict=True))


def replay_once(tower: nn.Module) -> list[torch.Tensor]:
    """Call a tower until it is replayed; return the outputs."""
    for _ in range(4):
        outputs = run_tower(tower, IMAGE)
    assert status_line(tower).startswith("replayed")
    return outputs


@pytest.mark.usefixtures("kept_recorder")
def test_random_calls_with_poisoned_buffers(tower: nn.Module) -> None:
    """No call is wrong, and memory stays flat once the common sizes are captured."""
    runner = poison_before_use(state_of(tower).inference_runner)
    eager = hf_vit_accel.patch(copy.deepcopy(tower), cuda_graphs=False)
    rng = np.random.default_rng(0)
    layouts = [draw_grid(rng) for _ in range(60)]
    reserved = []
    for call in range(CALLS):
        grid = layouts[int(rng.integers(60) * rng.random())]
        assert is_close(run_tower(tower, grid, call), run_tower(eager, grid, call)), (call, grid)
        reserved.append(torch.cuda.memory_reserved())
    assert hf_vit_accel.status(tower).towers[0].graphs.replays > CALLS // 3
    assert runner.static_buffers() and isinstance(runner._recorder.wait, SpoilingWait)
    assert reserved[-1] <= reserved[CALLS // 4] + (32 << 20)


def capture_another_graph() -> None:
    """Capture, replay and check graphs of something else."""
    x = torch.zeros(64, device="cuda")
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x + 1
        graph.replay()
        torch.cuda.synchronize()
        assert bool((y == 1).all()), "the other graph"


def wait_for_the_device() -> None:
    """Wait for the whole device again and again, which CUDA refuses during a capture."""
    for _ in range(2000):
        torch.cuda.synchronize()


@pytest.mark.parametrize("work", [capture_another_graph, wait_for_the_device], ids=lambda work: work.__name__)
def test_threads_and_streams(tower: nn.Module, work: Callable[[], None]) -> None:
    """Two threads with streams of their own, while a third does something else."""
    expected = {width: run_tower(tower, [(1, 6, width)]) for width in (6, 8, 10)}
    torch.cuda.synchronize()
    wrong: list[object] = []

    def encode() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for width, outputs in expected.items():
                    got = run_tower(tower, [(1, 6, width)])
                    torch.cuda.current_stream().synchronize()
                    if not is_close(got, outputs):
                        wrong.append(width)

    def report(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            wrong.append((work.__name__, error))

    threads = [threading.Thread(target=report, args=(function,)) for function in (encode, encode, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert hf_vit_accel.status(tower).towers[0].graphs.captures, "nothing was captured beside the third thread"


@pytest.mark.parametrize("options", [{}, {"reuse": ReuseConfig(across_calls=True)}], ids=["graphs", "kept features"])
def test_a_forked_child(options: dict[str, ReuseConfig]) -> None:
    """A child of a data loader may free the model that it inherited."""
    model = TINY["qwen3_vl"].build().to("cuda", torch.bfloat16)
    tower = hf_vit_accel.patch(tower_of(model), **options)
    for _ in range(4):
        run_tower(tower, IMAGE)
    gc.collect()  # graphs of other tests, which the child would destroy
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del tower, model
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    pid, code = os.waitpid(child, os.WNOHANG)
    while pid == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        pid, code = os.waitpid(child, os.WNOHANG)
    if pid == 0:
        os.kill(child, 9)
    assert pid == child and code == 0
    run_tower(tower, IMAGE)


def test_captures_draw_no_numbers_of_the_users(tower: nn.Module) -> None:
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    replay_once(tower)
    tower.requires_grad_(True)
    pixels = pixels_for(tower, IMAGE, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        sum(output.sum() for output in outputs_of(tower(pixels, grid_thw=torch.tensor(IMAGE)))).backward()
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert all(map(torch.equal, before, after))


def test_a_compiled_model(tower: nn.Module) -> None:
    expected = run_tower(tower, IMAGE)
    grid = torch.tensor(IMAGE, device="cuda")
    pixels = pixels_for(tower, IMAGE, device="cuda", dtype=torch.bfloat16)

    def half_of_doubled(pixels: torch.Tensor) -> list[torch.Tensor]:
        """Surround the tower by code that is compiled, as in a model."""
        return [output * 2 / 2 for output in outputs_of(tower(pixels * 2 / 2, grid_thw=grid))]

    compiled = torch.compile(tower)
    compiled_around = torch.compile(half_of_doubled)
    with torch.no_grad():
        for _ in range(5):
            assert is_close(outputs_of(compiled(pixels, grid_thw=grid)), expected)
            assert is_close(compiled_around(pixels), expected)
    assert status_line(tower).startswith("replayed")


def test_a_profiler(tower: nn.Module) -> None:
    expected = run_tower(tower, IMAGE)
    with torch.profiler.profile() as profile:
        assert is_close(run_tower(tower, IMAGE), expected)
    assert status_line(tower) == "eager: no graph is captured under a profiler"
    replay_once(tower)
    with torch.profiler.profile() as profile:
        assert is_close(run_tower(tower, IMAGE), expected)
        torch.cuda.synchronize()
    assert status_line(tower).startswith("replayed") and len(profile.key_averages()) > 0


@pytest.fixture
def limit_memory() -> Iterator[Callable[[int], None]]:
    """Let this process take so many more bytes of the device; allow all again afterwards."""
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(more_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def reserved_bytes() -> int:
    """Return the bytes that torch holds, without those that it can give back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_memory_that_a_program_needs_is_given_back(tower: nn.Module, limit_memory: Callable[[int], None]) -> None:
    """An allocation of the program's own finds room only once the graphs are gone: at the second try."""
    run_tower(tower, IMAGE)
    before = reserved_bytes()
    expected = replay_once(tower)
    runner = state_of(tower).inference_runner
    graph_bytes = reserved_bytes() - before
    assert graph_bytes >= 4 << 20
    free = 64 << 20
    limit_memory(free)
    needed = free + graph_bytes // 2
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(needed, dtype=torch.uint8, device="cuda")
    assert not runner._graphs and not runner._arena
    torch.empty(needed, dtype=torch.uint8, device="cuda")
    assert is_close(run_tower(tower, IMAGE), expected)
    assert "memory ran out" in status_line(tower)


def test_steps_of_many_layouts_share_the_memory_of_gradients() -> None:
    """A captured step holds no gradients of its own: they lie where the next replay computes others."""
    towers = []
    for graphs in ("auto", False):
        model = TINY["qwen2_5_vl"].build().to("cuda", torch.bfloat16)
        towers.append(hf_vit_accel.patch(tower_of(model), cuda_graphs=graphs))
    towers[1].load_state_dict(towers[0].state_dict())
    grids: list[Grid] = [[(1, 8, 8)], [(1, 8, 12)], [(1, 4, 8), (1, 8, 8)]]
    gradient_bytes = sum(parameter.nbytes for parameter in towers[0].parameters())
    allocated = []
    for step in range(18):
        grid = grids[step % 3]
        gradients = []
        for tower in towers:
            pixels = pixels_for(tower, grid, step, device="cuda", dtype=torch.bfloat16)
            outputs_of(tower(pixels, grid_thw=torch.tensor(grid)))[1].float().square().sum().backward()
            gradients.append([parameter.grad for parameter in tower.parameters() if parameter.grad is not None])
            tower.zero_grad(set_to_none=True)
        for gradient, expected in zip(*gradients, strict=True):
            assert relative_error(gradient, expected) < 5e-2, (step, grid)
        del gradients, gradient, expected
        allocated.append(torch.cuda.memory_allocated())
    status = hf_vit_accel.status(towers[0]).towers[0].training
    assert status.captures == 3 and status.replays >= 9
    assert allocated[-1] - allocated[5] < 3 * gradient_bytes // 2


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b", "qwen2-vl-7b"])
def test_memory_of_large_calls(name: str) -> None:
    """The largest call that is captured takes no more than its estimate; above, the peak is at most stock's."""
    tower = build_tower(name, torch.device("cuda"), torch.bfloat16)
    captured: Grid = [(1, 32, 32)] * 16
    above: Grid = [(1, 32, 32)] * 17
    peaks = []
    for is_patched in (False, True):
        if is_patched:
            hf_vit_accel.patch(tower)
        run_tower(tower, above)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_tower(tower, above)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0]
    expected = run_tower(hf_vit_accel.patch(copy.deepcopy(tower), cuda_graphs=False), captured)
    for _ in range(4):
        outputs = run_tower(tower, captured)
    assert status_line(tower).startswith("replayed")
    assert all(relative_error(x, y) < 5e-2 for x, y in zip(outputs, expected, strict=True))
    runner = state_of(tower).inference_runner
    assert runner.nbytes <= runner.needed_bytes(tuple(captured), runner._identities[-1])
