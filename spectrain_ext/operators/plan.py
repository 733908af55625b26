"""Plan: lists of tensors that are validated and resolved once, then used many times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

from .calls import (
    Gradients,
    Lists,
    Prediction,
    Role,
    SgdRow,
    StepOptions,
    Tensors,
    is_array,
    prediction,
    sgd_prediction,
    sgd_step_arguments,
    step_arguments,
)
from .corrections import coefficients_of
from .expressions import lower
from .laws import Horizons, as_laws
from .numbers import Adam, Sgd, horizon

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .calls import AdamStep, Numbers, SgdNumbers
    from .corrections import StaleCorrection

Kind = TypeVar("Kind")
_OF_ADAM = frozenset(Adam.__slots__) - {"correction"}
_NO_NUMBERS: SgdRow = None, None, 0.0, 0.0, False, False, False, False  # `sgd_step_` has by default


def _out_of_graphs(cls: type[Kind]) -> type[Kind]:
    """Have torch.compile break its graph at the methods, and where it may not, say what to do."""
    for name, method in vars(cls).items():
        if isinstance(method, FunctionType) and not name.startswith("_"):
            # What torch.compiler.disable sets; its wrapper takes as long as a call of a plan.
            vars(method)["_torchdynamo_disable"] = True
            vars(method)["_torchdynamo_disable_msg"] = (
                f"a {cls.__name__} holds addresses, which no graph can. With fullgraph=True call "
                "the operators instead, spectrain_ext.sgd_step_ and the like, which become a part "
                "of the graph, or use the plan outside of the compiled function"
            )
    return cls


@_out_of_graphs
class Plan:
    """The operators of this package, resolved once for fixed tensors.

    A plan validates its tensors, keeps them alive, joins neighbours that are contiguous in every
    list, and from then on costs one kernel launch and no walk over the tensors per call.

    It writes to the raw memory and does **not** bump autograd's version counters. That is what it
    is for: a pipeline changes weights between a forward and its backward on purpose, and autograd
    must not refuse that backward. In a loop of your own use the module-level operators, unless you
    know that no graph still needs the values that a plan overwrites.

    It keeps the memory that it was given: `model.double()`, `p.data = ...`, `set_` and the like
    give a parameter another storage, and the old one lives until the plan goes. A call that would
    work on tensors that have moved since, by these or by `resize_`, `share_memory_` or a resized
    storage, raises RuntimeError and names the tensor. (Arrays of other frameworks stay where they
    were lent; replays of a captured CUDA graph do not ask.)

    Steps and predictions take SGD's numbers as keywords, the same for all parameter groups, or as
    `groups`, one `Sgd` or `Adam` of `spectrain_ext.operators.numbers` for each; and a horizon for
    all groups, or a tuple with one for each. Adam's numbers are keywords of `adam_step_`, and
    `groups` of predictions.

    In a function under torch.compile a call of a plan breaks the graph; with `fullgraph=True` use
    the module-level operators, which become a part of it.

    Threads may share a plan: they take turns, and one that calls it from within one of its own
    calls gets a RuntimeError. It cannot be pickled or copied.

    Args:
        params: the weights W; one tensor or a sequence, float16, bfloat16, float32 or float64, all
            on one device, each dense (any order of dimensions, no gaps, no overlap).
        momentum_buffers: v, one per parameter, of the same shape and strides, and of the same
            dtype, or float32 where the parameter has 16 bits.
        exp_avgs: Adam's first moments, like `momentum_buffers` (the two exclude each other).
        exp_avg_sqs: Adam's second moments, like `exp_avgs`, and of their dtypes.
        grads: gradients, entries may be None; bfloat16 or float16 beside float32 (master) weights.
            Without it `refresh()` reads `params[i].grad`.
        stashed: where `stash` keeps a version of the weights; like the parameters.
        outs: a sequence of lists like the parameters; predictions are written there. bfloat16 or
            float16 beside float32 weights.
        stale: the weights that gradients are computed with, for steps with a correction; like an
            output, and may be one of them.
        gap_averages: the average of `corrections.GapAware`, zeros at first; like the momentum,
            and of its dtypes.
        groups: the parameter group of every tensor, from 0; one launch then takes the numbers of
            all groups. None: one group.

    Raises:
        TypeError: something is not a dense tensor of a supported dtype.
        ValueError: shapes, strides, dtypes, devices or lengths differ, or memory overlaps.
    """

    _watches: ClassVar[bool] = True

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
        stale: Tensors | None = None,
        gap_averages: Tensors | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        lists = Lists(params, "params", writes=True)
        if momentum_buffers is not None and exp_avgs is not None:
            raise ValueError("exp_avgs: momentum_buffers are given; a plan has one or the other")
        if is_array(outs):
            raise TypeError("outs: expected a sequence of outputs, got one tensor")
        for role, name, given in (
            (Role.MOMENTUM, "momentum_buffers", momentum_buffers),
            (Role.MOMENTUM, "exp_avgs", exp_avgs),
            (Role.SECOND, "exp_avg_sqs", exp_avg_sqs),
            (Role.GRADS, "grads", grads),
            (Role.STASHED, "stashed", stashed),
            *((Role.OUT, f"outs[{j}]", out) for j, out in enumerate(outs)),
            (Role.STALE, "stale", stale),
            (Role.AVERAGE, "gap_averages", gap_averages),
        ):
            if given is not None or role is Role.OUT:
                lists.add(role, name, given, writes=role not in (Role.GRADS, Role.STALE))
        self._single = lists.single
        self._native = lists.plan(groups)
        self._native.keep(self._watches)
        self._n_groups: int = 1 if groups is None else self._native.n_groups
        self._n_outs: int = self._native.n_outs

    # Predictions.

    def predict_(
        self,
        groups: Numbers | None = None,
        *,
        steps: Horizons,
        stream: Any = None,
        **numbers: Unpack[SgdNumbers],
    ) -> None:
        """W <- W - lr*steps*v in place (SpecTrain, arXiv 1809.02839); steps == 0 keeps the bits.

        `steps` may be a law of `spectrain_ext.laws`. Without `groups` the numbers are `lr`, and for
        the geometric laws `momentum` and, where there are any, `weight_decay`, `nesterov` and the
        others of `sgd_step_`.
        """
        terms, eps, program = self._terms_of(groups, steps, numbers)
        self._native.predict_(terms, eps, stream, program)

    def predict(
        self,
        groups: Numbers | None = None,
        *,
        steps: Horizons,
        out: int = 0,
        stream: Any = None,
        **numbers: Unpack[SgdNumbers],
    ) -> None:
        """outs[out] <- W - lr*steps*v, see `predict_`. steps == 0 copies the bits of W."""
        terms, eps, program = self._terms_of(groups, steps, numbers)
        self._native.predict(terms, eps, self._check_out(out), stream, program)

    def stash_predict_(
        self,
        groups: Numbers | None = None,
        *,
        steps: Horizons,
        stream: Any = None,
        **numbers: Unpack[SgdNumbers],
    ) -> None:
        """Stashed <- W and W <- W - lr*steps*v, in one pass, see `predict_`."""
        terms, eps, program = self._terms_of(groups, steps, numbers)
        self._native.stash_predict_(terms, eps, stream, program)

    def extrapolate(self, *, steps: float, out: int = 0, stream: Any = None) -> None:
        """outs[out] <- W + steps*(W - stashed): prediction by weight difference."""
        steps, program = lower(horizon("steps", steps))
        self._native.extrapolate(steps, self._check_out(out), stream, program)

    # Steps.

    def sgd_step_(
        self,
        groups: Sequence[Sgd] | None = None,
        *,
        lr: float | None = None,
        momentum: float | None = None,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        ema: bool = False,
        first_step: bool | Sequence[bool] = False,
        predict: Sequence[Horizons | None] = (),
        correction: StaleCorrection | None = None,
        largest_lr: float | None = None,
        averaged: int = 0,
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """One step of SGD that also writes predictions; see `spectrain_ext.sgd_step_`.

        Groups with and without momentum exclude each other in one plan.

        Args:
            groups: the numbers of every parameter group; None: `lr`, `momentum` (both needed then)
                to `ema`, for all of them.
            predict: the horizon of every prediction: outs[j] <- W' - lr*predict[j]*v', or what a
                law of `spectrain_ext.laws` says; None leaves outs[j] alone.
            correction, largest_lr, averaged: of the gradients, which `stale` have given.
            options: `grad_scale`, `found_inf`, `clip_factor`, `zero_grad`, `rounding_seed`.
        """
        if len(predict) > self._n_outs:
            raise self._too_many(predict)
        row = lr, momentum, dampening, weight_decay, nesterov, maximize, decoupled_weight_decay, ema
        if groups is None:
            step, program = sgd_step_arguments(row, self._n_groups, predict)
        elif row != _NO_NUMBERS:
            pairs = zip(Sgd.__slots__, row, _NO_NUMBERS, strict=False)
            raise _given_twice(name for name, number, no in pairs if number != no)
        else:
            step, program = step_arguments(self._checked(groups, Sgd), predict)
        correcting = None
        if correction is not None:
            own = groups or [Sgd(*cast("SgdRow", row))] * self._n_groups
            correcting = coefficients_of(correction, own, largest_lr, averaged)
        settings, with_momentum, predictions = step
        more = options, stream, program, correcting
        self._native.sgd_step_(settings, with_momentum, first_step, predictions, *more)

    def adam_step_(
        self,
        groups: Sequence[Adam] | None = None,
        *,
        predict: Sequence[Horizons | None] = (),
        correction: StaleCorrection | None = None,
        largest_lr: float | None = None,
        averaged: int = 0,
        stream: Any = None,
        **options: Unpack[AdamStep],
    ) -> None:
        """One step of Adam, AdamW or NAdam that also writes predictions; as `sgd_step_`.

        See `spectrain_ext.adam_step_`; `groups` are the numbers of every parameter group. Without
        them they are keywords: `lr` and `step`, and where they are not the usual ones `betas` to
        `mu_product`.
        """
        if len(predict) > self._n_outs:
            raise self._too_many(predict)
        if groups is None or (options and not _OF_ADAM.isdisjoint(options)):
            groups = self._adams(groups, cast("dict[str, Any]", options))
        (settings, _, predictions), program = step_arguments(self._checked(groups, Adam), predict)
        correcting = coefficients_of(correction, groups, largest_lr, averaged)
        self._native.adam_step_(settings, predictions, options, stream, program, correcting)

    # Versions of the weights.

    def stash(self, *, stream: Any = None) -> None:
        """Stashed <- W, bit for bit."""
        self._native.stash(stream)

    def restore_(self, *, stream: Any = None) -> None:
        """W <- stashed, bit for bit."""
        self._native.restore_(stream)

    def swap_(self, *, stream: Any = None) -> None:
        """W <-> stashed, bit for bit, in place."""
        self._native.swap_(stream)

    def write_out(self, *, out: int = 0, stream: Any = None) -> None:
        """outs[out] <- W, rounded where the output is narrower."""
        self._native.write_out(self._check_out(out), stream)

    def refresh(self, grads: Gradients = None) -> None:
        """Read the gradients' addresses again, or take other gradients.

        After `zero_grad(set_to_none=True)` a backward pass leaves new gradients at new addresses:
        call this before `sgd_step_`. Without an argument a gradient that was `params[i].grad` when
        it was given (or when none were given) is read from `params[i].grad` as it is now; any other
        is the tensor that was given.
        """
        if grads is None:
            self._native.refresh()
        else:
            arrays = (grads,) if self._single else tuple(cast(Iterable[object], grads))
            self._native.set_gradients(arrays)

    # Arguments.

    def _terms_of(self, groups: Any, steps: Horizons, numbers: Any = ()) -> Prediction:
        if numbers and groups is None:
            return sgd_prediction(self._n_groups, steps, **numbers)
        if numbers:
            raise _given_twice(numbers)
        checked = self._checked(groups)
        for own in checked:
            if not own.has_momentum:
                raise ValueError("momentum: a prediction needs momentum > 0")
        return prediction(checked, as_laws(steps, self._n_groups))

    def _checked(self, groups: Any, rule: type[Sgd] | type[Adam] | None = None) -> Any:
        """The numbers of every group, all of one rule; None: of any."""
        # The common case first: asking for a Sequence takes longer than the rest.
        if type(groups) is not list and (
            isinstance(groups, str) or not isinstance(groups, Sequence)
        ):
            raise TypeError(
                f"groups: expected a sequence with the numbers of every group, got "
                f"{type(groups).__name__}"
            )
        if len(groups) != self._n_groups:
            raise ValueError(
                f"groups: expected the numbers of {self._n_groups} groups, got {len(groups)}"
            )
        if rule is None:
            rule = Adam if isinstance(groups[0], Adam) else Sgd
        for i, given in enumerate(groups):
            if not isinstance(given, rule):
                raise TypeError(
                    f"groups[{i}]: expected {rule.__name__}, got {type(given).__name__}"
                )
        return groups

    def _adams(self, groups: Sequence[Adam] | None, options: dict[str, Any]) -> list[Adam]:
        """Take Adam's numbers out of the keywords."""
        numbers = {name: options.pop(name) for name in _OF_ADAM & options.keys()}
        if groups is not None:
            raise _given_twice(name for name in Adam.__slots__ if name in numbers)
        for name in ("lr", "step"):
            if name not in numbers:
                raise TypeError(f"{name}: adam_step_ needs it, or groups, which have their own")
        return [Adam(**numbers)] * self._n_groups

    def _check_out(self, out: int) -> int:
        if isinstance(out, bool) or not isinstance(out, int):
            raise TypeError(f"out: expected an index, got {out!r}")
        if out < 0:
            raise ValueError(
                f"out: expected an index below {self._n_outs}, the number of outs, got {out}"
            )
        return out

    def _too_many(self, predict: Sequence[object]) -> ValueError:
        if not self._n_outs:
            return ValueError(
                "predict: the plan has no outs to write predictions to; give it some, "
                "Plan(..., outs=[...]), each a list like the parameters"
            )
        return ValueError(
            f"predict: expected at most one entry for each of the {self._n_outs} outs, "
            f"got {len(predict)}"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan holds addresses and cannot be pickled or copied; make a new one")


def _given_twice(names: Iterable[str]) -> TypeError:
    return TypeError(f"{next(iter(names))}: groups are given, which have their own")
