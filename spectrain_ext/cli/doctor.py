"""``spectrain doctor``: what was built, what there is, what is missing or does harm; remedies."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain_ext import _C
from spectrain_ext.threads import cores, crowded, disturbed

from .options import plain_console

BuildInfo = Mapping[str, str | bool | list[str]]
#: What CUDA reads when it starts in a process, and does where nothing is said.
_CUDA_SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "CUDA_MODULE_LOADING": "LAZY",
    "CUDA_LAUNCH_BLOCKING": "0",
}


@click.command(short_help="Say what was built, what there is, and what is missing.")
@click.option("--brief", is_flag=True, help="One line: what was built.")
def doctor(brief: bool) -> None:
    """Say what was built, what this machine has, and what is missing or does harm.

    Under torchrun also whether the threads of all processes have a core each.
    """
    console = plain_console()
    build: BuildInfo = _C.build_info()
    if brief:
        click.echo(summary(build))
        return
    _print_rows(console, "Versions", versions())
    if settings := environment():
        _print_rows(console, "Environment", settings)
    _print_rows(console, "Build", {key.replace("_", " "): _plain(build[key]) for key in build})
    _print_rows(console, "Devices", devices())
    if torch.cuda.device_count() > 1:
        console.print(peer_access())
    findings = problems(build)
    if findings:
        console.print("To be mended", style="bold")
        for what, remedy in findings:
            marks = ("-", "yellow"), ("remedy:", "dim")
            told = Text.assemble("  ", marks[0], f" {what}\n    ", marks[1], f" {remedy}")
            console.print(told, soft_wrap=True)
    else:
        console.print("Nothing is missing.", style="bold green")


def versions() -> dict[str, str]:
    return {
        "spectrain_ext": _C.build_info()["version"],
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        **({"NCCL": _nccl_version()} if dist.is_nccl_available() else {}),
        **installed("numpy", "scikit-learn", "matplotlib", "cupy-cuda13x", "cupy-cuda12x"),
    }


def environment() -> dict[str, str]:
    """Return the variables that decide how streams and messages run, as far as they matter here."""
    found = {
        name: os.environ.get(name, f"{default} (not set)")
        for name, default in _CUDA_SETTINGS.items()
        if name in os.environ or torch.cuda.is_available()
    }
    others = "NCCL_", "TORCH_NCCL_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    return found | {
        name: os.environ[name] for name in sorted(os.environ) if name.startswith(others)
    }


def summary(build: BuildInfo) -> str:
    cpu = f"CPU ({_plain(build['cpu_instruction_set'])})"
    if not build["cuda"]:
        return f"spectrain_ext was built for {cpu} only: no CUDA compiler was found or wanted"
    targets, why = _plain(build["cuda_architectures"]), _plain(build["cuda_architectures_why"])
    compiler = _plain(build["cuda_compiler"])
    return f"spectrain_ext was built for {cpu} and CUDA {compiler} ({targets}: {why})"


def devices() -> dict[str, str]:
    threads = f"torch runs {torch.get_num_threads()} threads"
    found = {"cpu": f"{cpu_name()}: {cores()} cores to use, {threads}"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def peer_access() -> Table:
    every = range(torch.cuda.device_count())
    table = Table(title="Peer access", title_justify="left")
    table.add_column("from \\ to")
    for target in every:
        table.add_column(f"cuda:{target}", justify="center")

    def reaches(source: int, target: int) -> str:
        if source == target:
            return "-"
        return "yes" if torch.cuda.can_device_access_peer(source, target) else "no"

    for source in every:
        table.add_row(f"cuda:{source}", *(reaches(source, target) for target in every))
    return table


def problems(build: BuildInfo) -> list[tuple[str, str]]:
    """Return what does not work here, each with its remedy, most important first."""
    threads = [crowd for crowd in (crowded() or disturbed(),) if crowd is not None]
    found = *_build_problems(build), *_torch_problems(), *_stream_problems()
    return [*found, *threads, *_extra_problems()]


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
        # sm_86 runs on later minor versions of its major one, but what is built for a discrete GPU
        # does not run on an integrated one.
        if built < capability and built[0] == capability[0] and not integrated:
            return True
    return False


def _build_problems(build: BuildInfo) -> Iterator[tuple[str, str]]:
    if not build["cuda"]:
        yield (
            "The CUDA half of this package was not built: CPU tensors only.",
            "with a CUDA toolkit (nvcc on PATH, or CUDA_HOME) reinstall under SPECTRAIN_CUDA=1, "
            "which makes a missing compiler an error",
        )
        return
    architectures = build["cuda_architectures"]
    assert isinstance(architectures, list)
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if not covers(architectures, capability):
            name = ".".join(map(str, capability))
            yield (
                f"cuda:{index} has compute capability {name}, which was not built for.",
                "reinstall from the sources with SPECTRAIN_ARCHS=native, or where this GPU cannot "
                f'be seen with TORCH_CUDA_ARCH_LIST="{name}"',
            )
    if torch.cuda.is_available():
        try:
            _C.require_cuda()
        except RuntimeError as error:
            yield (
                f"torch uses CUDA, this package cannot: {error}.",
                "update the driver, or build with a CUDA toolkit older than "
                f"{_plain(build['cuda_compiler'])}",
            )


def _torch_problems() -> Iterator[tuple[str, str]]:
    if torch.version.cuda is None:
        where = ", although the machine has an NVIDIA device" if _has_nvidia_device() else ""
        yield (
            f"This torch is a CPU build{where}.",
            "install a CUDA build of torch 2.10 or newer (with make: TORCH_INDEX=<its index>)",
        )
    elif not torch.cuda.is_available():
        yield (
            "torch is a CUDA build but sees no CUDA device.",
            f"the driver may be older than torch's CUDA {torch.version.cuda}: update it, or "
            "install a torch for an older CUDA"
            if _has_nvidia_device()
            else "install NVIDIA's driver, check that nvidia-smi works and that "
            "CUDA_VISIBLE_DEVICES is not empty",
        )


def _stream_problems() -> Iterator[tuple[str, str]]:
    """Settings under which streams wait for one another, or ranks forever."""
    gpus = torch.cuda.device_count()
    said = {name: os.environ.get(name, default) for name, default in _CUDA_SETTINGS.items()}
    if gpus and said["CUDA_DEVICE_MAX_CONNECTIONS"] == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue: predictions, "
            "copies and messages do not run beside computation.",
            "CUDA_DEVICE_MAX_CONNECTIONS=32; Megatron-LM's advice of 1 is for tensor parallelism",
        )
    if gpus < 2 or not dist.is_nccl_available():
        return
    if said["CUDA_LAUNCH_BLOCKING"] == "1":
        yield (
            "CUDA_LAUNCH_BLOCKING=1: ranks that send by NCCL wait for one another forever.",
            "unset it, or look for the error in one process",
        )
    if said["CUDA_MODULE_LOADING"] != "EAGER":
        yield (
            "CUDA loads kernels when they are first launched, which may wait for messages of NCCL "
            "that wait for this rank.",
            "CUDA_MODULE_LOADING=EAGER for processes with a GPU each, or run a forward and a "
            "backward of each stage before its DistributedPipeline is made",
        )


def _extra_problems() -> Iterator[tuple[str, str]]:
    if find_spec("matplotlib") is None:
        yield (
            "matplotlib is not installed: the pictures of 'spectrain timeline' and 'plan' need it.",
            "pip install 'spectrain_ext[pictures]'",
        )


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return ".".join(map(str, version))


def _has_nvidia_device() -> bool:
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


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


# What runs here.


def installed(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str:
    """As the system calls it, with family and model where they tell processors apart."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f", family {fields['cpu family']} model {fields.get('model', '?')}"
    return name


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
