"""Rivals that need a GPU and another package: CuPy's ElementwiseKernel, and Triton."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch

from .operations import LR, MOMENTUM, PREDICT, PREDICT_, SGD, SGD_1, SGD_2, STEPS, Call, Operation
from .workloads import Streams

COVERED = (PREDICT_, PREDICT, SGD, SGD_1, SGD_2)


def device_rivals(operation: Operation, s: Streams) -> dict[str, Call]:
    """Return calls by name: only on CUDA, only float32, only importable packages."""
    if s.device == "cpu" or operation not in COVERED or s.work.precision.name != "fp32":
        return {}
    calls: dict[str, Call] = {}
    if find_spec("cupy") is not None:
        calls["CuPy ElementwiseKernel"] = _cupy(operation, s)
    if find_spec("triton") is not None:
        calls["Triton"] = _triton(operation, s)
    return calls


def _cupy(operation: Operation, s: Streams) -> Call:
    cupy: Any = importlib.import_module("cupy")
    update = f"v = {MOMENTUM}f * v + g; w = w - {LR}f * v; "
    body = update if operation.steps else ""
    targets = "w" if operation is PREDICT_ else "op"[: operation.predictions]
    for steps, target in zip(STEPS, targets, strict=False):
        body += f"{target} = w - {LR * steps}f * v; "
    inputs = [x for x in operation.reads if x not in operation.writes]
    outputs = list(operation.writes)
    kernel = cupy.ElementwiseKernel(
        ", ".join(f"float32 {x}" for x in inputs) or "",
        ", ".join(f"float32 {x}" for x in outputs),
        body,
        f"spectrain_rival_{operation.predictions}_{int(operation.steps)}_{''.join(outputs)}",
    )
    rows = [
        tuple(cupy.asarray(s[x][i].view(-1)) for x in (*inputs, *outputs))
        for i in range(s.work.count)
    ]

    def run() -> None:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            for row in rows:
                kernel(*row)

    return run


def _triton(operation: Operation, s: Streams) -> Call:
    kernel = importlib.import_module("rivals._triton_kernel").kernel
    w, v = s["w"], s["v"]
    g = s["g"] if operation.steps else w
    outs = [s[x] for x in operation.writes if x in "op"]
    if operation is PREDICT_:
        outs = [w]
    first = outs[0] if outs else w
    second = outs[1] if len(outs) > 1 else w
    block = 1024
    numbers = LR, MOMENTUM, LR * STEPS[0], LR * STEPS[1]
    constants = {"STEP": operation.steps, "PREDICTIONS": len(outs), "BLOCK": block}

    def run() -> None:
        for i, weight in enumerate(w):
            n = weight.numel()
            if n:
                tensors = weight, v[i], g[i], first[i], second[i]
                kernel[(-(-n // block),)](*tensors, n, *numbers, **constants)

    return run
