"""Tests ``spectrain doctor``: inner, because what it finds depends on the machine that it sees."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cli_programs import called, spectrain
from rich.table import Table

import spectrain_ext as st
from spectrain_ext import _C
from spectrain_ext.threads import Crowd
from spectrain_ext.tools.commands import doctor
from spectrain_ext.tools.commands.doctor import (
    Finding,
    covers,
    devices,
    environment,
    findings,
    versions,
)
from spectrain_ext.tools.commands.options import plain_console

BUILT = {
    "cuda": True,
    "cuda_compiler": "13.0.88",
    "cuda_architectures": ["sm_75", "sm_86", "sm_90", "compute_90"],
    "cuda_architectures_why": "no GPU was visible",
    "cpu_instruction_set": "x86-64-v3",
}
CPU_ONLY = {"cuda": False, "cpu_instruction_set": "baseline"}


class Machine:
    """What torch, CUDA and the operating system say; a complete machine if nothing is changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def is_so(
        self,
        *,
        toolkit: str | None = "13.0",
        gpus: int = 1,
        driver: bool | None = None,  # None: where there is a GPU
        capability: tuple[int, int] = (9, 0),
        refused: str = "",
        threads: int = 1,
        crowd: Crowd | None = None,
        missing: str = "",
        **environment: str,
    ) -> None:
        def require_cuda() -> int:
            if refused:
                raise RuntimeError(refused)
            return 1

        there = gpus > 0 if driver is None else driver
        replace = self._patch.setattr
        replace(doctor, "_DRIVER_FILES", (__file__,) if there else ())
        replace(doctor, "disturbed", lambda: crowd)  # by other tests
        replace(doctor, "find_spec", lambda name: None if name == missing else doctor)
        replace(torch.version, "cuda", toolkit)
        replace(torch, "get_num_threads", lambda: threads)
        replace(torch.cuda, "is_available", lambda: gpus > 0)
        replace(torch.cuda, "device_count", lambda: gpus)
        replace(torch.cuda, "get_device_capability", lambda index: capability)
        replace(torch.distributed, "is_nccl_available", lambda: True)
        replace(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        replace(_C, "require_cuda", require_cuda)
        self._patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name in ("MAX_CONNECTIONS", "LAUNCH_BLOCKING"):
            self._patch.delenv(f"CUDA_{name}", raising=False)
        for name, value in {"CUDA_MODULE_LOADING": "EAGER", **environment}.items():
            self._patch.setenv(name, value)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


OLD = {"gpus": 0, "driver": True}
PROBLEM, NOTE = True, False


@pytest.mark.parametrize(
    ("there", "what", "remedy", "problem"),
    [
        ({"threads": 4096}, "4096 threads", "OMP_NUM_THREADS=", PROBLEM),
        ({"crowd": Crowd("Other work.", "OMP_NUM_THREADS=1")}, "Other", "OMP_NUM_THREADS=1", NOTE),
        ({"missing": "matplotlib"}, "matplotlib", "pip install 'spectrain_ext[pictures]'", NOTE),
        ({"capability": (8, 0)}, "capability 8.0", 'TORCH_CUDA_ARCH_LIST="8.0"', PROBLEM),
        ({"refused": "driver too old"}, "driver too old", "13.0.88", PROBLEM),
        (
            {"toolkit": None, **OLD},
            *("CPU build, although the machine has an NVIDIA device", "install a CUDA", PROBLEM),
        ),
        ({"toolkit": None, "gpus": 0}, "CPU build.", "for a GPU: install a CUDA", NOTE),
        (OLD, "sees no CUDA device", "the driver may be older than torch's CUDA 13.0", PROBLEM),
        ({"gpus": 0}, "sees no CUDA device", "for a GPU: install NVIDIA's driver", NOTE),
        ({**OLD, "CUDA_VISIBLE_DEVICES": ""}, "DEVICES='' hides every GPU.", "unset", NOTE),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "one queue", "CONNECTIONS=32", PROBLEM),
        ({"gpus": 2, "CUDA_LAUNCH_BLOCKING": "1"}, "forever", "unset it", PROBLEM),
        # torch's and CUDA's default, which does no harm without NCCL
        ({"gpus": 2, "CUDA_MODULE_LOADING": "LAZY"}, "first launched", "LOADING=EAGER", NOTE),
    ],
)
def test_what_is_found(
    machine: Machine, there: dict[str, Any], what: str, remedy: str, problem: bool
) -> None:
    machine.is_so(**there)
    (found,) = findings(BUILT)
    assert what in found.what
    assert remedy in found.remedy
    assert found.is_problem is problem


