"""``spectrain doctor``: what it reports, as a problem or as a note, and its exit status."""

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

import spectrain_ext as st
from spectrain_ext import _C
from spectrain_ext.cli.__main__ import main
from spectrain_ext.cli.doctor import (
    Finding,
    covers,
    environment,
    findings,
    peer_access,
    summary,
    versions,
)
from spectrain_ext.cli.options import plain_console
from spectrain_ext.threads import Crowd

BUILT = {
    "cuda": True,
    "cuda_compiler": "13.0.88",
    "cuda_architectures": ["sm_75", "sm_86", "sm_90", "compute_90"],
    "cuda_architectures_why": "no GPU was visible",
    "cpu_instruction_set": "x86-64-v3",
}
CPU_ONLY = {"cuda": False, "cpu_instruction_set": "baseline"}


def _see_cuda(
    monkeypatch: pytest.MonkeyPatch,
    *,
    toolkit: str | None,
    available: bool,
    driver: bool | None = None,
) -> None:
    """Set what torch sees, and whether a driver is installed: as given, or where there is a GPU."""
    there = available if driver is None else driver
    monkeypatch.setattr("spectrain_ext.cli.doctor._DRIVER_FILES", (__file__,) if there else ())
    monkeypatch.setattr("spectrain_ext.cli.doctor.disturbed", lambda: None)  # by other tests
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(available))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_C, "require_cuda", lambda: 1)


def test_it_prints_versions_build_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit=None, available=False)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    for fragment in (st.__version__, torch.__version__, "Build", "Devices", "cpu"):
        assert fragment in result.output
    for key in _C.build_info():
        assert key.replace("_", " ") in result.output


def test_a_complete_machine_has_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert findings(BUILT) == []


def test_problems_are_the_exit_status_and_notes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("This is so.", "change it", False)]
    monkeypatch.setattr("spectrain_ext.cli.doctor.findings", lambda build: found)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert result.output.endswith("Notes\n  - This is so.\n    change it\nNo problems.\n")
    found.insert(0, Finding("This fails.", "mend it"))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    problems = "Problems\n  - This fails.\n    remedy: mend it\n"
    assert result.output.endswith(f"{problems}Notes\n  - This is so.\n    change it\n")
    assert CliRunner().invoke(main, ["doctor", "--brief"]).exit_code == 0


def test_threads_without_a_core_each_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "Problems" in result.output
    assert "4096 threads" in result.output
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    (found,) = findings(BUILT)
    assert "4096 threads" in found.what
    assert "OMP_NUM_THREADS=" in found.remedy
    assert found.is_problem


def test_other_work_on_the_cores_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    crowd = Crowd("Other work is on these cores.", "OMP_NUM_THREADS=1")
    monkeypatch.setattr("spectrain_ext.cli.doctor.crowded", lambda: None)
    monkeypatch.setattr("spectrain_ext.cli.doctor.disturbed", lambda: crowd)
    assert findings(BUILT) == [Finding(*crowd, False)]


@pytest.mark.parametrize("available", [True, False])
def test_a_cpu_only_package_is_a_problem_where_a_gpu_is(
    available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=available)
    (found,) = (one for one in findings(CPU_ONLY) if "not built" in one.what)
    assert "SPECTRAIN_CUDA=1" in found.remedy
    assert "nvcc" in found.remedy
    assert found.is_problem is available


def test_one_line_says_what_was_built() -> None:
    result = CliRunner().invoke(main, ["doctor", "--brief"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 1
    assert result.output.strip() == summary(_C.build_info())
    assert "CUDA 13.0.88 (sm_75, sm_86, sm_90, compute_90: no GPU was visible)" in summary(BUILT)
    assert "CPU (baseline) only" in summary(CPU_ONLY)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        *(((7, 0), False), ((7, 5), True), ((8, 0), False), ((8, 6), True), ((8, 9), True)),
        *(((9, 0), True), ((10, 0), True), ((12, 1), True)),
        *(((8, 7), False), ((11, 0), True)),  # integrated
    ],
)
def test_which_gpu_the_build_covers(capability: tuple[int, int], runs: bool) -> None:
    architectures = BUILT["cuda_architectures"]
    assert isinstance(architectures, list)
    assert covers(architectures, capability) is runs


