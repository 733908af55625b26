"""Reports versions, the build, the devices, and what is wrong here with its remedy."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.cuda import nccl

from spectrain_ext import _C
from spectrain_ext.threads import cores, crowded, disturbed

from .options import plain_console

BuildInfo = Mapping[str, str | bool | list[str]]
#: Settings that CUDA reads when it starts in a process, with its defaults.
_CUDA_SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "CUDA_MODULE_LOADING": "LAZY",
    "CUDA_LAUNCH_BLOCKING": "0",
}
# Files of NVIDIA's driver; the second is WSL's, where every vendor's GPU has /dev/dxg.
_DRIVER_FILES = "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"


class Finding(NamedTuple):
    """Something to know about this machine: a problem is wrong or fails, a note does not."""

    what: str
    remedy: str
    is_problem: bool = True


@click.command(short_help="Show versions, build and devices, and list problems.")
def doctor() -> None:
    """Show versions, build and devices, and list problems with their remedies.

    Problems are wrong or will fail here, and make the exit status 1. Notes do not change it.
    Under torchrun this also checks that the threads of all processes have a core each.
    """
    console = plain_console()
    build: BuildInfo = _C.build_info()
    _print_rows(console, "Versions", versions())
    if settings := environment():
        _print_rows(console, "Environment", settings)
    _print_rows(console, "Build", {key.replace("_", " "): _plain(build[key]) for key in build})
    _print_rows(console, "Devices", devices())
    listed = findings(build)
    problems = [one for one in listed if one.is_problem]
    _print_findings(console, "Problems", problems, "yellow", "remedy: ")
    _print_findings(console, "Notes", [one for one in listed if not one.is_problem], "dim")
    if problems:
        raise click.exceptions.Exit(1)
    console.print("No problems.", style="bold green")


def versions() -> dict[str, str]:
    return {
        "spectrain_ext": _C.build_info()["version"],
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        **({"NCCL": ".".join(map(str, nccl.version()))} if dist.is_nccl_available() else {}),
        **installed("numpy", "scikit-learn", "matplotlib", "cupy-cuda13x", "cupy-cuda12x"),
    }


def environment() -> dict[str, str]:
    """Return the variables that affect streams and messages on this machine."""
    settings = {
        name: os.environ.get(name, f"{default} (not set)")
        for name, default in _CUDA_SETTINGS.items()
        if name in os.environ or torch.cuda.is_available()
    }
    others = "NCCL_", "TORCH_NCCL_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    return settings | {
        name: text for name, text in sorted(os.environ.items()) if name.startswith(others)
    }


def devices() -> dict[str, str]:
    threads = f"torch runs {torch.get_num_threads()} threads"
    lines = {"cpu": f"{cpu_name()}: {cores()} cores to use, {threads}"}
    every = range(torch.cuda.device_count())
    for index in every:
        properties = torch.cuda.get_device_properties(index)
        lines[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
        others = [other for other in every if other != index]
        if others:
            reached = [n for n in others if torch.cuda.can_device_access_peer(index, n)]
            lines[f"cuda:{index}"] += f", peer access to {', '.join(map(str, reached)) or 'none'}"
    return lines


def findings(build: BuildInfo) -> list[Finding]:
    unsorted = *_build_findings(build), *_torch_findings(), *_stream_findings(), *_other_findings()
    return sorted(unsorted, key=lambda finding: not finding.is_problem)


def covers(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether code built for ``architectures`` runs on a GPU of ``capability``."""
    integrated = capability in ((8, 7), (11, 0))
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        number = int("".join(filter(str.isdigit, digits)))
        built = divmod(number, 10)
        # compute_86 is PTX, which the driver compiles: it runs on everything later.
        if built == capability or (built < capability and kind == "compute"):
            return True
        # sm_86 runs on later minor versions of its major one, but code for a discrete GPU does not
        # run on an integrated one.
        if built < capability and built[0] == capability[0] and not integrated:
            return True
    return False


