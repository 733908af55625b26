"""Measures the memory and time of prediction and stashing per stage, next to the counted ones.

Memory: the storages of all tensors that are alive while the pipeline is full, except gradients and
optimizer state, against the weight versions in the schedule's ledger. Stages differ slightly in
size, so that a storage identifies its stage.

Time: updates and weight loads in real runs, relative to a plain update (method sync). Methods take
turns in rounds of a few minibatches, and a ratio compares values of one round. Bytes are counted
from the requests to the stage's weight storage.

    python bench/bench_cost.py --json cost.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from rivals.machine import environment, save
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.method import rules_at
from spectrain_ext.pipeline.passes import Handler
from spectrain_ext.pipeline.stage_run import StageRun
from spectrain_ext.schedule import Kind
from spectrain_ext.tools.simulation import streams, validate
from spectrain_ext.weights.storage import ALIGNMENT

STAGES = 4
#: (method, microbatches); the first is the baseline.
CASES = (
    *(("sync", 1), ("vanilla", 1), ("pipedream", 1), ("spectrain", 1), ("spectrain-stash", 1)),
    *(("pipedream-2bw", STAGES), ("auto", 1), ("auto", STAGES)),
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: st.optim.SGD(params, lr=1e-4, momentum=0.9),
    "adamw": lambda params: st.optim.AdamW(params, lr=1e-5),
}
#: Weight-sized values that a pass reads or writes, per parameter. A step: gradient, state and
#: weights, and state and weights again. A prediction from the master weights: weights, state, and
#: the result.
_STEP = {"sgd": 5, "adamw": 7}
_PREDICT = {"sgd": 3, "adamw": 4}
_COPY = 2
_NAMES = {
    **dict.fromkeys((Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD), "loads"),
    **dict.fromkeys((Kind.FORWARD, Kind.LOSS, Kind.BACKWARD), "compute"),
    Kind.UPDATE: "update",
}


def stages_of(width: int) -> list[nn.Module]:
    """Return stages of about ``width`` squared parameters each, all of different sizes."""
    torch.manual_seed(0)
    widths = [width + 32 * k for k in range(STAGES + 1)]
    # Not ReLU: the momentum of a unit that is always off decays into slow subnormals.
    return [nn.Sequential(nn.Linear(a, b, bias=False), nn.Tanh()) for a, b in pairwise(widths)]


def pipeline_of(method: str, microbatches: int, optimizer: str, width: int) -> st.Pipeline:
    """Return a pipeline with the settings of this benchmark."""
    make = OPTIMIZERS[optimizer]
    modules = stages_of(width)
    return st.Pipeline(modules, make, nn.functional.mse_loss, method, microbatches=microbatches)


def batches_of(width: int, batch: int, stages: int = STAGES) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches endlessly."""
    torch.manual_seed(0)
    last = width + 32 * stages
    return cycle([(torch.randn(batch, width), torch.randn(batch, last)) for _ in range(4)])


# Memory


def memory(pipe: st.Pipeline, width: int) -> list[dict[str, int]]:
    """Compare counted and actual memory of every stage in a full pipeline.

    Call ``gc.freeze()`` first, to hide tensors that already exist.

    Returns:
        ``parameters``, ``counted_versions`` and ``counted_bytes`` from the ledger, ``buffers``
        found, ``measured_bytes`` of their storages including alignment, ``state_bytes``.
    """
    m = pipe.places[0].microbatches
    run = pipe.run(batches_of(width, m, len(pipe.places)))
    for _ in range(4 * STAGES):
        next(run)
    weights = [next(module.parameters()) for module in pipe.children()]
    windows = [place.window for place in pipe.places]
    rules = [
        rules_at(pipe.method, place, optimizer)
        for place, optimizer in zip(pipe.places, pipe.optimizers, strict=True)
    ]
    counts = validate(
        streams(pipe.method.schedule, windows, m),
        minibatches=24,
        microbatches=m,
        windows=windows,
        rules=rules,
    )
    state = [
        [t for t in optimizer.state[p].values() if torch.is_tensor(t) and t.dim()]
        for p, optimizer in zip(weights, pipe.optimizers, strict=True)
    ]
    others = [
        *(t for kept in state for t in kept),
        *(gradient for stage in pipe._wires.stages for _, gradient in stage._aside),
        # those that an update has just read, while streams are checked
        *(
            gradient
            for run in pipe._training.stages
            if run._updates._gradients_read is not None
            for gradient in run._updates._gradients_read[1]
            if gradient is not None
        ),
    ]
    hidden = {t.untyped_storage().data_ptr() for t in others}
    alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
    found = []
    for p, count, kept in zip(weights, counts, state, strict=True):
        sizes = [
            size
            for where, size in alive.items()
            if where not in hidden and p.nbytes <= size <= p.nbytes + ALIGNMENT
        ]
        found.append(
            {
                "parameters": p.numel(),
                "counted_versions": count.versions,
                "counted_bytes": count.versions * p.nbytes,
                "buffers": len(sizes),
                "measured_bytes": sum(sizes),
                "state_bytes": sum(t.nbytes for t in kept),
            }
        )
    run.close()
    return found


