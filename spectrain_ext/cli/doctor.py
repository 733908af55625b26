"""``spectrain doctor``: what was built, what this machine has, what is missing and its remedy."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from importlib.util import find_spec

import click
import torch
from rich.console import Console
from rich.table import Table

import spectrain_ext
from spectrain_ext import _C

BuildInfo = Mapping[str, str | bool | list[str]]


@click.command()
def doctor() -> None:
    """Say what was built, what this machine has, and what is missing."""
    console = Console()
    build = _C.build_info()
    _print_rows(console, "Versions", versions())
    _print_rows(console, "Build", {key.replace("_", " "): _plain(build[key]) for key in build})
    _print_rows(console, "Devices", devices())
    if torch.cuda.device_count() > 1:
        console.print(peer_access())
    findings = problems(build)
    if findings:
        console.print("[bold]Missing[/]")
        for what, remedy in findings:
            console.print(
                f"  [yellow]-[/] {what}\n    [dim]remedy:[/] {remedy}",
                highlight=False,
                soft_wrap=True,
            )
    else:
        console.print("[bold green]Nothing is missing.[/]")


def versions() -> dict[str, str]:
    """Return the versions of the package and of what it meets at run time."""
    found = {
        "spectrain_ext": spectrain_ext.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
    }
    for name in ("numpy", "scikit-learn", "matplotlib", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> dict[str, str]:
    """Return one line per device that torch can use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": f"{cores} cores to use, torch runs {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def peer_access() -> Table:
    """Return which CUDA device reaches which other one's memory directly."""
    count = torch.cuda.device_count()
    table = Table(title="Peer access", title_justify="left")
    table.add_column("from \\ to")
    for target in range(count):
        table.add_column(f"cuda:{target}", justify="center")
    for source in range(count):
        cells = [
            "-"
            if source == target
            else ("yes" if torch.cuda.can_device_access_peer(source, target) else "no")
            for target in range(count)
        ]
        table.add_row(f"cuda:{source}", *cells)
    return table


def problems(build: BuildInfo) -> list[tuple[str, str]]:
    """Return what does not work here, each with its remedy, most important first."""
    found = []
    has_gpu = _has_nvidia_device()
    if not build.get("cuda"):
        found.append(
            (
                "The CUDA half of this package was not built: CPU tensors only.",
                "with a CUDA toolkit (nvcc on PATH, or CUDA_HOME) reinstall under "
                "SPECTRAIN_CUDA=1, which makes a missing compiler an error",
            )
        )
    if torch.version.cuda is None:
        found.append(
            (
                "This torch is a CPU build"
                + (", although the machine has an NVIDIA device." if has_gpu else "."),
                "install a CUDA build of torch 2.10 or newer (with make: TORCH_INDEX=<its index>)",
            )
        )
    elif not torch.cuda.is_available():
        found.append(
            (
                "torch is a CUDA build but sees no CUDA device.",
                "install NVIDIA's driver, check that nvidia-smi works and that "
                "CUDA_VISIBLE_DEVICES is not empty"
                if not has_gpu
                else "the driver may be older than torch's CUDA "
                f"{torch.version.cuda}: update it, or install a torch for an older CUDA",
            )
        )
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            found.append(
                (
                    f"{package} is not installed: 'spectrain train' needs it.",
                    "pip install 'spectrain_ext[train]'",
                )
            )
    return found


def _has_nvidia_device() -> bool:
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


def _plain(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return value


def _print_rows(console: Console, title: str, rows: Mapping[str, str]) -> None:
    console.print(f"[bold]{title}[/]")
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        console.print(f"  {name:<{width}}  {text}", highlight=False, markup=False)
