"""Corrections of late gradients: passes that change gradients, and one of a step's coefficients.

Notation: W the weights that are updated, W_stale those that the gradient was computed with, g the
gradient (scaled, clipped, negated to maximize), v the momentum, d what the momentum adds: g with
the L2 penalty. Operations round once, so that the bits are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from spectrain_ext.method import Method
from spectrain_ext.operators.functions import distance
from spectrain_ext.operators.numbers import (
    AdamNumbers,
    SgdNumbers,
    Term,
    fraction,
    horizon,
    non_negative,
)
from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.views import ProcessesView, RunView, StageView
from spectrain_ext.schedule import Kind, flushes
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import local_part

__all__ = ["AdaptiveBraking", "DelayCompensation", "GapAware", "SpikeCompensation"]

_FAR_LONGER = 1e8  # than a momentum: the angle is known to eight digits

Group = Mapping[str, Any]
Views = Mapping[Tensor, Tensor]


def _sign(group: Group) -> float:
    """Return -1 if a step maximizes: it negates gradients before they go into the momentum."""
    return -1.0 if group["maximize"] else 1.0


class _Correction(Pass):
    """Changes gradients before an update, by the weights that they were computed with."""

    alone = (  # empty: without those weights
        "corrects gradients by the stale weights that they read, of which replicas have different "
        "ones, and would drift apart"
    )
    _needs: tuple[str, ...] = ()  # options, one of which a parameter group must have

    @property
    def _weights(self) -> StageWeights:
        assert self.stage.weights is not None
        return self.stage.weights

    def check(self, method: Method) -> None:
        for field, value in (("backward", "stash"), ("forward_reads", "newest")):
            fits = getattr(method, field) == value or flushes(method.schedule)
            if self.alone and not fits:
                raise ValueError(
                    f"method: {self} compares weights with those of a forward that read the "
                    f"newest, needs {field}={value!r}, which {method.name!r} has not"
                )

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        made, weights = super().on(stage, processes), stage.weights
        if not stage.late or weights is None:
            return made
        made._check_groups(f"optimizer: stages[{stage.index}]: ")
        if self.alone and any(dtype.itemsize == 2 for dtype in weights.true_dtypes):
            raise TypeError(
                f"stages[{stage.index}]: {self} needs true weights in float32 or float64; give "
                "master_dtype=torch.float32"
            )
        return made

    def _check_groups(self, where: str = "") -> None:
        for n, group in enumerate(self._weights.optimizer.param_groups):
            if self._needs and group["params"] and not any(map(group.get, self._needs)):
                raise ValueError(f"{where}parameter group {n} has no momentum, which {self} needs")

    def begin(self, run: RunView) -> dict[Kind, Handler]:
        if not (run.trains and self.stage.late and self.stage.weights):
            return {}
        kept: list[tuple[Views, Callable[[], None]]] = []  # they end with the run

        def keep(i: int, j: int) -> None:
            if j == run.microbatches_of(i) - 1:
                kept.append(self._weights.keep())

        def change(i: int, j: int) -> None:
            stale, release = kept.pop()
            self._change(stale)
            release()

        if not self.alone:
            return {Kind.CHANGE_GRADIENTS: lambda i, j: self._change({})}
        return {Kind.BACKWARD: keep, Kind.BACKWARD_WEIGHTS: keep, Kind.CHANGE_GRADIENTS: change}

    def _change(self, stale: Views) -> None:
        if self.stage.skips:
            return
        self._check_groups()
        with self.stage.changing_gradients(wide=bool(self.alone)):
            for n, group in enumerate(self._weights.optimizer.param_groups):
                params = [p for p in group["params"] if p.grad is not None]
                if params:  # foreach operators refuse empty lists
                    self._correct(n, group, params, stale)

    def _correct(self, n: int, group: Group, params: list[Tensor], stale: Views) -> None:
        """Change gradients of the n-th group, to which the step adds the L2 penalty of W."""
        raise NotImplementedError

    def _gaps(self, params: list[Tensor], stale: Views) -> list[Tensor]:
        """Return W - W_stale."""
        true = self._weights.true_weights()
        return list(torch._foreach_sub([true[p] for p in params], [stale[p] for p in params]))

    def _momentum(self, p: Tensor) -> Any:
        return self._weights.optimizer.state.get(p, {}).get("momentum_buffer")


class DelayCompensation(_Correction):
    """DC-ASGD: g + strength*g*g*(W - W_stale), with the L2 penalty of W added after it.

    Zheng et al., arXiv 1609.08326, equation 10, with a constant strength: g*g stands for the
    diagonal of the Hessian in the gradient's Taylor expansion. Strength 0 and unchanged weights
    give the plain step bit for bit.

    Args:
        strength: at least 0.

    Raises:
        ValueError: a method without ``backward="stash"`` and ``forward_reads="newest"``, or
            replicas of a late stage that sum gradients.
        TypeError: true weights of 16 bits.

    Example:
        >>> late = st.corrections.DelayCompensation(0.5)
        >>> method = st.Method("mine", "compensated", backward="stash", passes=[late])
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> optimizer = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method=method)
    """

    def __init__(self, strength: float) -> None:
        self.strength = non_negative("strength", strength)

    def _correct(self, n: int, group: Group, params: list[Tensor], stale: Views) -> None:
        if self.strength:
            gradients: list[Any] = [p.grad for p in params]
            gaps = self._gaps(params, stale)
            torch._foreach_mul_(gaps, gradients)
            torch._foreach_mul_(gaps, gradients)
            torch._foreach_mul_(gaps, _sign(group) * self.strength)
            torch._foreach_add_(gradients, gaps)


class GapAware(_Correction):
    """Gradients divided by how far the weights have moved: d/(1 + abs(W - W_stale)/C) per element.

    C is the typical size of an update (Barkai, Hakimi, Schuster, arXiv 1909.10802). SGD:
    C = largest_lr*(sqrt(A_hat) + 1e-8), A the average of v*v, with the largest learning rate so
    far. Adam: C = sqrt(A_hat) + eps, A the average of the squared updates, without decoupled decay,
    which is not corrected. After an update A <- decay*A + (1 - decay)*(its square), and
    A_hat = A/(1 - decay^n) after n updates. The first update corrects nothing. Unchanged weights
    give the plain step bit for bit. For a learning rate on a GPU the CPU waits.

    Args:
        decay: of the average, below 1.

    Raises:
        ValueError, TypeError: as for ``DelayCompensation``, or an optimizer without momentum.

    Example:
        >>> late = st.corrections.GapAware()
        >>> method = st.Method("mine", "gap-aware PipeDream", backward="stash", passes=[late])
    """

    _needs = "momentum", "betas"
    _averages: dict[Tensor, Tensor]  # A
    _counts: dict[Tensor, int]  # n
    _largest: dict[int, float]  # learning rate, by the index of a group
    # Of an update: parameters, and under Adam their weights before it, after decoupled decay.
    _updating: list[tuple[Tensor, Tensor | None]]

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = fraction("decay", decay)

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        made = super().on(stage, processes)
        made._averages, made._counts, made._largest = {}, {}, {}
        return made

    def begin(self, run: RunView) -> dict[Kind, Handler]:
        self._updating = []
        steps = super().begin(run)
        return steps and {**steps, Kind.UPDATE: self._average}

    def _correct(self, n: int, group: Group, params: list[Tensor], stale: Views) -> None:
        stage_weights, adam = self._weights, "betas" in group
        rate = float(group["lr"]) * stage_weights.rate_factor
        largest = self._largest[n] = max(rate, self._largest.get(n, 0.0))
        scale, eps = (1.0, float(group["eps"])) if adam else (largest, 1e-8)
        decay, decoupled = float(group["weight_decay"]), group.get("decoupled_weight_decay", False)
        kept, true = 1.0 - rate * decay if decoupled else 1.0, stage_weights.true_weights()
        self._updating += [(p, true[p] * kept if adam else None) for p in params]
        params = [p for p in params if p in self._counts]
        if not params or not scale:
            return
        gradients: list[Any] = [p.grad for p in params]
        gaps = self._gaps(params, stale)
        unbiased = [scale * (1.0 - self.decay ** self._counts[p]) ** -0.5 for p in params]
        sizes = torch._foreach_sqrt([self._averages[p] for p in params])  # C
        torch._foreach_mul_(sizes, unbiased)
        torch._foreach_add_(sizes, scale * eps)
        torch._foreach_abs_(gaps)
        torch._foreach_add_(gaps, sizes)
        torch._foreach_div_(sizes, gaps)  # from here on C/(C + gap), 1 without a gap
        torch._foreach_mul_(gradients, sizes)
        # The step adds the whole L2 penalty p again: share*(g + p) - p = share*g + (share - 1)*p.
        if decay and not decoupled:
            torch._foreach_add_(sizes, -1.0)
            torch._foreach_mul_(sizes, [true[p] for p in params])
            torch._foreach_mul_(sizes, _sign(group) * decay)
            torch._foreach_add_(gradients, sizes)

    def _average(self, i: int, j: int) -> None:
        """Average the square of an update that has been made."""
        updating, self._updating = self._updating, []
        with self.stage.reading():
            true = self._weights.true_weights()
            for p, before in updating:
                moved = self._momentum(p) if before is None else before.sub_(true[p])
                square = (moved * moved).mul_(1.0 - self.decay)
                average = self._averages.setdefault(p, torch.zeros_like(square))
                average.mul_(self.decay).add_(square)
                self._counts[p] = self._counts.get(p, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        """Return averages by parameters' names, their updates, and each group's largest rate."""
        named = [(n, local_part(p)) for n, p in self.stage.module.named_parameters()]
        counts = {n: self._counts[p] for n, p in named if p in self._counts}
        if not counts:
            return {}
        most = max(counts.values())
        fewer = {n: count for n, count in counts.items() if count < most}
        state = {n: self._averages[p] for n, p in named if n in counts}
        return {
            **state,
            "count": most,
            "fewer": fewer,
            "largest_rates": [*map(list, self._largest.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``; parameters that are not in it begin anew."""
        named = [(n, local_part(p)) for n, p in self.stage.module.named_parameters() if n in state]
        self._averages = {p: state[n].to(p.device, copy=True) for n, p in named}
        self._counts = {p: state["fewer"].get(n, state["count"]) for n, p in named}
        self._largest = dict(state.get("largest_rates", ()))


