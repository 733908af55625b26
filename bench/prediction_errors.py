"""Measures how far predicted and stale weights are from the actual later weights in a pipeline.

As in the figure of the paper (SpecTrain, arXiv 1809.02839): after update t of a stage, every law
predicts its weights s updates ahead; after update t + s, the predictions and the weights of t are
compared with the actual weights. A root-mean-square error is `st.distance` divided by the root of
the number of elements. The measurement does not change a bit of the training.

    python bench/prediction_errors.py --data-dir tinyshakespeare.txt --json errors.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import root  # noqa: F401  # finds studies
import torch
from rivals.machine import environment, save
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.pipeline.losses import Result
from spectrain_ext.pipeline.passes import Handler
from spectrain_ext.pipeline.stage_run import StageRun
from spectrain_ext.schedule import Kind
from spectrain_ext.weights import StageWeights
from studies.builtin import maker_of
from studies.contenders import STUDIES
from studies.pipelines import build_pipeline
from studies.settings import TrainSettings, settle
from studies.workload import epochs_of, stages_in

HORIZONS = (1, 2, 3, 7, 15)
#: Laws that an optimizer's step can write. The second-order law is without its lead, which aims
#: further ahead.
STEPPED: dict[str, Callable[[int], Any]] = {
    "linear": st.laws.Linear,
    "geometric": st.laws.Geometric,
    "second-order": st.laws.SecondOrder,
}
LAWS = ("stale", *STEPPED, "difference")
_OUTS = 8  # predictions of one step

#: The residual MLP with SGD as in `studies train`, and the study's transformer with AdamW. The
#: rates are constant, so that only the later gradients are unknown. The text's rate is the best of
#: eight stages with one microbatch each (docs/frontier.md): at twice that rate they are unstable.
TRAINED: dict[str, dict[str, Any]] = {
    "digits": {**STUDIES["digits"].settings, "lr": 0.05},
    "text": {**STUDIES["text"].settings, "warmup": 0, "lr": 0.0005},
}
#: (method, microbatches by number of stages)
METHODS: dict[str, Callable[[int], int]] = {"spectrain": lambda n: 1, "auto": lambda n: n}


class Error(NamedTuple):
    """The error of a law's prediction from one update, some updates later."""

    stage: int
    update: int
    ahead: int
    law: str
    norm: float


class Errors(st.Observer):
    """Measures on every stage, on the CPU, every ``every`` updates from the second on.

    Stages must have one parameter group and an optimizer of ``st.optim`` with momentum, but not
    NAdam.

    Attributes:
        found: errors in the order of the updates.
        elements: weights per stage.
        losses: losses of the run's minibatches.
    """

    def __init__(self, horizons: Sequence[int] = HORIZONS, every: int = 1) -> None:
        self.found: list[Error] = []
        self.elements: dict[int, int] = {}
        self.losses: list[float] = []
        self._horizons, self._every = horizons, every

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        stage = run.stage
        if stage.weights is None:
            return handlers
        weights, update = stage.weights, handlers[Kind.UPDATE]
        self.elements[stage.index] = sum(p.numel() for p in weights.params)
        made = 0
        due: dict[int, list[tuple[int, int, dict[str, list[Tensor]]]]] = {}

        def watched(i: int, j: int) -> None:
            nonlocal made
            look = made and made % self._every == 0
            ahead = predictions(weights, self._horizons) if look else {}
            update(i, j)
            made += 1
            now = _true(weights)
            for s, versions in ahead.items():
                # The step on copies equals the actual step: predictions start there.
                assert all(map(torch.equal, versions["stale"], now)), "another step than the run's"
                due.setdefault(made + s, []).append((made, s, versions))
            for update_, s, versions in due.pop(made, []):
                _, norms = st.distance(now, list(versions.values()))
                self.found += [
                    Error(stage.index, update_, s, law, norm)
                    for law, norm in zip(versions, norms.tolist(), strict=True)
                ]

        return {**handlers, Kind.UPDATE: watched}

    def result(self, result: Result) -> None:
        self.losses.append(result.loss.item())


def predictions(
    weights: StageWeights, horizons: Sequence[int]
) -> dict[int, dict[str, list[Tensor]]]:
    """Return the weights after the next update, and each law's predictions.

    Returns:
        Weights by horizon and by law in ``LAWS``.
    """
    before = _true(weights)
    wanted = list(product(horizons, STEPPED))
    found: dict[int, dict[str, list[Tensor]]] = {s: {} for s in horizons}
    for first in range(0, len(wanted), _OUTS):
        some = wanted[first : first + _OUTS]
        outs = [[torch.empty_like(w) for w in before] for _ in some]
        laws = [STEPPED[law](s) for s, law in some]
        after = _stepped(weights, before, list(zip(laws, outs, strict=True)))
        for (s, law), out in zip(some, outs, strict=True):
            found[s]["stale"] = after
            found[s][law] = out
    for s in horizons:
        found[s]["difference"] = st.extrapolate(found[s]["stale"], before, steps=s)
    return found


