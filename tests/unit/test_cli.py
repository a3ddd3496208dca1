"""The command line `doctor`: its verdicts on good, missing and wrong backends, as text and as JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import Result
from support.backends import Spoil, add_spoiled
from support.faults import raises
from torch import Tensor
from typer.testing import CliRunner

import hf_vit_accel
from hf_vit_accel import backends, machine
from hf_vit_accel.backends.base import Plan
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.tools import cli
from hf_vit_accel.tools import doctor as doctor_logic

RUNNER = CliRunner()
Report = dict[str, Any]


def doctor(*options: str) -> Result:
    return RUNNER.invoke(cli.app, ["doctor", *options])


def read(result: Result) -> Report:
    """Return the one JSON object on standard output. NaN and Infinity, which are not JSON, fail."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads(result.stdout, parse_constant=refuse)
    assert isinstance(report, dict)
    return report


def by_name(report: Report) -> dict[str, Report]:
    return {entry["name"]: entry for entry in report["backends"]}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check backends on few rows."""
    monkeypatch.setattr(doctor_logic, "LENGTHS", (1, 8, 8, 5, 24))


def test_version_and_help() -> None:
    result = RUNNER.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"hf-vit-accel {hf_vit_accel.__version__}\n")
    assert "doctor" in RUNNER.invoke(cli.app, ["--help"]).stdout


def test_without_a_gpu(no_gpu: None) -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "  none (torch finds no CUDA device)" in lines
    assert any(line.split() == ["torch", torch.__version__] for line in lines)
    text_of = dict(line.split(maxsplit=1) for line in lines[1 : lines.index("GPU")])
    assert text_of["cudnn"] == "not looked at without a CUDA device"
    assert text_of["cuda"] == (torch.version.cuda or "none (torch is built without CUDA)")
    assert any(line.split() == ["sdpa", "usable"] for line in lines)
    start = lines.index('attention="auto" takes on cpu in float32')
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["full", "layers", "sdpa"],
        ["window", "layers", "sdpa"],
    ]


@pytest.mark.usefixtures("short_segments")
def test_json_agrees(no_gpu: None) -> None:
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    report = read(result)
    text = doctor().stdout
    assert set(report) == set(doctor_logic.Report.__dataclass_fields__)
    assert report["ok"] is True and report["gpus"] == [] and report["gpu_problem"] is None
    assert report["versions"] == {**machine.versions(), "hf-vit-accel": hf_vit_accel.__version__}
    assert report["devices"] == {"cpu": ["float32", "bfloat16"]}
    assert report["auto"]["layers"] == {"full": "sdpa", "window": "sdpa"}
    assert [entry["name"] for entry in report["backends"]] == [backend.name for backend in backends.BACKENDS]
    for backend in backends.BACKENDS:
        entry = by_name(report)[backend.name]
        assert entry["reasons"] == backend.reasons_against_machine()
        assert all(f"- {reason}\n" in text for reason in entry["reasons"])
        assert entry["status"] == ("unusable" if entry["reasons"] else "usable")
        assert bool(entry["checks"]) == (entry["status"] == "usable")
    checks = by_name(report)["sdpa"]["checks"]
    assert {(check["dtype"], check["head_dim"], check["packed"], check["grad"]) for check in checks} == {
        (dtype, head_dim, packed, grad)
        for dtype in ("float32", "bfloat16")
        for head_dim in (64, 72, 80)
        for packed in (False, True)
        for grad in (False, True)
    }
    assert all(0 < check["error"] <= check["bound"] and check["problem"] is None for check in checks)


def test_every_key_is_documented() -> None:
    document = cli.doctor.__doc__ or ""
    for kind in (
        doctor_logic.Report,
        doctor_logic.Gpu,
        doctor_logic.Check,
        doctor_logic.BackendVerdict,
        doctor_logic.Auto,
    ):
        for key in kind.__dataclass_fields__:
            assert key in document


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda out_THD: out_THD * 1.02, "relative error 2.0e-02"),
        (lambda out_THD: out_THD.index_fill(0, torch.tensor([7]), float("nan")), "NaN"),
        (lambda out_THD: out_THD[:1], "got float32 of shape (1, 2, 64)"),
        (lambda out_THD: None, "AttributeError"),
        (raises(RuntimeError("no kernel\nfor this")), "RuntimeError: no kernel for this"),
    ],
    ids=["scaled", "nan", "shape", "none", "raises"],
)
def test_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, no_gpu: None, spoil: Spoil, problem: str) -> None:
    add_spoiled(monkeypatch, spoil)
    result = doctor()
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert any(line.split() == ["spoiled", "WRONG"] for line in lines)
    assert any(line.split() == ["sdpa", "usable"] for line in lines)
    assert lines[-1] == "  wrong or crashed: spoiled"
    assert problem in result.stdout


@pytest.mark.usefixtures("short_segments")
def test_a_backend_that_ignores_the_scale(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    class IgnoresScale(Sdpa):
        name = "default_scale"

        def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
            request = replace(plan.request, scale=q_THD.shape[-1] ** -0.5)
            return super().attend(q_THD, k_THD, v_THD, replace(plan, request=request))

    monkeypatch.setattr(backends, "BACKENDS", (IgnoresScale(), Sdpa()))
    verdicts = by_name(read(doctor("--json")))
    assert (verdicts["default_scale"]["status"], verdicts["sdpa"]["status"]) == ("wrong", "usable")
    assert all("relative error" in check["problem"] for check in verdicts["default_scale"]["checks"])


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("part", range(3), ids=["q", "k", "v"])
def test_a_backend_with_a_wrong_backward(monkeypatch: pytest.MonkeyPatch, no_gpu: None, part: int) -> None:
    """Its results are right, and so a backend of the same code that declares no gradients is usable."""

    class WrongBackward(Sdpa):
        name = "wrong_backward"

        def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
            qkv = [q_THD, k_THD, v_THD]
            x_THD = qkv[part]
            qkv[part] = 1.1 * x_THD - (0.1 * x_THD).detach()
            return super().attend(*qkv, plan)

    class ForwardAlone(WrongBackward):
        name = "forward_alone"
        needs = replace(Sdpa.needs, differentiable=False)

    monkeypatch.setattr(backends, "BACKENDS", (WrongBackward(), ForwardAlone(), Sdpa()))
    verdicts = by_name(read(doctor("--json")))
    assert {name: verdict["status"] for name, verdict in verdicts.items()} == {
        "wrong_backward": "wrong",
        "forward_alone": "usable",
        "sdpa": "usable",
    }
    wrong = [check for check in verdicts["wrong_backward"]["checks"] if check["problem"] is not None]
    assert wrong and all(check["grad"] and "relative error" in check["problem"] for check in wrong)
    assert "packed, with gradients: relative error" in doctor().stdout
    assert not any(check["grad"] for check in verdicts["forward_alone"]["checks"])


@pytest.mark.usefixtures("short_segments")
def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = raises(RuntimeError("CUDA error: all devices are busy"))
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    monkeypatch.setattr(machine, "cuda_capability", busy)
    result = doctor()
    assert result.exit_code == 1
    assert "  not usable: RuntimeError: CUDA error: all devices are busy" in result.stdout.splitlines()
    assert "sdpa" in result.stdout and "usable" in result.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    report = read(result)
    assert report["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert set(report["devices"]) == {"cpu", "cuda:0"}
    checks = by_name(report)["sdpa"]["checks"]
    assert {check["dtype"] for check in checks if check["device"] == "cuda:0"} == {"bfloat16", "float16", "float32"}
    for backend in backends.BACKENDS:
        assert by_name(report)[backend.name]["status"] == (
            "unusable" if backend.reasons_against_machine() else "usable"
        )
