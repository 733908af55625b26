"""Operators on fixed lists of tensors, which are validated once and used many times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn, Unpack, cast

from torch import Tensor

from .calls import (
    Gradients,
    Lists,
    Prediction,
    Role,
    StepOptions,
    Tensors,
    is_array,
    prediction,
)
from .functions import sgd_prediction
from .laws import Horizon, as_law
from .numbers import AdamNumbers, LionNumbers, horizon
from .steps import ROLES, ROWS, AdamSteps

_SGD = ROWS["sgd_step_"]


class Plan:
    """The operators of this package for fixed tensors.

    A plan validates its tensors, keeps them alive and joins tensors that are contiguous in every
    list. Each call then costs one kernel launch, without a loop over the tensors.

    A plan writes to raw memory and does **not** bump autograd's version counters, because a
    pipeline changes weights between a forward and its backward on purpose. In your own training
    loop use the module-level operators, unless no graph still needs the overwritten values.

    `model.double()`, `p.data = ...` and `set_` give a parameter new storage; the plan keeps the old
    one alive. A call on tensors that have moved since (by these, `resize_`, `share_memory_` or a
    resized storage) raises RuntimeError and names the tensor. This is not checked for arrays of
    other frameworks and in replays of a captured CUDA graph.

    Predictions take the hyperparameters of `sgd_step_` as keywords; those of `adam_step_`, which
    `step`, the number of the last update, tells apart; or those of `lion_step_`, with `betas`.

    A call breaks a torch.compile graph; with `fullgraph=True` use the module-level operators.
    Threads that share a plan take turns; a call from within a call of the same thread raises
    RuntimeError. A plan cannot be pickled or copied.

    Args:
        params: the weights W: one tensor or a sequence of float16, bfloat16, float32 or float64,
            all on one device, each dense (any order of dimensions, no gaps, no overlap).
        momentum_buffers: v, one per parameter, of the same shape and strides, and of the same
            dtype, float32 if the parameter has 16 bits, or bfloat16 if it is float32.
        exp_avgs: first moments of Adam or Lion, like `momentum_buffers` (give one or the other).
        exp_avg_sqs: Adam's second moments, like `exp_avgs`, with the same dtypes.
        grads: gradients; entries may be None; bfloat16 or float16 is allowed for float32 (master)
            weights. If None, `refresh()` reads `params[i].grad`.
        stashed: where `stash` keeps a version of the weights; like the parameters.
        outs: a sequence of lists like the parameters, for predictions; bfloat16 or float16 is
            allowed for float32 weights.

    Raises:
        TypeError: an argument is not a dense tensor of a supported dtype.
        ValueError: shapes, strides, dtypes, devices or lengths differ, or memory overlaps.

    Example:
        >>> weights, momentum, ahead = torch.ones(2), torch.ones(2), torch.empty(2)
        >>> plan = st.Plan(weights, momentum_buffers=momentum, outs=[ahead])
        >>> plan.predict(lr=0.25, steps=2)
        >>> ahead
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        params: Tensors,
        *,
        momentum_buffers: Tensors | None = None,
        exp_avgs: Tensors | None = None,
        exp_avg_sqs: Tensors | None = None,
        grads: Gradients = None,
        stashed: Tensors | None = None,
        outs: Sequence[Tensors] = (),
    ) -> None:
        lists = Lists(params, "params", writes=True)
        if momentum_buffers is not None and exp_avgs is not None:
            raise ValueError("exp_avgs: momentum_buffers are given; a plan has one or the other")
        if is_array(outs):
            raise TypeError("outs: expected a sequence of outputs, got one tensor")
        columns = {
            "momentum_buffers": momentum_buffers,
            "exp_avgs": exp_avgs,
            "exp_avg_sqs": exp_avg_sqs,
            "grads": grads,
            "stashed": stashed,
        }
        for name, arrays in columns.items():
            if arrays is not None:
                lists.add(ROLES[name], name, arrays, writes=name != "grads")
        for j, out in enumerate(outs):
            lists.add(Role.OUT, f"outs[{j}]", out, writes=True)
        self._single, self._params = lists.single, lists.params
        self._native = lists.plan()
        self._native.keep(True)
        given = lists.tuple_of(grads) if grads is not None else (None,) * len(self._params)
        self._set_given(given)
        self._n_outs: int = self._native.n_outs
        self._adam_steps = AdamSteps()
        self._columns = [name for name, arrays in columns.items() if arrays is not None]

    def __repr__(self) -> str:
        lists = ", ".join([f"params: {len(self._params)}", *self._columns])
        return f"Plan({lists}, outs: {self._n_outs})"

    # Predictions.

    def predict_(self, *, steps: Horizon, stream: Any = None, **numbers: Any) -> None:
        """Predict weights in place: W <- W - lr*steps*v (SpecTrain, arXiv 1809.02839).

        `steps` may be a law of `spectrain_ext.laws`; 0 keeps the bits. Pass `lr` and, for geometric
        laws, `momentum` and the other hyperparameters of `sgd_step_`.
        """
        self._native.predict(*self._prediction(steps, numbers), None, stream)

    def predict(self, *, steps: Horizon, out: int = 0, stream: Any = None, **numbers: Any) -> None:
        """Write predicted weights: outs[out] <- W - lr*steps*v. See `predict_`."""
        by = self._prediction(steps, numbers)
        self._native.predict(*by, self._check_out(out), stream)

    def stash_predict_(self, *, steps: Horizon, stream: Any = None, **numbers: Any) -> None:
        """Stash and predict in one pass: stashed <- W, then W <- W - lr*steps*v."""
        self._native.stash_predict_(*self._prediction(steps, numbers), stream)

    def extrapolate(self, *, steps: float, out: int = 0, stream: Any = None) -> None:
        """Predict by weight difference: outs[out] <- W + steps*(W - stashed)."""
        self._native.extrapolate(horizon("steps", steps), self._check_out(out), stream)

    # Steps.

    def sgd_step_(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        smoothed: bool = False,
        first_step: bool = False,
        predict: Sequence[Horizon | None] = (),
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """Make a step and write predictions; see `spectrain_ext.sgd_step_`.

        Args:
            predict: the horizon, or law of `spectrain_ext.laws`, of every output, outs[j]. None
                does not write outs[j].
            options: `grad_scale`, `found_inf`, `clip_factor`, `zero_grad`, `rounding_seed`.
        """
        first = lr, momentum, dampening, weight_decay, nesterov, maximize
        numbers = (*first, decoupled_weight_decay, smoothed)
        made = _SGD.arguments(numbers, self._horizons(predict), first_step)
        self._native.step(*made, first_step, options, stream)

    def adam_step_(
        self,
        *,
        lr: float,
        step: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        momentum_decay: float | None = None,
        mu_product: float = 1.0,
        predict: Sequence[Horizon | None] = (),
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """Make a step and write predictions; see `spectrain_ext.adam_step_`, and `sgd_step_`."""
        first = lr, betas, eps, weight_decay, decoupled_weight_decay, maximize
        others = (*first, momentum_decay, mu_product)
        made = self._adam_steps.arguments(step, others, self._horizons(predict))
        self._native.step(*made, False, options, stream)

    def lion_step_(
        self,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        predict: Sequence[Horizon | None] = (),
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """Make a step and write predictions; see `spectrain_ext.lion_step_`, and `sgd_step_`."""
        numbers = lr, betas, weight_decay, maximize
        made = ROWS["lion_step_"].arguments(numbers, self._horizons(predict), False)
        self._native.step(*made, False, options, stream)

    # Versions of the weights.

    def stash(self, *, stream: Any = None) -> None:
        """Copy the weights, bit for bit: stashed <- W."""
        self._native.stash(stream)

    def restore_(self, *, stream: Any = None) -> None:
        """Copy the stashed weights back, bit for bit: W <- stashed."""
        self._native.restore_(stream)

    def swap_(self, *, stream: Any = None) -> None:
        """Exchange weights and stashed weights in place, bit for bit."""
        self._native.swap_(stream)

    def write_out(self, *, out: int = 0, stream: Any = None) -> None:
        """Copy the weights: outs[out] <- W, rounded if the output is narrower."""
        self._native.write_out(self._check_out(out), stream)

    def refresh(self, grads: Gradients = None) -> None:
        """Read the gradients' addresses again, or use other gradients.

        A backward after `zero_grad(set_to_none=True)` puts gradients at new addresses: call this
        before `sgd_step_`. Without an argument, gradients that were `params[i].grad` when the plan
        got them are read from `params[i].grad` again; others stay the given tensors.
        """
        if grads is None:
            if self._follows_all:
                now = tuple(map(_GRAD, self._params))
            else:
                pairs = zip(self._params, self._given, strict=True)
                now = tuple(_grad(p) if g is None else g for p, g in pairs)
            self._native.set_gradients(now)
        else:
            arrays = (grads,) if self._single else tuple(cast(Iterable[object], grads))
            self._native.set_gradients(arrays)
            self._set_given(arrays)

    def _set_given(self, grads: Sequence[object]) -> None:
        """Remember gradients, with None for those that `refresh` reads from their parameters."""
        pairs = zip(self._params, grads, strict=True)
        self._given = tuple(None if g is None or _grad(p) is g else g for p, g in pairs)
        self._follows_all = all(g is None for g in self._given) and all(
            isinstance(p, Tensor) for p in self._params
        )

    # Arguments.

    def _prediction(self, steps: Horizon, numbers: dict[str, Any]) -> Prediction:
        if "step" in numbers:
            return prediction([AdamNumbers(**numbers)], [as_law(steps)])
        if "betas" in numbers:
            return prediction([LionNumbers(**numbers)], [as_law(steps)])
        return sgd_prediction(steps, **numbers)

    def _check_out(self, out: int) -> int:
        if isinstance(out, bool) or not isinstance(out, int):
            raise TypeError(f"out: expected an index, got {out!r}")
        self._need_outs("out: the plan has no outs to write to")
        if not 0 <= out < self._n_outs:
            raise ValueError(
                f"out: expected an index below {self._n_outs}, the number of outs, got {out}"
            )
        return out

    def _horizons(self, predict: Sequence[Horizon | None]) -> Sequence[Horizon | None]:
        if len(predict) <= self._n_outs:
            return predict
        self._need_outs("predict: the plan has no outs to write predictions to")
        raise ValueError(
            f"predict: expected at most one entry for each of the {self._n_outs} outs, "
            f"got {len(predict)}"
        )

    def _need_outs(self, without: str) -> None:
        if not self._n_outs:
            advice = "give it some, Plan(..., outs=[...]), each a list like the parameters"
            raise ValueError(f"{without}; {advice}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan holds addresses and cannot be pickled or copied; make a new one")


# torch.compile breaks its graph at the public methods, or raises an error with this advice. So does
# torch.compiler.disable, whose wrapper takes as long as a call of a plan.
_GRAPH_BREAK = {
    "_torchdynamo_disable": True,
    "_torchdynamo_disable_msg": (
        "a Plan holds addresses, which no graph can. With fullgraph=True call the operators "
        "instead, spectrain_ext.sgd_step_ and the like, which become a part of the graph, or "
        "use the plan outside of the compiled function"
    ),
}
for _name, _method in vars(Plan).items():
    if isinstance(_method, FunctionType) and not _name.startswith("_"):
        vars(_method).update(_GRAPH_BREAK)


_GRAD = attrgetter("grad")  # of a list of tensors, faster than a call for each one


def _grad(param: object) -> object:
    return getattr(param, "grad", None)