def _stepped(
    weights: StageWeights, before: Sequence[Tensor], predict: list[tuple[Any, list[Tensor]]]
) -> list[Tensor]:
    """Return copies of the weights after a step of the stage's optimizer with predictions."""
    optimizer, params = weights.optimizer, weights.params
    (group,) = optimizer.param_groups
    after = [w.clone() for w in before]
    gradients = [None if p.grad is None else p.grad.detach() for p in params]

    def state(key: str) -> list[Tensor]:
        return [optimizer.state[p][key].clone() for p in params]

    rate = group["lr"] * weights.rate_factor
    shared = {"lr": rate, "weight_decay": group["weight_decay"], "predict": predict}
    if "betas" in group:
        st.adam_step_(
            *(after, gradients, state("exp_avg"), state("exp_avg_sq")),
            step=int(optimizer.state[params[0]]["step"]) + 1,
            betas=group["betas"],
            eps=group["eps"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            **shared,
        )
    else:
        st.sgd_step_(
            *(after, gradients, state("momentum_buffer")),
            **{key: group[key] for key in ("momentum", "dampening", "nesterov")},
            **shared,
        )
    return after


def _true(weights: StageWeights) -> list[Tensor]:
    where = weights.true_weights()
    return [where[p].detach().clone() for p in weights.params]


# A run, and its summary


def settings_of(data: str, data_dir: Path | None, method: str, stages: int) -> TrainSettings:
    """Return the settings of one method, data set and depth."""
    asked = {"data": data, "lr_schedule": "constant", **TRAINED[data]}
    if data == "text":
        asked |= {"data_dir": data_dir, "depth": stages - 2}  # one block between embedding and head
    asked |= {"stages": stages, "microbatches": METHODS[method](stages), "methods": [method]}
    asked |= {"devices": ["cpu"], "epochs": 1000}
    return settle(asked)


def trained(settings: TrainSettings, seed: int, updates: int, every: int) -> Errors:
    """Train a pipeline and measure the errors."""
    torch.manual_seed(seed)
    method = find_method(settings.methods[0])
    workload = maker_of(settings, Path("."))(settings, method, settings.stages, seed)
    modules = stages_in(workload, settings.stages)
    pipe = build_pipeline(settings, method, workload, modules)
    errors = Errors(every=every)
    batches = epochs_of(workload.train, settings.epochs)
    for _ in pipe.run(islice(batches, updates), trace=errors):
        pass
    pipe.release()
    return errors


def rmse(errors: Sequence[Error], elements: Mapping[int, int]) -> float:
    """Return the root mean square over all stages and updates with errors."""
    squares = sum(error.norm**2 for error in errors)
    return math.sqrt(squares / sum(elements[error.stage] for error in errors))


def summary(runs: Sequence[Errors]) -> Iterator[dict[str, Any]]:
    """Return a row per horizon and law: each stage over the run, means over the runs and ranges."""
    for s, law in product(HORIZONS, LAWS):
        of = [(run, [e for e in run.found if (e.ahead, e.law) == (s, law)]) for run in runs]
        columns = [
            [rmse([e for e in errors if e.stage == k], run.elements) for run, errors in of]
            for k in runs[0].elements
        ]
        kinds = {"mean": statistics.fmean, "low": min, "high": max}
        stages = {
            name: [float(f"{of_seeds(each):.3g}") for each in columns]
            for name, of_seeds in kinds.items()
        }
        yield {"ahead": s, "law": law, "stages": stages}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--data-dir", type=Path, help="the text; without it only digits are trained"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--every", type=int, default=12, help="updates between measurements")
    parser.add_argument("--quick", action="store_true", help="four stages, one seed, 60 updates")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args(argv)
    if a.quick:
        a.stages, a.seeds, a.updates, a.every = [4], 1, 60, 6
    torch.set_num_threads(1)
    asked = f"--stages {' '.join(map(str, a.stages))} --seeds {a.seeds} --updates {a.updates}"
    command = f"bench/prediction_errors.py --data-dir tinyshakespeare.txt {asked}"
    document: dict[str, Any] = {"command": command, "environment": environment()}
    document |= {"updates": a.updates, "seeds": a.seeds, "horizons": HORIZONS, "laws": LAWS}
    document["cases"] = []
    for data, n, method in product(TRAINED, a.stages, METHODS):
        if data == "text" and a.data_dir is None:
            continue
        began = time.perf_counter()
        settings = settings_of(data, a.data_dir, method, n)
        few = -(-a.updates // 20)
        runs = [trained(settings, seed, a.updates, a.every) for seed in range(a.seeds)]
        case = {
            **{"data": data, "optimizer": settings.optimizer, "lr": settings.lr},
            **{"batch_size": settings.batch_size, "method": method, "stages": n},
            **{"microbatches": settings.microbatches, "elements": list(runs[0].elements.values())},
            "measured": sorted({e.update for e in runs[0].found if e.ahead == HORIZONS[0]}),
            # for every seed, over the first and the last twentieth of the run
            "losses": [
                [round(statistics.fmean(part), 4) for part in (r.losses[:few], r.losses[-few:])]
                for r in runs
            ],
            "rows": list(summary(runs)),
        }
        document["cases"].append(case)
        print(f"{data} N={n} {method}: {time.perf_counter() - began:.0f} s", flush=True)
        for row in case["rows"]:
            print(row["ahead"], row["law"], row["stages"]["mean"])
    if a.json is not None:
        save(a.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
