"""Compares predictions for Muon: forecast errors, and training with delayed gradients.

A small transformer learns the characters of a text. Muon trains its hidden matrices, AdamW the
rest. Errors: after an update, every law predicts the hidden matrices s updates ahead; s updates
later, its distance from the actual weights is divided by the distance of the old weights. Training:
every gradient comes from weights predicted D updates ahead, by the same law for all parameters, and
is applied D updates later; each law uses its best learning rate.

    python bench/muon_laws.py --data-dir tinyshakespeare.txt --json laws.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import root  # noqa: F401  # finds studies
import torch
from rivals.machine import environment
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.optim.matrices import orthogonalized
from studies.data.batches import Batches
from studies.data.split import Split
from studies.data.text import load_text
from studies.models import gpt
from studies.workload import epochs_of, mean_loss

AHEAD = (1, 2, 4, 7)
#: "momentum" is the update after a gradient of zero; "whole" is the second-order law with the full
#: change of Muon's update, of which the package's law takes half.
LAWS = ("difference", "linear", "momentum", "whole", "second-order")
#: The best first, found with one seed.
RATES = {0: (0.008,), 1: (0.008, 0.004), 2: (0.004, 0.008), 4: (0.002, 0.004), 7: (0.001, 0.002)}
_WARMUP = 30


@dataclass(frozen=True)
class Whole:
    """The second-order law with the full last change."""

    delay: float

    def sgd(self, numbers: Any) -> list[Any]:  # for Muon's kernel the gradient is this change
        change = self.delay * (self.delay + 1) / 2
        return [st.laws.Term(1.0, numbers.lr * self.delay, numbers.lr * change)]

    def adam(self, numbers: Any) -> list[Any]:
        return st.laws.SecondOrder(self.delay).adam(numbers)


class Training:
    """A model whose gradients come from weights predicted several updates ahead."""

    def __init__(self, data: Split, seed: int, rate: float, law: str, delay: int) -> None:
        layers = gpt(6, vocabulary=data.classes, context=32, width=64, depth=4, seed=seed)
        self.model = nn.Sequential(*layers)
        self.params = list(self.model.parameters())
        self.hidden = [p for p in self.params if p in st.optim.hidden_matrices(self.model)]
        self.optimizer = st.optim.Muon(
            self.params, rate, adjust_lr_fn="match_rms_adamw", hidden=self.hidden
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / _WARMUP)
        )
        self.true = {p: p.detach().clone() for p in self.params}
        state = {
            key: {p: torch.zeros_like(p) for p in self.params} for key in self.optimizer.buffer_keys
        }
        self.optimizer.bind(self.true, state)
        self.outs = {p: p.detach() for p in self.params}
        self._law, self._delay = law, delay
        self._late: list[tuple[Tensor, ...]] = []

    def minibatch(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on a minibatch, or only compute its gradient if none is due; return the loss."""
        loss = mean_loss(self.model(inputs), targets)
        self._late.append(torch.autograd.grad(loss, self.params))
        if len(self._late) > self._delay:
            for p, gradient in zip(self.params, self._late.pop(0), strict=True):
                p.grad = gradient
            self._update()
        return loss.item()

    def _update(self) -> None:
        delay, law = self._delay, self._law
        before = {p: w.clone() for p, w in self.true.items()} if law == "difference" else {}
        laws: dict[str, Any] = {
            "linear": st.laws.Linear(delay),
            "momentum": st.laws.Linear(delay),
            "whole": Whole(delay),
            "second-order": st.laws.SecondOrder(delay),
        }
        self.optimizer.write_with_next_step(self.outs, laws.get(law, 0) if delay else 0)
        self.optimizer.step()
        for p, w in before.items():
            p.data.copy_(self.true[p] + delay * (self.true[p] - w))
        if law == "momentum":
            for p in self.hidden:
                p.data.copy_(self.true[p] - self.rate * delay * self.along_momentum(p))
        self.scheduler.step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def along_momentum(self, p: Tensor) -> Tensor:
        """Return the update that a gradient of zero would give."""
        group = self.optimizer.param_groups[0]
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        update = orthogonalized(self.optimizer.state[p]["momentum_buffer"], *how)
        return update.float() * 0.2 * math.sqrt(max(p.shape))


