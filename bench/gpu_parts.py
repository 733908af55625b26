"""What gpu_suite.py measures on the device: operators, pipeline, and a small set for sanitizers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: Where everything is measured; a test rehearses it on the CPU.
DEVICE = "cuda"


def sets_needed(nbytes: int, l2_bytes: int, free_bytes: int) -> int:
    """How many sets of buffers to rotate so that none is in the L2 cache when its turn comes."""
    wanted = max(2, -(-4 * l2_bytes // max(1, nbytes)) + 1)
    return max(1, min(wanted, int(0.6 * free_bytes) // max(1, nbytes), 64))


def time_on_gpu(calls: Sequence[Callable[[], object]], *, repeat: int, per: int) -> list[float]:
    """Seconds per call from CUDA events, ``per`` calls between two events, taking turns."""
    import torch

    turn = 0
    for call in calls:
        call()
    torch.cuda.synchronize()
    events = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(per):
            calls[turn % len(calls)]()
            turn += 1
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 / per for a, b in events]


def part_operators(out: Path, budget_s: float) -> None:
    """Every operator and its rivals, with rotating buffers larger than the L2 cache."""
    import torch
    from cases import SIXTEEN_BIT, TRAFFIC, WORKLOADS, build, bytes_moved, copies, implementations
    from table import as_json, summarize

    end = time.monotonic() + budget_s
    p = torch.cuda.get_device_properties(0)
    l2 = getattr(p, "L2_cache_size", 0) or 2**26
    free, _ = torch.cuda.mem_get_info()
    ceiling, source = 0.0, ""
    elements = min(2**28, free // 32)
    for name, call in copies(elements, DEVICE).items():
        times = sorted(time_on_gpu([call], repeat=20, per=1))
        rate = 8 * elements / times[len(times) // 2] / 1e9
        if rate > ceiling:
            ceiling, source = rate, name
    rows, left_out = [], []
    for work in [*WORKLOADS, SIXTEEN_BIT]:
        torch.cuda.empty_cache()
        one = build(work, DEVICE)
        free, _ = torch.cuda.mem_get_info()
        count = sets_needed(one.nbytes, l2, free + one.nbytes)
        sets = [one, *(build(work, DEVICE) for _ in range(count - 1))]
        for operator in TRAFFIC:
            if time.monotonic() > end:
                left_out.append(f"{operator}, {work.name}: no time left")
                continue
            tables = [implementations(operator, s) for s in sets]
            for name in tables[0]:
                per = 1 if work.elements > 2**22 else 10
                times = time_on_gpu([t[name] for t in tables], repeat=40, per=per)
                group = f"{operator}, {work.name}"
                rows.append(summarize(group, name, times, bytes_moved(operator, work), ceiling))
        del one, sets
    data = {
        "rows": as_json(rows),
        "best_copy_gb_per_s": ceiling,
        "best_copy": source,
        "left_out": left_out,
        "how": "CUDA events; buffers rotate so that four times the L2 cache lies between two uses",
    }
    (out / "operators.json").write_text(json.dumps(data, indent=1))


def part_pipeline(out: Path) -> None:
    """Four stages on one GPU: the host's own cost per action, with no GPU work worth mentioning."""
    import bench_pipeline as bp
    import torch
    from table import as_json, summarize

    import spectrain_ext as st

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
    for method in st.methods():
        pipe = bp.make_pipeline(bp.make_stages(width, DEVICE), method, devices=[DEVICE] * bp.STAGES)
        got = times(lambda pipe=pipe: bp.run(pipe, batches))  # type: ignore[misc]
        rows.append(summarize(group, f"pipeline, {method}", got))
        middle = len(got) // 2
        costs[method] = (got[middle] - base[len(base) // 2]) / bp.ACTIONS * 1e6
        pipe.release()
    data = {"rows": as_json(rows), "own_cost_us_per_action": costs, "actions": bp.ACTIONS}
    (out / "pipeline.json").write_text(json.dumps(data, indent=1))


def part_small() -> None:
    """Every kernel once, on sizes and alignments that walk its tails: for the sanitizers."""
    import torch

    import spectrain_ext as st

    torch.manual_seed(0)
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
            plan_.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0, 0.0])
            plan_.sgd_step_(lr=0.1, momentum=0.0, weight_decay=0.1)
    many = [[torch.randn(7, device=DEVICE) for _ in range(3000)] for _ in range(2)]
    st.predict_(many[0], many[1], lr=0.1, steps=1.0)
    torch.cuda.synchronize()
    print("every kernel ran")