def _tensors() -> Iterator[Tensor]:
    return (found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter))


# Bytes


class Moved(st.Observer):
    """Counts the values requested from the stages' weight storage, per parameter and minibatch.

    Attributes:
        words: for every stage, by "update" and "loads", from the minibatch on in which it is full.
        minibatches: number of counted minibatches.
    """

    def __init__(self, optimizer: str, full: int) -> None:
        self.words: dict[int, Counter[str]] = {}
        self.minibatches: Counter[int] = Counter()
        self._optimizer, self._full = optimizer, full

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        stage = run.stage
        assert stage.weights is not None and stage.weights.storage is not None
        weights, storage, k = stage.weights, stage.weights.storage, stage.index
        words = self.words[k] = Counter()
        seen: Counter[str] = Counter()
        now = "loads"

        def counted(owner: object, name: str, of: Callable[..., int]) -> None:
            real = getattr(owner, name)

            def call(*arguments: Any, **more: Any) -> Any:
                seen[now] += of(*arguments, **more)
                return real(*arguments, **more)

            setattr(owner, name, call)

        counted(storage, "write", self._written)
        counted(weights.updater, "step", self._stepped)
        update = handlers[Kind.UPDATE]

        def updated(i: int, j: int) -> None:
            nonlocal now
            now = "update"
            update(i, j)
            now = "loads"
            if i >= self._full:
                words.update(seen)
                self.minibatches[k] += 1
            seen.clear()

        return {**handlers, Kind.UPDATE: updated}

    def _stepped(self, factor: float = 1.0, write: Any = None) -> int:
        return _STEP[self._optimizer] + (write is not None)

    def _written(self, content: Any, buffer: Any) -> int:
        return _COPY if content.law is None else _PREDICT[self._optimizer]


def moved(method: str, microbatches: int, optimizer: str) -> list[dict[str, float]]:
    """Return bytes per parameter and minibatch of every stage of a full pipeline, in float32."""
    width, full, more = 32, 4 * STAGES, 12
    observer = Moved(optimizer, full)
    run = pipeline_of(method, microbatches, optimizer, width).run(
        batches_of(width, microbatches), trace=observer
    )
    for _ in range(full + more + STAGES):
        next(run)
    found = [
        {name: 4 * words[name] / observer.minibatches[k] for name in ("update", "loads")}
        for k, words in observer.words.items()
    ]
    run.close()
    return found


# Time


class Timed(st.Observer):
    """A pipeline on the CPU that runs some minibatches in each turn.

    Attributes:
        turns: for every turn and stage, seconds by name from update to update.
    """

    def __init__(self, pipe: st.Pipeline, width: int, batch: int) -> None:
        self.turns: list[list[list[dict[str, float]]]] = []
        self._run = pipe.run(batches_of(width, batch), trace=self)

    def turn(self, minibatches: int) -> None:
        self.turns.append([[] for _ in range(STAGES)])
        for _ in range(minibatches):
            next(self._run)

    def close(self) -> None:
        self._run.close()

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        seconds: dict[str, float] = dict.fromkeys(_NAMES.values(), 0.0)

        def around(kind: Kind, handler: Handler) -> Handler:
            name = _NAMES[kind]

            def timed(i: int, j: int) -> None:
                began = time.perf_counter()
                handler(i, j)
                seconds[name] += time.perf_counter() - began
                if kind is Kind.UPDATE:
                    self.turns[-1][run.stage.index].append(dict(seconds))
                    seconds.update(dict.fromkeys(seconds, 0.0))

            return timed

        return {
            kind: around(kind, handler) if kind in _NAMES else handler
            for kind, handler in handlers.items()
        }

    def round(self, turn: int) -> list[dict[str, float]]:
        """Return the medians of a turn for every stage."""
        return [
            {name: statistics.median(each[name] for each in windows) for name in windows[0]}
            for windows in self.turns[turn]
        ]


