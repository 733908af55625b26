"""What gpu_suite.py measures on the device: operators, pipeline, and a small set for sanitizers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Where everything is measured; a test rehearses it on the CPU.
DEVICE = "cuda"
#: Elements of the workloads, as powers of two: the largest, of many tensors, small ones.
EXPONENTS = (28, 26, 22, 18)
#: Tensors of the workloads of many.
COUNTS = (300, 3000)
MODELS = ("ResNet-50", "GPT-2 124M")
CASE_S, SAMPLE_S = 0.4, 2e-3


def part_operators(out: Path, budget_s: float) -> None:
    """Every operator and its rivals, the largest tensors first: rotating buffers, graph replay."""
    from spectrain_ext.benchmark.engine import Settings, measure
    from spectrain_ext.benchmark.operations import ADAMW_2, OPERATIONS, SGD_2, STAGE
    from spectrain_ext.benchmark.report import Report
    from spectrain_ext.benchmark.workloads import BF16, MIXED, model, synthetic

    end = time.monotonic() + budget_s
    small = EXPONENTS[-1]
    main = [ADAMW_2, SGD_2, STAGE]
    rest = [op for op in OPERATIONS if op not in main]
    largest = synthetic((1,), EXPONENTS[:1])
    steps = [  # in order of importance
        (main, largest, True),
        (rest, largest, False),
        (OPERATIONS, synthetic(COUNTS[:1], (EXPONENTS[1], small)), False),
        (main, synthetic((1,), EXPONENTS[:1], MIXED), False),
        (main, synthetic((1,), EXPONENTS[:1], BF16), False),
        (main, [model(name) for name in MODELS], False),
        (OPERATIONS, synthetic((1, COUNTS[1]), EXPONENTS[2:]), False),
    ]
    report: Report | None = None
    for operations, workloads, compiles in steps:
        settings = Settings(DEVICE, case_s=CASE_S, sample_s=SAMPLE_S, compile=compiles, until=end)
        part = measure(operations, workloads, settings, lambda name: print(name, flush=True))
        if report is None:
            report = part
        else:
            report.rows += part.rows
            report.left_out += part.left_out
        # After every step: what was measured survives a step that runs out of time.
        (out / "operators.json").write_text(report.to_json())


def part_pipeline(out: Path) -> None:
    """Four stages on one GPU: the host's own cost per action, with no GPU work worth mentioning."""
    import bench_pipeline as bp
    import torch
    from table import as_json, summarize

    rows, costs = [], {}
    width = 16
    batches = bp.make_batches(width, DEVICE)

    def times(call: Callable[[], object]) -> list[float]:
        for _ in range(3):
            call()
        seconds = []
        for _ in range(15):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)

    group = f"{bp.STAGES} stages on one GPU, width {width}, {bp.MINIBATCHES} minibatches"
    stages = bp.make_stages(width, DEVICE)
    base = times(lambda: bp.modules_only(stages, batches))
    rows.append(summarize(group, "modules", base))
    for method in bp.METHODS:
        pipe = bp.make_pipeline(bp.make_stages(width, DEVICE), method, devices=[DEVICE] * bp.STAGES)
        got = times(lambda pipe=pipe: bp.run(pipe, batches))  # type: ignore[misc]
        rows.append(summarize(group, f"pipeline, {method}", got))
        middle = len(got) // 2
        costs[method] = (got[middle] - base[len(base) // 2]) / bp.ACTIONS * 1e6
        pipe.release()
    data = {"rows": as_json(rows), "own_cost_us_per_action": costs, "actions": bp.ACTIONS}
    (out / "pipeline.json").write_text(json.dumps(data, indent=1))


def _small_adam(w: list[Any], m: list[Any], g: list[Any], outs: list[Any]) -> None:
    """AdamW and NAdam with predictions under the linear law and Adam's loop."""
    import torch

    import spectrain_ext as st
    from spectrain_ext.numbers import Adam

    u = [torch.zeros_like(t) for t in m]
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
    adamw = Adam(1e-3, (0.9, 0.999), 1e-8, 0.01, 1, True)
    nadam = Adam(1e-3, (0.9, 0.999), 1e-8, 0.0, 2, momentum_decay=4e-3, mu_product=0.8)
    plan.step_adam_([adamw], [2.0, st.laws.Geometric(3)])
    plan.step_adam_([nadam], [2.0])
    plan.predict_with([adamw], 2.0, out=1)
    plan.predict_with([adamw], st.laws.Geometric(2))


def part_small() -> None:
    """Every kernel once, on sizes and alignments that walk its tails: for the sanitizers."""
    import torch

    import spectrain_ext as st

    torch.manual_seed(0)
    geometric = st.laws.Geometric(3)
    pairs = [(d, d) for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
    pairs += [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
    sizes = [1, 3, 8, 257, 4095, 4096, 4097, 20011]
    for wt, vt in pairs:
        for offset in (0, 1):

            def stream(dtype: torch.dtype, shift: int = offset) -> list[torch.Tensor]:
                return [torch.randn(n + shift, device=DEVICE).to(dtype)[shift:] for n in sizes]

            w, g, kept, out0, out1 = (stream(wt) for _ in range(5))
            v = stream(vt, 0)
            plan_ = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out0, out1])
            plan_.predict(lr=0.1, steps=2.0)
            plan_.predict_(lr=0.1, steps=2.0)
            plan_.stash_predict_(lr=0.1, steps=2.0)
            plan_.swap_()
            plan_.restore_()
            plan_.extrapolate(steps=2.0)
            plan_.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0, 0.0])
            plan_.sgd_step_(lr=0.1, momentum=0.9, nesterov=True, ema=True, predict=[geometric])
            plan_.sgd_step_(lr=0.1, momentum=0.0, weight_decay=0.1)
            _small_adam(w, v, g, [out0, out1])
            if wt in (torch.float16, torch.bfloat16) and vt == torch.float32:  # a float32 master
                master = stream(torch.float32, offset)
                _small_adam(master, v, g, [out0, out1])
                mixed = st.Plan(master, momentum_buffers=v, grads=g, outs=[out0, out1])
                mixed.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0, 1.0])
                mixed.predict(lr=0.1, steps=2.0, out=1)
                mixed.write_out()
    many = [[torch.randn(7, device=DEVICE) for _ in range(COUNTS[1])] for _ in range(2)]
    st.predict_(many[0], many[1], lr=0.1, steps=1.0)
    torch.cuda.synchronize()
    print("every kernel ran")