class AdaptiveBraking(_Correction):
    """Shrinks gradients along the momentum and grows those against it.

    v' = mu*v + (1 - strength*cos(g, v))*g + decay*W, with the angle of each parameter's own tensors
    (Venigalla et al., arXiv 2007.01397); weight decay is not braked.

    Args:
        strength: rho, at least 0.

    Raises:
        ValueError: an optimizer without momentum.

    Example:
        >>> late = st.corrections.AdaptiveBraking(1.0)
        >>> method = st.Method("mine", "braking", passes=[late], families=("sgd",))
    """

    alone = ""
    _needs = ("momentum",)

    def __init__(self, strength: float) -> None:
        self.strength = non_negative("strength", strength)

    def _correct(self, n: int, group: Group, params: list[Tensor], stale: Views) -> None:
        params = [p for p in params if self._momentum(p) is not None]
        if not params:
            return
        gradients: list[Any] = [p.grad for p in params]
        momenta = [self._momentum(p) for p in params]
        laid_out = [
            g if g.dtype == v.dtype and g.stride() == v.stride() else torch.empty_like(v).copy_(g)
            for g, v in zip(gradients, momenta, strict=True)
        ]
        apart, _ = distance(momenta, [laid_out])
        norms = [torch._foreach_norm(of, 2, dtype=torch.float64) for of in (gradients, momenta)]
        lengths = torch.stack([*map(torch.stack, norms), apart[0]])
        for each in self.stage.passes:
            lengths = each.whole_lengths(params, lengths)
        g, v, apart = lengths
        # By the law of cosines, with a rounding error of 1e-16*(g/v + v/g): negligible if v is
        # longer; next to a far longer g the angle is unknown and counts as 90 degrees.
        cosines = ((g * g + v * v - apart * apart) / (2.0 * g * v)).clamp_(-1.0, 1.0)
        cosines = cosines.where((g > 0.0) & (g < _FAR_LONGER * v), 0.0)
        shares = 1.0 - _sign(group) * self.strength * cosines
        torch._foreach_mul_(gradients, list(shares.unbind()))


