"""Records device, driver, versions and date, which figures are meaningless without."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from .scale import ROOT

_PACKAGES = ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numpy", "pytest", "hypothesis")
#: Variables that change figures, recorded with them.
_VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NCCL_MAX_CTAS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
)
_TOOLS = {
    "nvidia-smi": [
        "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit",
        "--format=csv,noheader",
    ],
    "nvcc": ["--version"],
    "compute-sanitizer": ["--version"],
    "git": ["-C", str(ROOT), "rev-parse", "HEAD"],
}


def environment() -> dict[str, Any]:
    """Return what is available without the package and without using the device."""
    info: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            info[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    info |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    for tool, arguments in _TOOLS.items():
        info[tool] = _says(tool, arguments)
    return info


def gpus() -> int:
    """Return the number of GPUs that the driver shows to this process, without torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    listed = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else min(listed, len([v for v in visible.split(",") if v]))


def _says(tool: str, arguments: Sequence[str]) -> str | None:
    if shutil.which(tool) is None:
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{type(e).__name__}: {e}"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


def gpu() -> dict[str, Any]:
    """Return torch's properties of the devices; the first one stands for all."""
    import torch

    info: dict[str, Any] = {"torch_cuda": torch.version.cuda, "count": torch.cuda.device_count()}
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        info |= {
            "name": p.name,
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "l2_bytes": getattr(p, "L2_cache_size", None),
        }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        info["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return info