def minibatches(data: Split, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return islice(epochs_of(Batches(data, batch_size=16, seed=seed), 1000), count)


def trained(data: Split, seed: int, rate: float, law: str, delay: int, updates: int) -> float:
    """Return the mean loss over the last tenth of the updates."""
    training = Training(data, seed, rate, law, delay)
    losses = [training.minibatch(*batch) for batch in minibatches(data, seed, updates + delay)]
    return statistics.fmean(losses[-updates // 10 :])


def errors(data: Split, seed: int, rate: float, updates: int) -> dict[tuple[int, str], float]:
    """Return the median error of each horizon and law over a run, relative to stale weights."""
    training = Training(data, seed, rate, "stale", 0)
    optimizer, hidden, true = training.optimizer, training.hidden, training.true
    found: dict[tuple[int, str], list[float]] = {}
    due: dict[int, list[tuple[int, list[Tensor], dict[str, list[Tensor]]]]] = {}
    for update, batch in enumerate(minibatches(data, seed, updates), start=1):
        before = [true[p].clone() for p in hidden]
        last = [optimizer.state.get(p, {}).get("update_buffer", true[p]).clone() for p in hidden]
        training.minibatch(*batch)
        now = [true[p].clone() for p in hidden]
        for s, then, predictions in due.pop(update, []):
            moved = _distance(then, now)
            for law, predicted in predictions.items():
                found.setdefault((s, law), []).append(_distance(predicted, now) / moved)
        if update <= _WARMUP or update % 7:
            continue
        step = training.rate
        new = [optimizer.state[p]["update_buffer"] for p in hidden]
        along = [training.along_momentum(p) for p in hidden]
        for s in AHEAD:
            more = s * (s + 1) / 2
            predictions = {"difference": [w + s * (w - b) for w, b in zip(now, before)]}  # noqa: B905
            for law, share in (("linear", 0.0), ("second-order", 0.5), ("whole", 1.0)):
                predictions[law] = [
                    w - step * (s * u + share * more * (u - v))
                    for w, u, v in zip(now, new, last, strict=True)
                ]
            predictions["momentum"] = [w - step * s * u for w, u in zip(now, along, strict=True)]
            due.setdefault(update + s, []).append((s, now, predictions))
    return {key: statistics.median(values) for key, values in found.items()}


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return math.sqrt(sum((a - b).square().sum().item() for a, b in zip(some, others, strict=True)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, required=True, help="the text")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--delays", type=int, nargs="*", default=[0, *AHEAD])
    parser.add_argument("--laws", nargs="*", default=["stale", *LAWS])
    parser.add_argument("--no-errors", action="store_true", help="only training")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args(argv)
    torch.set_num_threads(1)
    data = load_text(a.data_dir, context=32)
    document: dict[str, Any] = {
        "command": "bench/muon_laws.py --data-dir tinyshakespeare.txt",
        "environment": environment(),
        "updates": a.updates,
        "seeds": a.seeds,
        "errors": [],
        "training": [],
    }
    if not a.no_errors:
        for rate in (0.004, 0.008):
            runs = [errors(data, seed, rate, a.updates) for seed in range(a.seeds)]
            for s, law in runs[0]:
                each = [round(run[s, law], 3) for run in runs]
                document["errors"].append({"lr": rate, "ahead": s, "law": law, "of_stale": each})
                print(document["errors"][-1], flush=True)
    for delay in a.delays:
        for law in a.laws if delay else ("stale",):
            for rate in RATES[delay]:
                runs_ = [trained(data, k, rate, law, delay, a.updates) for k in range(a.seeds)]
                losses = [round(loss, 4) for loss in runs_]
                row = {"delay": delay, "law": law, "lr": rate, "losses": losses}
                document["training"].append(row)
                print(row, flush=True)
    if a.json is not None:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
