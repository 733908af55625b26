"""Tests ``spectrain doctor``: what is installed, what is missing and how to fix it."""

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

import spectrain_ext as st
from spectrain_ext import _C
from spectrain_ext.cli.doctor import (
    covers,
    environment,
    peer_access,
    problems,
    summary,
    versions,
)
from spectrain_ext.cli.group import main
from spectrain_ext.cli.options import plain_console

BUILT = {
    "cuda": True,
    "cuda_compiler": "13.0.88",
    "cuda_architectures": ["sm_75", "sm_86", "sm_90", "compute_90"],
    "cuda_architectures_why": "no GPU was visible",
    "cpu_instruction_set": "x86-64-v3",
}
CPU_ONLY = {"cuda": False, "cpu_instruction_set": "baseline"}


def _see_cuda(monkeypatch: pytest.MonkeyPatch, *, toolkit: str | None, available: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(available))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_C, "require_cuda", lambda: 1)


def test_it_prints_versions_build_and_devices() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    for fragment in (st.__version__, torch.__version__, "Build", "Devices", "cpu"):
        assert fragment in result.output
    for key in _C.build_info():
        assert key.replace("_", " ") in result.output


def test_nothing_is_missing_where_everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert problems(BUILT) == []


def test_threads_without_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    result = CliRunner().invoke(main, ["doctor"])
    assert "To be mended" in result.output
    assert "4096 threads" in result.output
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    what, remedy = problems(BUILT)[0]
    assert "4096 threads" in what
    assert "OMP_NUM_THREADS=" in remedy


def test_a_cpu_only_build_names_the_way_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    what, remedy = problems(CPU_ONLY)[0]
    assert "not built" in what
    assert "SPECTRAIN_CUDA=1" in remedy
    assert "nvcc" in remedy


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
        *(((8, 7), False), ((11, 0), True)),  # integrated GPUs
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


def test_a_gpu_that_was_not_built_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    ((what, remedy),) = problems(BUILT)
    assert "cuda:0 has compute capability 8.0" in what
    assert 'TORCH_CUDA_ARCH_LIST="8.0"' in remedy


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
    found = [what for what, _ in problems(BUILT) if "NCCL" in what or "stream" in what]
    assert len(found) == (told is not None)
    assert all(told is not None and told in what for what in found)
    shown = environment()
    assert shown["NCCL_MAX_CTAS"] == "2"
    assert shown[setting].startswith(value or "LAZY (not set)")
    assert versions()["NCCL"] == "2.27.5"


def test_a_driver_that_only_torch_can_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=True)

    def refuse() -> int:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(_C, "require_cuda", refuse)
    ((what, remedy),) = problems(BUILT)
    assert "driver too old" in what
    assert "13.0.88" in remedy


def test_a_cpu_torch_names_the_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit=None, available=False)
    what, remedy = problems(BUILT)[0]
    assert "CPU build" in what
    assert "TORCH_INDEX" in remedy


def test_a_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_cuda(monkeypatch, toolkit="13.0", available=False)
    what, remedy = problems(BUILT)[0]
    assert "sees no CUDA device" in what
    assert "driver" in remedy


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spectrain_ext.cli.doctor.find_spec", lambda name: None if name == "matplotlib" else sys
    )
    said = CliRunner().invoke(main, ["doctor"]).output
    _see_cuda(monkeypatch, toolkit="13.0", available=True)
    ((what, remedy),) = problems(BUILT)
    assert "matplotlib" in what
    assert "spectrain_ext[pictures]" in remedy
    assert f"  - {what}\n    remedy: pip install 'spectrain_ext[pictures]'\n" in said


def test_no_text_is_markup_on_a_console_of_a_command() -> None:
    text = "[red]own[/] :b: [train]"
    console = plain_console(width=60)
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    with console.capture() as capture:
        console.print(text, table)
    assert capture.get().count(text) == 5
    making = [p for p in Path(st.__file__).parent.rglob("*.py") if "Console(" in p.read_text()]
    assert [path.name for path in making] == ["options.py"]


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