def timed(
    pipes: Sequence[st.Pipeline], width: int, batch: int, rounds: int, minibatches: int
) -> list[list[dict[str, Any]]]:
    """Return times of every pipeline and stage relative to a plain update of the same round.

    Returns:
        ``update_ms``, ``loads_ms``, ``compute_ms``: medians over rounds. ``update``, ``loads``,
        ``both``: median, minimum and maximum over rounds of the update, the loads and both,
        relative to a plain update. ``share``: the same for the excess of both over a plain update,
        relative to forward and backward.
    """
    runs = [Timed(pipe, width, batch) for pipe in pipes]
    for turn in range(rounds + 1):
        for run in runs:
            run.turn(minibatches if turn else 2 * STAGES)
    for run in runs:
        run.close()
    of = [[run.round(turn) for turn in range(1, rounds + 1)] for run in runs]
    found = []
    for each in of:
        stages = []
        for k in range(STAGES):
            mine, plain = [r[k] for r in each], [r[k]["update"] for r in of[0]]
            row: dict[str, Any] = {
                f"{name}_ms": round(1e3 * statistics.median(r[name] for r in mine), 3)
                for name in ("update", "loads", "compute")
            }
            pairs = list(zip(mine, plain, strict=True))
            row["update"] = _spread([r["update"] / p for r, p in pairs])
            row["loads"] = _spread([r["loads"] / p for r, p in pairs])
            row["both"] = _spread([(r["update"] + r["loads"]) / p for r, p in pairs])
            row["share"] = _spread(
                [(r["update"] + r["loads"] - p) / r["compute"] for r, p in pairs]
            )
            stages.append(row)
        found.append(stages)
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    kinds = {"median": statistics.median, "low": min, "high": max}
    return {name: round(of(values), 4) for name, of in kinds.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--width", type=int, default=2048, help="square root of a stage's parameters"
    )
    parser.add_argument("--batches", type=int, nargs=2, default=[16, 128], metavar=("B", "B"))
    parser.add_argument("--rounds", type=int, default=9, help="rounds of timing; 0: none")
    parser.add_argument("--minibatches", type=int, default=3, help="minibatches of a turn")
    parser.add_argument("--quick", action="store_true", help="stages of 2^16 parameters, 3 rounds")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args(argv)
    if a.quick:
        a.width, a.batches, a.rounds = 256, [4, 32], 3
    torch.set_num_threads(1)
    command = f"bench/bench_cost.py --width {a.width} --rounds {a.rounds}"
    document: dict[str, Any] = {"command": command, "environment": environment()}
    document |= {
        "stages": STAGES,
        "width": a.width,
        "alignment": ALIGNMENT,
        "rounds": a.rounds,
        "cases": [],
    }
    began = time.perf_counter()
    for optimizer in OPTIMIZERS:
        cases, pipes = [], []
        gc.collect()
        for method, m in CASES:
            gc.freeze()
            pipe = pipeline_of(method, m, optimizer, a.width)
            case: dict[str, Any] = {"optimizer": optimizer, "method": method, "microbatches": m}
            case["memory"] = memory(pipe, a.width)
            gc.unfreeze()
            case["bytes"] = moved(method, m, optimizer)
            case["time"] = {}
            pipes.append(pipe)
            cases.append(case)
        for batch in a.batches if a.rounds else ():
            times = timed(pipes, a.width, batch, a.rounds, a.minibatches)
            for case, stages in zip(cases, times, strict=True):
                case["time"][str(batch)] = stages
            print(f"{optimizer}, batch {batch}: {time.perf_counter() - began:.0f} s", flush=True)
        document["cases"] += cases
    for case in document["cases"]:
        print(case["optimizer"], case["method"], case["microbatches"])
        print("  memory", [(s["counted_bytes"], s["measured_bytes"]) for s in case["memory"]])
        print("  bytes ", [f"{s['update']:g} + {s['loads']:g}" for s in case["bytes"]])
        for batch, stages in case["time"].items():
            medians = [[s[name]["median"] for name in ("update", "loads", "share")] for s in stages]
            print(f"  {batch:>5} ", [f"{u:.2f} + {ls:.2f}, {of:.0%}" for u, ls, of in medians])
    if a.json is not None:
        save(a.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
