"""`examples/caption_on_ray.py`: every record once, whatever is done twice, dies or is left out; Ray itself last."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captioning import stages
from captioning.journal import Batches, Journal, Record
from captioning.options import OnRay
from captioning.plan import Plan
from captioning.prepare import prepare
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from media.batches import Task
from media.files import lock
from media.items import checksum
from programs import EXAMPLES, RUNNER, draw, encode, words
from standins import alike
from support_captioning import MODEL, PROMPT, WORDS, batch_caption, caption, lines, load_once, put, write_tar
from test_caption_same import FIRST, KINDS, SECOND, anew

pytest.importorskip("pyarrow")
ROOT = EXAMPLES.parent


def record(key: str, **more: Any) -> Record:
    return Record(**{"key": key, "prompt": "p", "status": "ok", "caption": f"of {key}", "run": "r"} | more)


def counted(output: Path) -> Counter[Record]:
    return Counter(Journal(output).records())


# --- records as parquet -----------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Record,
            key=st.text(st.characters(), max_size=8),
            prompt=st.text(max_size=4),
            status=st.sampled_from(["ok", "error"]),
            caption=st.none() | st.text(max_size=8),
            width=st.none() | st.integers(0, 1 << 40),
            source=st.none() | st.sampled_from(["a.tar", "latin\udce9", "latin\\udce9"]),
        ),
        max_size=4,
    )
)
def test_parquet_holds_any_record(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    output = tmp_path_factory.mktemp("o")
    batches = Batches.new(output)
    batches.append(3, records)
    assert batches.read(3) == list(Journal(output).records()) == records and batches.read(4) is None
    batches.fold()
    assert list(Journal(output).records()) == records and not batches.folder.exists()


def test_a_batch_that_is_written_twice_is_there_once(tmp_path: Path) -> None:
    batches = Batches.new(tmp_path)
    for number in (0, 1, 0, 0):
        batches.append(number, [record(f"{number}a"), record(f"{number}b")])
    assert counted(tmp_path) == dict.fromkeys(map(record, ("0a", "0b", "1a", "1b")), 1)


def test_a_fold_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches.new(tmp_path)
    for number in range(3):
        batches.append(number, [record(f"{number}")])
    wanted = counted(tmp_path)
    for module, name in (("captioning.records", "Path.replace"), ("captioning.journal", "shutil.rmtree")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.{name}", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                batches.fold()
        assert counted(tmp_path) == wanted
    assert batches.file.exists() and batches.folder.exists()
    Journal(tmp_path).repair()
    assert counted(tmp_path) == wanted and not batches.folder.exists()
    assert Batches.new(tmp_path).folder.name == "captions-ray-00001"


def test_what_a_kill_tears_is_no_record(tmp_path: Path) -> None:
    batches = Batches.new(tmp_path)
    batches.append(0, [record("a")])
    (batches.folder / ".0123.part").write_bytes((batches.folder / "00000000.parquet").read_bytes()[:50])
    assert counted(tmp_path) == {record("a"): 1}
    Journal(tmp_path).repair()
    assert counted(tmp_path) == {record("a"): 1}


def test_records_in_parquet_are_rewritten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        name = f"{number}"
        found = [record(name, checksum="c", stamp="old"), record("both", caption=name), record("no", caption=None)]
        Batches.new(tmp_path).append(0, found[: 3 if number < 2 else 1])
    journal.append(0, [record("both", caption="of lines")])
    plan = Plan(stale={("both", "p"), ("1", "p"), ("no", "p")}, stamps={"0": "new"})
    journal.repair()
    untouched = (tmp_path / "captions-ray-00002.parquet").stat().st_ino
    journal.begin({"run": "r"}, partial(plan.revised, "r"))
    left = {record("0", checksum="c", stamp="new"): 1, record("2", checksum="c", stamp="old"): 1}
    assert counted(tmp_path) == left and journal.newest()["run"] == "r"
    aside = [json.loads(line)["caption"] for line in (tmp_path / "superseded.jsonl").read_text().splitlines()]
    assert aside == ["of lines", "0", "of 1", "1"]
    assert (tmp_path / "captions-ray-00002.parquet").stat().st_ino == untouched
    journal.begin({"run": "other"}, partial(Plan(stale={("0", "p")}).revised, "other"))
    assert counted(tmp_path) == left
    journal.note({"run": "third"}, instead=True)
    assert [entry["run"] for entry in journal.manifest()["runs"]] == ["r", "third"]
    journal.rewrite(lambda each: None)
    assert not counted(tmp_path) and len(list(tmp_path.glob("captions-ray-*.parquet"))) == 3


def test_files_of_other_names_are_no_records(tmp_path: Path) -> None:
    Batches.new(tmp_path).append(0, [record("a")])
    for name in ("captions-ray-mine.parquet", "captions.parquet"):
        (tmp_path / name).write_bytes(b"no table")
    assert counted(tmp_path) == {record("a"): 1}


# --- the stages, without a cluster ------------------------------------------------------------------------------------


Schedule = Callable[[Sequence[int]], list[int]]
"""From the numbers of all batches: which are done, in what order, how often."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Pictures, a damaged one, one of a name that is no text, and shards."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    top = tmp_path_factory.mktemp("data")
    put(top / "photos", *(f"{number}.png" for number in range(9)), "deep/a.png", "latin\udce9.png")
    (top / "photos" / "cut.png").write_bytes(encode(draw(1)[0])[:100])
    write_tar(top / "b.tar", ("x.png", encode(draw(2)[0])), ("y.jpg", b""))
    pq.write_table(pa.table({"image": [encode(draw(3)[0]), encode(draw(4)[0])]}), top / "c.parquet")
    return [str(top / "photos"), str(top / "b.tar"), str(top / "c.parquet")]