def test_a_complete_machine_has_no_findings(machine: Machine) -> None:
    connections, lazy = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {"CUDA_MODULE_LOADING": "LAZY"}
    for there in ({}, {"gpus": 2}, connections, {"CUDA_LAUNCH_BLOCKING": "1"}, lazy):
        machine.is_so(**there)
        assert findings(BUILT) == []


def test_a_cpu_only_package_is_a_problem_where_a_gpu_is(machine: Machine) -> None:
    for gpus in (0, 1):
        machine.is_so(gpus=gpus)
        (found,) = (one for one in findings(CPU_ONLY) if "not built" in one.what)
        assert "SPECTRAIN_CUDA=1" in found.remedy and "nvcc" in found.remedy
        assert found.is_problem is (gpus > 0)


# What is printed


def test_versions_build_devices_and_the_environment_are_printed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.is_so(toolkit=None, gpus=0)
    result = called(spectrain, "doctor")
    assert result.exit_code == 0, result.output
    keys = [key.replace("_", " ") for key in _C.build_info()]
    for fragment in (st.__version__, torch.__version__, "Build", "Devices", "cpu", *keys):
        assert fragment in result.output
    machine.is_so(NCCL_MAX_CTAS="2")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    shown = environment()
    assert (shown["NCCL_MAX_CTAS"], shown["CUDA_MODULE_LOADING"]) == ("2", "LAZY (not set)")
    assert versions()["NCCL"] == "2.27.5"


def test_problems_are_the_exit_status_and_notes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("This is so.", "change it", False)]
    monkeypatch.setattr(doctor, "findings", lambda build: found)
    notes = "Notes\n  - This is so.\n    change it\n"
    result = called(spectrain, "doctor")
    assert result.exit_code == 0
    assert result.output.endswith(f"{notes}No problems.\n")
    found.insert(0, Finding("This fails.", "mend it"))
    result = called(spectrain, "doctor")
    assert result.exit_code == 1
    assert result.output.endswith(f"Problems\n  - This fails.\n    remedy: mend it\n{notes}")


def test_no_text_is_markup_on_a_console_of_a_command() -> None:
    text = "[red]own[/] :b: [train]"
    console = plain_console(width=60)
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    with console.capture() as capture:
        console.print(text, table)
    assert capture.get().count(text) == 5
    making = [p for p in Path(st.__file__).parent.rglob("*.py") if "Console(" in p.read_text()]
    # the bar in progress_bar.py shows numbers only
    assert sorted(path.name for path in making) == ["options.py", "progress_bar.py"]


# GPUs


def test_which_gpu_the_build_covers() -> None:
    architectures = BUILT["cuda_architectures"]
    assert isinstance(architectures, list)
    minor = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1))
    integrated = ((8, 7), (11, 0))
    covered = [one for one in (*minor, *integrated) if covers(architectures, one)]
    assert covered == [(7, 5), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1), (11, 0)]
    # without PTX it ends with its major version
    assert [one for one in minor if covers(["sm_90a"], one)] == [(9, 0)]
    assert not any(covers([], one) for one in minor)


def test_peer_access_asks_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda source, target: source < target
    )
    _, *gpus = devices().values()
    for text, reached in zip(gpus, ("1, 2", "2", "none"), strict=True):
        assert text == f"GPU, compute capability 9.0, 80 GiB, peer access to {reached}"
