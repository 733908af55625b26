"""Plan: lists of tensors that are validated and resolved once, then used many times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from .calls import (
    PLAIN,
    SgdArguments,
    Terms,
    refuse_gradient,
    remembered_sgd,
    sgd_arguments,
    sgd_terms,
)
from .expressions import Program, lower
from .laws import Horizon, as_law, needs_momentum
from .lists import Gradients, Lists, Role, StepOptions, Tensors, is_array
from .numbers import Adam, Sgd, Term, non_negative

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on


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

    Threads may share a plan: they take turns, and one that calls it from within one of its own
    calls gets a RuntimeError. It cannot be pickled or copied.

    Args:
        params: the weights W; one tensor or a sequence, float16, bfloat16, float32 or float64, all
            on one device, each dense (any order of dimensions, no gaps, no overlap).
        momentum_buffers: v, one per parameter, of the same shape and strides, and of the same
            dtype, or float32 where the parameter has 16 bits.
        exp_avgs: Adam's first moments, like `momentum_buffers` (the two exclude each other).
        exp_avg_sqs: Adam's second moments, like `exp_avgs`.
        grads: gradients, entries may be None; bfloat16 or float16 beside float32 (master) weights.
            Without it `refresh()` reads `params[i].grad`.
        stashed: where `stash` keeps a version of the weights; like the parameters.
        outs: a sequence of lists like the parameters; predictions are written there. bfloat16 or
            float16 beside float32 weights.
        groups: the parameter group of every tensor, from 0; one launch then takes the numbers of
            all groups. None: one group.

    Raises:
        TypeError: something is not a dense tensor of a supported dtype.
        ValueError: shapes, strides, dtypes, devices or lengths differ, or memory overlaps.
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
        groups: Sequence[int] | None = None,
    ) -> None:
        lists = Lists(params, "params", writes=True)
        if momentum_buffers is not None and exp_avgs is not None:
            raise ValueError("exp_avgs: momentum_buffers are given; a plan has one or the other")
        if momentum_buffers is not None:
            lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=True)
        if exp_avgs is not None:
            lists.add(Role.MOMENTUM, "exp_avgs", exp_avgs, writes=True)
        if exp_avg_sqs is not None:
            lists.add(Role.SECOND, "exp_avg_sqs", exp_avg_sqs, writes=True)
        if grads is not None:
            lists.add(Role.GRADS, "grads", grads, writes=False)
        if stashed is not None:
            lists.add(Role.STASHED, "stashed", stashed, writes=True)
        if is_array(outs):
            raise TypeError("outs: expected a sequence of outputs, got one tensor")
        for j, out in enumerate(outs):
            lists.add(Role.OUT, f"outs[{j}]", out, writes=True)
        self._take(lists, groups)
        self._native.keep(self._watches)

    def _take(self, lists: Lists, groups: Sequence[int] | None) -> None:
        self._single = lists.single
        self._native = lists.plan(groups)
        self._n_groups: int = self._native.n_groups
        self._n_outs: int = self._native.n_outs

    _watches: ClassVar[bool] = True

    @classmethod
    def of(cls, lists: Lists) -> Plan:
        """The plan of one call, of lists that name what may be written. For operators."""
        plan = cls.__new__(cls)
        plan._take(lists, None)
        return plan

    # Momentum SGD, in one group.

    def predict_(
        self,
        *,
        lr: float,
        steps: Horizon,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        stream: Any = None,
    ) -> None:
        """W <- W - lr*steps*v in place (SpecTrain, arXiv 1809.02839); steps == 0 keeps the bits.

        `steps` may be a law of `spectrain_ext.laws`; the geometric ones need `momentum` and, where
        there is any, `weight_decay` and `nesterov`.
        """
        terms, program = self._sgd_terms(lr, steps, momentum, weight_decay, nesterov)
        self._native.predict_(terms, (), stream, program)

    def predict(
        self,
        *,
        lr: float,
        steps: Horizon,
        out: int = 0,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        stream: Any = None,
    ) -> None:
        """outs[out] <- W - lr*steps*v, see `predict_`. steps == 0 copies the bits of W."""
        terms, program = self._sgd_terms(lr, steps, momentum, weight_decay, nesterov)
        self._native.predict(terms, (), self._check_out(out), stream, program)

    def stash_predict_(
        self,
        *,
        lr: float,
        steps: Horizon,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        stream: Any = None,
    ) -> None:
        """Stashed <- W and W <- W - lr*steps*v, in one pass, see `predict_`."""
        terms, program = self._sgd_terms(lr, steps, momentum, weight_decay, nesterov)
        self._native.stash_predict_(terms, (), stream, program)

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
        ema: bool = False,
        first_step: bool | Sequence[bool] = False,
        predict: Sequence[Horizon | None] = (),
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """One step of SGD that also writes predictions; see `spectrain_ext.sgd_step_`.

        Args:
            predict: the horizon of every prediction: outs[j] <- W' - lr*predict[j]*v', or what a
                law of `spectrain_ext.laws` says; None leaves outs[j] alone.
        """
        given = lr, momentum, dampening, weight_decay, nesterov, maximize
        numbers = *given, decoupled_weight_decay, ema
        program = None
        if PLAIN.issuperset(map(type, (*numbers, *predict))):
            self._check_predict(predict)
            arguments = remembered_sgd(numbers, tuple(predict), self._n_groups)
        else:
            arguments, program = self._sgd_arguments([Sgd(*numbers)] * self._n_groups, predict)
        self._native_sgd(arguments, first_step, options, stream, program)()

    # Any rule, with the numbers of every group. The prepared forms are all but the native call.

    def step_sgd_(
        self,
        groups: Sequence[Sgd],
        first_step: bool | Sequence[bool] = False,
        predict: Sequence[Horizon | None] = (),
        *,
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """`sgd_step_` with the numbers of every parameter group, in one launch.

        Groups with and without momentum exclude each other in one plan.
        """
        self._prepared_sgd(groups, first_step, predict, options, stream)()

    def _prepared_sgd(
        self,
        groups: Sequence[Sgd],
        first_step: bool | Sequence[bool],
        predict: Sequence[Horizon | None],
        options: StepOptions,
        stream: Any = None,
    ) -> Callable[[], None]:
        self._check_groups(groups, Sgd)
        arguments, program = self._sgd_arguments(groups, predict)
        return self._native_sgd(arguments, first_step, options, stream, program)

    def _sgd_arguments(
        self, groups: Sequence[Sgd], predict: Sequence[Horizon | None]
    ) -> tuple[SgdArguments, Program | None]:
        self._check_predict(predict)
        return lower(sgd_arguments(groups, predict))

    def _native_sgd(
        self,
        arguments: SgdArguments,
        first_step: bool | Sequence[bool],
        options: StepOptions,
        stream: Any,
        program: Program | None,
    ) -> Callable[[], None]:
        settings, with_momentum, predictions = arguments
        call, given = self._native.sgd_step_, (settings, with_momentum, first_step, predictions)
        return partial(call, *given, options, stream, program)

    def step_adam_(
        self,
        groups: Sequence[Adam],
        predict: Sequence[Horizon | None] = (),
        *,
        stream: Any = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """One step of Adam, AdamW or NAdam, with the numbers of every group, in one launch.

        See `spectrain_ext.adam_step_`; predictions as in `sgd_step_`.
        """
        self._prepared_adam(groups, predict, options, stream)()

    def _prepared_adam(
        self,
        groups: Sequence[Adam],
        predict: Sequence[Horizon | None],
        options: StepOptions,
        stream: Any = None,
    ) -> Callable[[], None]:
        self._check_groups(groups, Adam)
        self._check_predict(predict)
        predictions = []
        for j, steps in enumerate(predict):
            if steps is not None:
                law = as_law(steps, f"predict[{j}]")
                predictions.append((j, [law.adam(numbers) for numbers in groups]))
        settings = [numbers.setting() for numbers in groups]
        (settings, predictions), program = lower((settings, predictions))
        return partial(self._native.adam_step_, settings, predictions, options, stream, program)

    def predict_with(
        self,
        groups: Sequence[Sgd] | Sequence[Adam],
        steps: Horizon,
        *,
        out: int | None = None,
        stream: Any = None,
    ) -> None:
        """outs[out], or W itself (None), <- the prediction of a law under the groups' rule."""
        self._prepared_predict(groups, steps, out, stream)()

    def _prepared_predict(
        self,
        groups: Sequence[Sgd] | Sequence[Adam],
        steps: Horizon,
        out: int | None,
        stream: Any = None,
    ) -> Callable[[], None]:
        (terms, eps), program = lower(self._terms(groups, steps))
        if out is None:
            return partial(self._native.predict_, terms, eps, stream, program)
        index = self._check_out(out)
        return partial(self._native.predict, terms, eps, index, stream, program)

    def stash_predict_with(
        self, groups: Sequence[Sgd] | Sequence[Adam], steps: Horizon, *, stream: Any = None
    ) -> None:
        """Stashed <- W and W <- the prediction of a law under the groups' rule."""
        self._prepared_stash_predict(groups, steps, stream)()

    def _prepared_stash_predict(
        self, groups: Sequence[Sgd] | Sequence[Adam], steps: Horizon, stream: Any = None
    ) -> Callable[[], None]:
        (terms, eps), program = lower(self._terms(groups, steps))
        return partial(self._native.stash_predict_, terms, eps, stream, program)

    def extrapolate(self, *, steps: float, out: int = 0, stream: Any = None) -> None:
        """outs[out] <- W + steps*(W - stashed): prediction by weight difference."""
        steps, program = lower(non_negative("steps", steps))
        self._native.extrapolate(steps, self._check_out(out), stream, program)

    # Versions of the weights.

    def stash(self, *, stream: Any = None) -> None:
        """Stashed <- W, bit for bit."""
        self._native.stash(stream)

    def restore_(self, *, stream: Any = None) -> None:
        """W <- stashed, bit for bit."""
        self._native.restore_(stream)

    def swap_(self, *, stream: Any = None) -> None:
        """W <-> stashed, bit for bit, in place."""
        self._prepared_swap(stream)()

    def _prepared_swap(self, stream: Any = None) -> Callable[[], None]:
        return partial(self._native.swap_, stream)

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

    def _sgd_terms(
        self,
        lr: float,
        steps: Horizon,
        momentum: float | None,
        weight_decay: float,
        nesterov: bool,
    ) -> tuple[Terms, Program | None]:
        rate = non_negative("lr", lr)
        if type(weight_decay) is not float:
            weight_decay = non_negative("weight_decay", weight_decay)
        plain = momentum is None and not weight_decay and not nesterov
        if plain and isinstance(steps, (int, float)):  # the common case, without a detour
            distance = rate * non_negative("steps", steps)
            terms = [[Term(1.0, distance)] if distance else []] * self._n_groups
            return (terms, None) if type(distance) is float else lower(terms)
        law = as_law(steps)
        if momentum is None:
            if needs_momentum(law):
                raise ValueError(f"momentum: {law} needs it")
            momentum = 1.0
        numbers = Sgd(rate, momentum, 0.0, weight_decay, nesterov)
        terms = [sgd_terms(law, numbers)] * self._n_groups
        refuse_gradient(terms[:1])
        return lower(terms)

    def _terms(
        self, groups: Sequence[Sgd] | Sequence[Adam], steps: Horizon
    ) -> tuple[Terms, tuple[float, ...]]:
        adam = isinstance(groups, Sequence) and len(groups) > 0 and isinstance(groups[0], Adam)
        self._check_groups(groups, Adam if adam else Sgd)
        law = as_law(steps)
        terms: Terms = []
        eps: list[float] = []
        for numbers in groups:
            if isinstance(numbers, Adam):
                terms.append(law.adam(numbers))
                eps.append(numbers.eps)
            else:
                if numbers.momentum == 0.0:
                    raise ValueError("momentum: a prediction needs momentum > 0")
                terms.append(sgd_terms(law, numbers))
        refuse_gradient(terms)
        return terms, tuple(eps)

    def _check_groups(self, groups: Sequence[Sgd] | Sequence[Adam], rule: type) -> None:
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
        for i, numbers in enumerate(groups):
            if not isinstance(numbers, rule):
                raise TypeError(
                    f"groups[{i}]: expected {rule.__name__}, got {type(numbers).__name__}"
                )

    def _check_out(self, out: int) -> int:
        if isinstance(out, bool) or not isinstance(out, int):
            raise TypeError(f"out: expected an index, got {out!r}")
        if out < 0:
            raise ValueError(
                f"out: expected an index below {self._n_outs}, the number of outs, got {out}"
            )
        return out

    def _check_predict(self, predict: Sequence[Horizon | None]) -> None:
        if len(predict) > self._n_outs:
            raise ValueError(
                f"predict: expected at most one entry for each of the {self._n_outs} outs, "
                f"got {len(predict)}"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan holds addresses and cannot be pickled or copied; make a new one")