@dataclass(frozen=True, slots=True)
class SpikeCompensation:
    """Gives a late gradient at once the share of the momentum that it would have by now.

    W' = W - lr*(mu^D*v' + (1 - mu^D)/(1 - mu)*d) (Kosson et al., arXiv 2003.11666), for SGD. D = 0
    is plain SGD and D = 1 Nesterov momentum, with the same coefficients bit for bit. No pass, but
    for ``Method(correction=...)``: it replaces a step's coefficients, which costs nothing.

    Args:
        delay: D, the updates by which the gradient is late, at least 0.

    Example:
        >>> late = lambda place: st.corrections.SpikeCompensation(place.window - 1)
        >>> method = st.Method("mine", "spikes", correction=late, families=("sgd",))
    """

    delay: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", horizon("delay", self.delay))

    def sgd(self, numbers: SgdNumbers) -> Term:
        """Return the step under SGD; ValueError with Nesterov momentum."""
        plain = numbers.term()
        mu = numbers.momentum
        if not self.delay or mu == 0.0:
            return plain
        if numbers.nesterov:
            raise ValueError("nesterov: is spike compensation for a delay of 1, expected False")
        left = mu**self.delay
        now = self.delay if mu == 1.0 else (1.0 - left) / (1.0 - mu)
        return Term(plain.keep, numbers.lr * left, numbers.lr * now * numbers.gain)

    def adam(self, numbers: AdamNumbers) -> Term:
        """Raise ValueError: it is not defined for Adam."""
        raise ValueError(f"{self} is defined for SGD")