def _build_findings(build: BuildInfo) -> Iterator[Finding]:
    if not build["cuda"]:
        yield Finding(
            "The CUDA half of this package was not built: CPU tensors only.",
            "with a CUDA toolkit (nvcc on PATH, or CUDA_HOME) reinstall under SPECTRAIN_CUDA=1, "
            "which makes a missing compiler an error",
            _has_gpu(),
        )
        return
    architectures = build["cuda_architectures"]
    assert isinstance(architectures, list)
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if not covers(architectures, capability):
            name = ".".join(map(str, capability))
            yield Finding(
                f"cuda:{index} has compute capability {name}, which was not built for.",
                "reinstall from the sources with SPECTRAIN_ARCHS=native, or where this GPU cannot "
                f'be seen with TORCH_CUDA_ARCH_LIST="{name}"',
            )
    if torch.cuda.is_available():
        try:
            _C.require_cuda()
        except RuntimeError as error:
            yield Finding(
                f"torch uses CUDA, this package cannot: {error}.",
                "update the driver, or build with a CUDA toolkit older than "
                f"{_plain(build['cuda_compiler'])}",
            )


def _torch_findings() -> Iterator[Finding]:
    there, visible = _has_gpu(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        where = ", although the machine has an NVIDIA device" if there else ""
        yield Finding(
            f"This torch is a CPU build{where}.",
            ("" if there else "for a GPU: ")
            + "install a CUDA build of torch 2.10 or newer (with make: TORCH_INDEX=<its index>)",
            there,
        )
    elif torch.cuda.is_available():
        return
    elif there and visible in ("", "-1"):
        yield Finding(
            f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU.", "unset it to use them", False
        )
    else:
        yield Finding(
            "torch is a CUDA build but sees no CUDA device.",
            f"the driver may be older than torch's CUDA {torch.version.cuda}: update it, or "
            "install a torch for an older CUDA"
            if there
            else "for a GPU: install NVIDIA's driver and check that nvidia-smi works",
            there,
        )


def _stream_findings() -> Iterator[Finding]:
    """Settings that make streams, or ranks that use NCCL, wait for one another."""
    gpus = torch.cuda.device_count()
    settings = {name: os.environ.get(name, default) for name, default in _CUDA_SETTINGS.items()}
    if gpus and settings["CUDA_DEVICE_MAX_CONNECTIONS"] == "1":
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue: predictions, "
            "copies and messages do not run beside computation.",
            "CUDA_DEVICE_MAX_CONNECTIONS=32; Megatron-LM's advice of 1 is for tensor parallelism",
        )
    if gpus < 2 or not dist.is_nccl_available():
        return
    if settings["CUDA_LAUNCH_BLOCKING"] == "1":
        yield Finding(
            "CUDA_LAUNCH_BLOCKING=1: ranks that send by NCCL wait for one another forever.",
            "unset it, or look for the error in one process",
        )
    if settings["CUDA_MODULE_LOADING"] != "EAGER":
        yield Finding(
            "CUDA loads kernels when they are first launched, which may wait for messages of NCCL "
            "that wait for this rank.",
            "CUDA_MODULE_LOADING=EAGER for processes with a GPU each, or run a forward and a "
            "backward of each stage before its DistributedPipeline is made",
            False,  # the default, and harmless where each process uses one GPU without NCCL
        )


def _other_findings() -> Iterator[Finding]:
    if crowd := crowded():
        yield Finding(*crowd)
    elif crowd := disturbed():  # passes with the other work
        yield Finding(*crowd, False)
    if find_spec("matplotlib") is None:
        yield Finding(
            "matplotlib is not installed: the pictures of 'spectrain timeline' and 'plan' need it.",
            "pip install 'spectrain_ext[pictures]'",
            False,
        )


def _has_gpu() -> bool:
    return torch.cuda.device_count() > 0 or any(map(os.path.exists, _DRIVER_FILES))


def _plain(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return value


def _print_rows(console: Console, title: str, rows: Mapping[str, str]) -> None:
    console.print(title, style="bold")
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        console.print(f"  {name:<{width}}  {text}")


def _print_findings(
    console: Console, title: str, listed: Sequence[Finding], color: str, before: str = ""
) -> None:
    if listed:
        console.print(title, style="bold")
    for what, remedy, _ in listed:
        text = Text.assemble("  ", ("-", color), f" {what}\n    ", (before, "dim"), remedy)
        console.print(text, soft_wrap=True)


def installed(*packages: str) -> dict[str, str]:
    by_name = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.machine()  # processor() may start uname
    if "cpu family" in fields:
        name += f", family {fields['cpu family']} model {fields.get('model', '?')}"
    return name


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