@pytest.fixture(scope="module")
def alone(photos: list[str], tmp_path_factory: pytest.TempPathFactory) -> Counter[Record]:
    """The records of one undisturbed process."""
    output = tmp_path_factory.mktemp("alone")
    assert caption(photos, output, "--batch-size=4").exit_code == 0
    return counted(output)


class NoCluster:
    """In the place of Ray: runs the stages here, as a schedule says. died: raised once all of that is done."""

    def __init__(self) -> None:
        self.schedule: Schedule = list
        self.died: BaseException | None = None

    def captioned(self, job: stages.Job, batches: Sequence[Sequence[Task]], most: Any) -> Iterator[dict[str, Any]]:
        job = pickle.loads(pickle.dumps(job))
        actors = [stages.Answer(job) for _ in range(2)]
        told = set()
        for turn, number in enumerate(self.schedule(range(len(batches)))):
            counts = actors[turn % 2](number, stages.make_ready(job, pickle.loads(pickle.dumps(batches[number]))))
            if number not in told:  # Ray gives each once
                told.add(number)
                found = {name: counts[name] for name in ("failed", "vision", "text", "halved")}
                yield {"number": number, "status": actors[0].status(), **found}
        for actor in actors:
            actor.stack.close()
        if self.died:
            raise self.died


class RayError(Exception):
    """In the place of Ray's own."""


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> NoCluster:
    """`caption_on_ray.py` without Ray, as the module `on_ray`."""
    found = NoCluster()
    parts = {"captioned": found.captioned, "connect": lambda options: False, "measured": stages.measure}
    exceptions = SimpleNamespace(RayError=RayError, ExecutionTimeoutError=RayError)
    monkeypatch.setitem(sys.modules, "captioning.cluster", SimpleNamespace(**parts))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "ray.data.exceptions", exceptions)
    monkeypatch.delitem(sys.modules, "caption_on_ray", raising=False)
    monkeypatch.setattr(stages, "load_model", load_once)
    monkeypatch.setitem(sys.modules, "on_ray", importlib.import_module("caption_on_ray"))
    return found


def on_ray(inputs: Sequence[str], output: Path, *options: str) -> Result:
    settings = [f"--model={MODEL}", f"--max-new-tokens={WORDS}", "--batch-size=4"]
    arguments = [*inputs, f"--output={output}", *settings, *options]
    return RUNNER.invoke(sys.modules["on_ray"].app, [*arguments, f"--prompt={PROMPT}"])