def test_architectures_without_ptx_end_with_their_major_version() -> None:
    assert covers(["sm_90a"], (9, 0))
    assert not covers(["sm_90a"], (10, 0))
    assert not covers([], (9, 0))


def test_a_gpu_that_was_not_built_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    (found,) = findings(BUILT)
    assert "cuda:0 has compute capability 8.0" in found.what
    assert 'TORCH_CUDA_ARCH_LIST="8.0"' in found.remedy
    assert found.is_problem


@pytest.mark.parametrize(
    ("setting", "value", "gpus", "told"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1, "one queue"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1, None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0, None),
        ("CUDA_LAUNCH_BLOCKING", "1", 2, "forever"),
        ("CUDA_LAUNCH_BLOCKING", "1", 1, None),
        ("CUDA_MODULE_LOADING", "LAZY", 2, "first launched"),
        ("CUDA_MODULE_LOADING", None, 2, "first launched"),
        ("CUDA_MODULE_LOADING", None, 1, None),
    ],
)
def test_what_makes_streams_wait_for_one_another(
    setting: str, value: str | None, gpus: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    if value is None:
        monkeypatch.delenv(setting)
    else:
        monkeypatch.setenv(setting, value)
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    found = findings(BUILT)
    assert [told in one.what for one in found] == ([] if told is None else [True])
    # torch's and CUDA's default, which does no harm without NCCL, is a note
    assert all(one.is_problem == (setting != "CUDA_MODULE_LOADING") for one in found)
    shown = environment()
    assert shown["NCCL_MAX_CTAS"] == "2"
    assert shown[setting].startswith(value or "LAZY (not set)")
    assert versions()["NCCL"] == "2.27.5"


def test_a_driver_that_only_torch_can_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)

    def refuse() -> int:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(_C, "require_cuda", refuse)
    (found,) = findings(BUILT)
    assert "driver too old" in found.what
    assert "13.0.88" in found.remedy
    assert found.is_problem


@pytest.mark.parametrize("driver", [True, False])
def test_a_cpu_torch_is_a_problem_where_a_gpu_is(
    driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _see_cuda(monkeypatch, toolkit=None, available=False, driver=driver)
    (found,) = findings(BUILT)
    assert found.what.startswith("This torch is a CPU build")
    assert ("although the machine has an NVIDIA device" in found.what) is driver
    assert "TORCH_INDEX" in found.remedy
    assert found.remedy.startswith("for a GPU: ") is not driver
    assert found.is_problem is driver


@pytest.mark.parametrize("driver", [True, False])
def test_a_cuda_torch_without_a_device_is_a_problem_where_a_gpu_is(
    driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=False, driver=driver)
    (found,) = findings(BUILT)
    assert "sees no CUDA device" in found.what
    assert ("the driver may be older than torch's CUDA 13.0" in found.remedy) is driver
    assert found.is_problem is driver


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_a_note(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=False, driver=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    (found,) = findings(BUILT)
    assert found.what == f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU."
    assert not found.is_problem


def test_a_missing_extra_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spectrain_ext.cli.doctor.find_spec", lambda name: None if name == "matplotlib" else sys
    )
    output = CliRunner().invoke(main, ["doctor"]).output
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    (found,) = findings(BUILT)
    assert "matplotlib" in found.what
    assert not found.is_problem
    assert f"  - {found.what}\n    pip install 'spectrain_ext[pictures]'\n" in output


def test_no_text_is_markup_on_a_console_of_a_command() -> None:
    text = "[red]own[/] :b: [train]"
    console = plain_console(width=60)
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    with console.capture() as capture:
        console.print(text, table)
    assert capture.get().count(text) == 5
    making = [p for p in Path(st.__file__).parent.rglob("*.py") if "Console(" in p.read_text()]
    # the bar in extras.py shows numbers only
    assert sorted(path.name for path in making) == ["extras.py", "options.py"]


def test_peer_access_asks_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def can_access(source: int, target: int) -> bool:
        asked.append((source, target))
        return source < target

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(peer_access())
    assert sorted(asked) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    rows = [line for line in capture.get().splitlines() if line.startswith("│ cuda")]
    assert [[cell.strip() for cell in row.strip("│").split("│")][1:] for row in rows] == [
        ["-", "yes", "yes"],
        ["no", "-", "yes"],
        ["no", "no", "-"],
    ]