def test_records_are_those_of_one_process(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    done = on_ray(photos, tmp_path)
    assert done.exit_code == 0, done.output
    assert counted(tmp_path) == alone and set(alone.values()) == {1} and len(alone) == 16
    assert [path.name for path in tmp_path.glob("captions-*")] == ["captions-ray-00000.parquet"]
    (entry,) = Journal(tmp_path).manifest()["runs"]
    assert "qwen3_vl, patched" in entry["status"] and entry["records"] == 16
    assert "16 of 16 items" in done.output and "14 of 16 records have captions" in done.output
    assert "0 of them to caption" in on_ray(photos, tmp_path).output
    assert "0 of them to caption" in caption(photos, tmp_path).output
    assert counted(tmp_path) == alone


@pytest.mark.parametrize("seed", alike(0, 1))
def test_what_is_done_twice_is_there_once(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path, seed: int
) -> None:
    """An actor dies after its batch is written, before it says so; a node that was taken for dead writes once more."""
    chance = random.Random(seed)
    no_cluster.schedule = lambda numbers: chance.sample([*numbers] * 2, 2 * len(numbers))
    assert on_ray(photos, tmp_path).exit_code == 0
    assert counted(tmp_path) == alone


def job_of(inputs: Sequence[str], output: Path, **more: Any) -> tuple[stages.Job, list[Task]]:
    """A job as the driver has it, and the tasks."""
    options = OnRay(inputs=list(inputs), output=output, model=str(MODEL), prompt=[PROMPT], max_new_tokens=WORDS, **more)
    with ExitStack() as stack:
        ready = prepare(options.request(False), stack)
    folder = Batches.new(output).folder
    return stages.Job(options=options, run=ready.run, commit=None, on_gpu=False, folder=folder), ready.plan.tasks


def test_what_is_written_costs_no_model(
    photos: list[str], alone: Counter[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "load_model", load_once)
    job, tasks = job_of(photos, tmp_path)
    answer = stages.Answer(job)
    first = answer(0, stages.make_ready(job, tasks))
    assert counted(tmp_path) == alone and first["vision"] and first["text"] and first["failed"] == 2
    with pytest.raises(ValueError, match="another run is writing"), lock(tmp_path, alone=True):
        pass
    answer.stack.close()
    again = answer(0, b"")
    assert (again["failed"], again["text"], again["vision"]) == (2, first["text"], 0)


def test_a_batch_that_the_memory_does_not_hold_is_halved(
    photos: list[str], alone: Counter[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "load_model", load_once)
    job, tasks = job_of(photos, tmp_path)
    answer = stages.Answer(job)
    generate = answer.worker.captioner.generate

    def small(inputs: Any, seeds: Any) -> Any:
        if len(seeds[0]) > 5:
            raise torch.OutOfMemoryError
        return generate(inputs, seeds)

    monkeypatch.setattr(answer.worker.captioner, "generate", small)
    assert (
        answer(0, stages.make_ready(job, stages.measure(job, tasks)))["halved"] == 3
    )  # 14 to 7 and 7, those to 3 and 4
    assert counted(tmp_path) == alone


def test_prompts_share_their_pixels_on_the_way(photos: list[str], tmp_path: Path) -> None:
    job, tasks = job_of(photos, tmp_path)
    one, two = (
        len(stages.make_ready(job, [replace(task, prompts=prompts) for task in tasks]))
        for prompts in ((PROMPT,), (PROMPT, "is the text above ?"))
    )
    assert one > 1_000_000 and two < 1.02 * one


def test_graphs_are_warm_before_the_first_batch(
    photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    fake = SimpleNamespace(
        patch=lambda model, **settings: calls.append(("patch", settings)),
        warmup=lambda model, **settings: calls.append(("warmup", settings)),
    )
    monkeypatch.setattr(stages, "hf_vit_accel", fake)
    monkeypatch.setattr(stages, "load_model", lambda name, dtype, device, commit: calls.append((str(device), {})))
    job, _ = job_of(photos, tmp_path, cuda_graphs=True, attention="torch_varlen")
    stages.Answer(replace(job, on_gpu=True))
    patched = ("patch", {"attention": "torch_varlen", "cuda_graphs": True, "reuse": False})
    assert calls == [("cuda", {}), patched, ("warmup", {"progress": False})]


def test_options_that_change_captions_reach_the_workers(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    options = [
        "--temperature=0.8",
        "--seed=3",
        "--max-pixels=20000",
        "--refuse-above=32000",
        "--prompt=what is {stem} ?",
    ]
    assert caption(photos, tmp_path / "one", "--batch-size=4", *options).exit_code == 0
    assert on_ray(photos, tmp_path / "ray", *options).exit_code == 0
    assert counted(tmp_path / "ray") == counted(tmp_path / "one")
    errors = [each.error or "" for each in counted(tmp_path / "ray")]
    assert (
        any("the limit is 32000" in error for error in errors) and not counted(tmp_path / "ray").keys() & alone.keys()
    )


def test_workers_stand_in_other_folders(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(numbers: Sequence[int]) -> list[int]:
        os.chdir(tmp_path)
        return list(numbers)

    monkeypatch.chdir(Path(photos[0]).parent)
    no_cluster.schedule = elsewhere
    inputs = ["photos/**/*.png", "b.tar", "c.parquet"]
    assert on_ray(inputs, Path(os.path.relpath(tmp_path / "out"))).exit_code == 0
    assert counted(tmp_path / "out") == alone


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        *alike((RayError("two of three nodes are gone"), "one"), (RayError("two of three nodes are gone"), "ray")),
        *alike((KeyboardInterrupt(), "ray"), (KeyboardInterrupt(), "one")),
        *alike((OSError("disk full"), "ray"), (OSError("disk full"), "one"))[1:],
    ],
)
def test_either_goes_on_where_ray_stopped(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path, error: BaseException, goes_on: str
) -> None:
    no_cluster.schedule, no_cluster.died = (lambda numbers: [2, 0, 2]), error
    stopped = on_ray(photos, tmp_path)
    assert stopped.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "start the same command to go on" in stopped.output and str(error) in stopped.output
    half = counted(tmp_path)
    assert len(half) == 8 and half < alone
    no_cluster.schedule, no_cluster.died = list, None
    done = on_ray(photos, tmp_path) if goes_on == "ray" else caption(photos, tmp_path)
    assert done.exit_code == 0 and "16 items, 8 of them to caption" in done.output
    assert counted(tmp_path) == alone


def test_overwrite_that_is_stopped_says_how_to_go_on(
    no_cluster: NoCluster, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the new run is noted, to go on without --overwrite would be to go on with the old one."""
    assert on_ray(photos, tmp_path).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["on_ray"], "processor_for", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert "start the same command to go on" in on_ray(photos, tmp_path, "--overwrite").output
    no_cluster.died = KeyboardInterrupt()
    assert "start the same command without --overwrite to go on" in on_ray(photos, tmp_path, "--overwrite").output


def test_ray_goes_on_where_one_stopped(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    caption(photos, tmp_path, "--limit=7")
    assert "16 items, 9 of them to caption" in on_ray(photos, tmp_path, "--dry-run").output
    assert len(counted(tmp_path)) == 7
    assert on_ray(photos, tmp_path).exit_code == 0 and counted(tmp_path) == alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first, then", alike(("ray", "one"), ("one", "ray")))
def test_a_picture_is_told_by_its_bytes_whoever_captions(
    no_cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, first: str, then: str
) -> None:
    def run(who: str, output: Path) -> str:
        anew()
        done = on_ray([place], output) if who == "ray" else caption([place], output)
        assert done.exit_code == 0, done.output
        return words(done)

    monkeypatch.setattr(batch_caption, "load_model", load_once)
    output, place = tmp_path / "out", KINDS[kind](tmp_path, FIRST)
    run(first, output)
    (found,) = counted(output)
    assert found.caption and found.checksum == checksum(BytesIO(encode(FIRST, "BMP")))
    assert (found.stamp is None) == (kind == "row that names a file")
    os.utime(place, (1, 1))
    assert "1 items, 0 of them to caption" in run(then, output)
    assert not (output / "superseded.jsonl").exists()
    if found.stamp:
        assert counted(output) == {replace(found, stamp=stamp_at_1(place, found)): 1}
        with monkeypatch.context() as patch:
            patch.setattr("captioning.plan.checksum", lambda file: pytest.fail("read again"))
            run(first, output)
    KINDS[kind](tmp_path, SECOND)
    told = run(then, output)
    assert "1 items, 1 of them to caption" in told and "1 captions are outdated" in told
    (now,) = counted(output).elements()
    assert now.caption != found.caption and now.checksum == checksum(BytesIO(encode(SECOND, "BMP")))
    assert [line["caption"] for line in lines(output / "superseded.jsonl")] == [found.caption]
    run(first, tmp_path / "fresh")
    assert counted(tmp_path / "fresh") == {now: 1}
    assert "1 items, 0 of them to caption" in run(first, output)


def stamp_at_1(place: str, found: Record) -> str:
    """The stamp that a record has once the time of its file is 1 second after the epoch."""
    before = str(found.stamp).split(" ")
    return " ".join([str(Path(place).stat().st_size), "1000000000", *before[2:]])


def test_what_was_given_up_is_told_and_made_up_for(
    no_cluster: NoCluster, photos: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    no_cluster.schedule = lambda numbers: list(numbers)[1:]
    done = on_ray(photos, tmp_path)
    assert done.exit_code == 1 and "4 records are missing: wait for the run, or start it once more" in done.output
    no_cluster.schedule = list
    assert on_ray(photos, tmp_path).exit_code == 0 and counted(tmp_path) == alone


@pytest.mark.parametrize(
    "options, why",
    [
        (["--model=nowhere"], "cannot load nowhere"),
        (["--demo"], "name a model"),
        (["--min-pixels=100000", "--max-pixels=1000"], "Invalid value for --min-pixels: --min-pixels 100000 is above"),
    ],
)
def test_mistakes_are_refused(
    no_cluster: NoCluster, photos: list[str], tmp_path: Path, options: list[str], why: str
) -> None:
    done = on_ray(photos, tmp_path, *options)
    assert done.exit_code == 2 and why in " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`captioning.cluster`, whose functions of tables need no Ray."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.data", SimpleNamespace(ActorPoolStrategy=None, DataContext=None))
    monkeypatch.setitem(sys.modules, "captioning.cluster", None)
    monkeypatch.delitem(sys.modules, "captioning.cluster")
    return importlib.import_module("captioning.cluster")


def test_a_row_is_a_batch(
    rows: Any, photos: list[str], alone: Counter[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "load_model", load_once)
    job, tasks = job_of(photos, tmp_path)
    sized = rows._measure(rows._row(5, pickle.dumps(tasks)), job)
    assert pickle.loads(sized["data"][0].as_py()) == stages.measure(job, tasks) != tasks
    actor = rows._Actor(job)
    (found,) = actor(rows._make_ready(sized, job)).to_pylist()
    assert (found["number"], found["failed"], found["halved"]) == (5, 2, 0) and "patched" in found["status"]
    assert counted(tmp_path) == alone and [path.name for path in job.folder.iterdir()] == ["00000005.parquet"]


def test_an_actor_whose_gpu_fails_leaves_its_batch_to_another(
    rows: Any, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(stages, "load_model", load_once)
    monkeypatch.setattr(os, "_exit", sys.exit)
    job, tasks = job_of(photos, tmp_path)
    actor = rows._Actor(job)
    monkeypatch.setattr(actor.worker.captioner, "generate", die)
    with pytest.raises(SystemExit):
        actor(rows._make_ready(rows._row(0, pickle.dumps(tasks)), job))
    assert not counted(tmp_path)


# --- Ray itself -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[data]'")
def test_a_small_soak_on_three_nodes(tmp_path: Path) -> None:
    """A node is killed with all that is on it, and another one comes."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "examples" / "captioning" / "soak_on_ray.py"),
        str(tmp_path),
        "--pictures=60",
        "--kills=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    figures = json.loads(done.stdout)
    assert not figures["problems"] and figures["killed"] == {"node": 1} and done.returncode == 0, figures
