"""Steps of update rules: each function here is a rule's row.

A row declares arguments and passes all of them on, as its `locals()`. Torch's operator follows from
its signature, and the method of that name of a `Plan` has the same keywords. numbers.py has the
rules' hyperparameters, csrc/kernels/operations.h the rows of their kernels.

Arguments have these names: `params`, `grads` and the rule's state (`ROLES`), the fields of its
hyperparameters, `predict`, `stream`, `first_step` if the rule has one, and `**options`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_, itemgetter
from typing import Any, NamedTuple, SupportsFloat, Unpack

from .calls import Gradients, Lists, Role, Step, StepOptions, Tensors, Written, step_arguments
from .laws import Horizon, Law, as_law
from .library import Row, operator
from .numbers import AdamNumbers, LionNumbers, SgdNumbers, is_in_memory, whole_step

#: By the name of an argument, of a plan or a step.
ROLES = {
    "momentum_buffers": Role.MOMENTUM,
    "exp_avgs": Role.MOMENTUM,
    "exp_avg_sqs": Role.SECOND,
    "grads": Role.GRADS,
    "stashed": Role.STASHED,
}

_PLAIN = frozenset((float, int, bool, type(None)))
_HORIZONS = _PLAIN - {bool}


class StepRow(Row):
    """The arguments of a step of an update rule."""

    def __init__(self, rule: Any, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.rule = rule
        self.columns = [(name, ROLES[name]) for name in self.lists[1:]]
        self.numbers = tuple(name for name in rule.__match_args__ if name in self.keywords)
        self.numbers_in = itemgetter(*self.numbers)
        self._counts = "step" in self.numbers  # no step has the numbers of the one before

    def arguments(
        self,
        numbers: tuple[Any, ...],  # the rule's fields, in order
        predict: Sequence[Horizon | None],
        first_step: bool,
    ) -> Step:
        if not isinstance(first_step, bool):
            raise TypeError(f"first_step: expected a bool, got {first_step!r}")
        plain = len(predict) == 0 or _HORIZONS.issuperset(map(type, predict))
        if plain and not self._counts and _PLAIN.issuperset(map(type, numbers)):
            return _remembered_step(self, numbers, tuple(predict))
        laws = _remembered_laws(tuple(predict)) if plain else _laws(predict)
        return step_arguments([self.rule(*numbers)], laws, first_step)


@lru_cache(maxsize=256)
def _remembered_step(row: StepRow, numbers: tuple[Any, ...], predict: tuple[Any, ...]) -> Step:
    """Cache plain numbers: most steps of a training loop have the same ones."""
    return step_arguments([row.rule(*numbers)], _laws(predict))


@lru_cache(maxsize=256)
def _remembered_laws(predict: tuple[Any, ...]) -> list[list[Law] | None]:
    return _laws(predict)


def _laws(predict: Sequence[Horizon | None]) -> list[list[Law] | None]:
    return [h if h is None else [as_law(h, f"predict[{j}]")] for j, h in enumerate(predict)]


class _CheckedStep(NamedTuple):
    given: tuple[Any, ...]  # numbers and horizons
    first: AdamNumbers  # these numbers, at the first step
    constant: tuple[Any, ...]  # what a setting has besides its term
    laws: list[tuple[int, Law]]  # of the outs that are written


class AdamSteps:
    """Adam's steps of one plan, of which most have the same numbers but their own count."""

    def __init__(self) -> None:
        self._given: tuple[Any, ...] = ()  # of the last step that had others
        self._checked: _CheckedStep | None = None  # of one that came twice

    def arguments(
        self, step: SupportsFloat, others: tuple[Any, ...], predict: Sequence[Horizon | None]
    ) -> Step:
        """Return the arguments of a step; ``others`` are the fields of ``AdamNumbers`` but it."""
        given = (*others, *predict)
        checked = self._checked  # read once: threads may share the plan
        # The very same floats have been checked. Comparing takes 0.3 us, checking again 3 us.
        reads = is_in_memory(step)  # a kernel does
        if reads or checked is None or not _same(given, checked.given):
            if reads or not _same(given, self._given) or not _are_plain(others, predict):
                self._given = given
                numbers = (*others[:4], step, *others[4:])
                return ROWS["adam_step_"].arguments(numbers, predict, False)
            checked = self._checked = _checked_step(given, others, predict)
        now = checked.first.at(whole_step(step))
        predictions = [(j, [law.adam(now)]) for j, law in checked.laws]
        setting = (*checked.constant, float(now.step), now.term())
        return now.operation, [setting], predictions, None


def _checked_step(
    given: tuple[Any, ...], others: tuple[Any, ...], predict: Sequence[Horizon | None]
) -> _CheckedStep:
    first = ROWS["adam_step_"].rule(*others[:4], 1, *others[4:])
    laws = [(j, law[0]) for j, law in enumerate(_laws(predict)) if law is not None]
    return _CheckedStep(given, first, first.setting()[:-2], laws)


def _same(given: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(given) == len(before) and all(map(is_, given, before))


def _are_plain(numbers: tuple[Any, ...], predict: Sequence[Horizon | None]) -> bool:
    """Whether nothing can change them, as the content of a tensor can change."""
    lr, betas, *rest = numbers
    if type(betas) is not tuple or not _HORIZONS.issuperset(map(type, predict)):
        return False
    return _PLAIN.issuperset(map(type, (lr, *betas, *rest)))


def _step(row_name: str, arguments: dict[str, Any]) -> None:
    """Make the step of a row with all its arguments."""
    row, options = ROWS[row_name], arguments["options"]
    lists = Lists(arguments["params"], "params", writes=True)
    for name, role in row.columns:
        arrays = arguments[name]
        if arrays is not None or name not in row.optional:
            writes = role is not Role.GRADS or bool(options.get("zero_grad"))
            lists.add(role, name, arrays, writes=writes)
    horizons = _add_outs(lists, arguments["predict"])
    plan = lists.plan()
    first = arguments.get("first_step", False)
    step = row.arguments(row.numbers_in(arguments), horizons, first)
    plan.step(*step, first, options, arguments["stream"])
    lists.bump(untouched=Role.MOMENTUM if step[0].endswith("_plain") else None)


def _add_outs(lists: Lists, predict: Sequence[tuple[Horizon, Tensors]]) -> list[Horizon]:
    horizons: list[Horizon] = []
    for j, pair in enumerate(predict):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"predict[{j}]: expected a pair (steps, out), got {pair!r}")
        if pair[0] is None:
            raise TypeError(f"predict[{j}]: expected a number of steps or a law, got None")
        horizons.append(pair[0])
        lists.add(Role.OUT, f"predict[{j}].out", pair[1], writes=True)
    return horizons


@operator
def sgd_step_(
    params: Written,
    grads: Gradients,
    momentum_buffers: Written | None,
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
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    stream: Any = None,
    **options: Unpack[StepOptions],
) -> None:
    """Make one step of torch.optim.SGD and write predictions of the new weights, in one pass.

    The arithmetic, with fused multiply-adds::

        d = g (or -g with maximize) + weight_decay*W
        v = momentum*v + (1 - dampening)*d        (first_step: v = d)
        W = W - lr*v                              (nesterov: W - lr*d - lr*momentum*v)
        out_j = W - lr*steps_j*v                  for every (steps_j, out_j) in predict

    With `smoothed`, v = momentum*v + (1 - momentum)*d, as in the SpecTrain paper. With
    `decoupled_weight_decay`, d = g and W shrinks by 1 - lr*weight_decay before the step.

    Predictions use the stored values, so they have the same bits as a later `predict`.

    Args:
        params: W.
        grads: g, of the parameters' dtype. A tensor whose entry is None is not updated, and its
            outs receive W.
        momentum_buffers: v; may be None if momentum == 0, and is not touched then.
        lr: learning rate, >= 0; a CUDA tensor of one element is read when the kernel runs.
        momentum: factor of the old buffer, >= 0.
        dampening: dampening of the gradient in the buffer.
        weight_decay: L2 penalty, >= 0.
        nesterov: Nesterov momentum; needs momentum > 0 and dampening == 0.
        maximize: maximize the objective instead of minimizing it.
        first_step: the buffer becomes the gradient, as in torch when there is no buffer yet. The
            old content of the buffer is not used.
        predict: pairs of a horizon in updates (>= 0) or a law, and outputs like the parameters.
        grad_scale, found_inf, clip_factor: one float32 element each, on the parameters' device;
            the host does not wait for them. g is multiplied by clip_factor / grad_scale. If
            found_inf is not 0, nothing is written: neither weights, buffers (a first step stays
            one) nor outs. The quotient is computed in double and rounded to the arithmetic type.
            torch's fused optimizers divide every gradient instead: the same bits if the scale is
            a power of two, equal up to rounding otherwise.
        zero_grad: set the gradients to zero in the same pass, after the step and its predictions
            have read them. Also if found_inf skips the step, because the next backward accumulates
            into them. The gradients must not share memory.
        rounding_seed: round bfloat16 weights stochastically, with a probability proportional to
            the distance, so that small updates survive on average without float32 master weights.
            Buffers and predictions are rounded to nearest; predictions use the rounded W. The bits
            depend only on the seed (a 64-bit int) and the element's position in the concatenated
            tensors of the call; they are the same on every device. Use a new seed for every step.
        stream: CUDA stream; None: the current one.

    Example:
        >>> weights, gradients, momentum = torch.ones(2), torch.ones(2), torch.zeros(2)
        >>> ahead = torch.empty(2)
        >>> st.sgd_step_(weights, gradients, momentum, lr=0.25, momentum=0.5, predict=[(2, ahead)])
        >>> weights, ahead
        (tensor([0.7500, 0.7500]), tensor([0.2500, 0.2500]))
    """
    _step("sgd_step_", locals())


@operator
def adam_step_(
    params: Written,
    grads: Gradients,
    exp_avgs: Written,
    exp_avg_sqs: Written,
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
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    stream: Any = None,
    **options: Unpack[StepOptions],
) -> None:
    """Make one step of Adam, AdamW or NAdam and write predictions, in one pass over memory.

    The arithmetic of torch.optim, with fused multiply-adds::

        d = g (or -g with maximize) + weight_decay*W          (AdamW: d = g, W shrinks first)
        m = beta1*m + (1 - beta1)*d
        u = beta2*u + (1 - beta2)*d*d
        W = W - lr/(1 - beta1^step) * m / (sqrt(u)/sqrt(1 - beta2^step) + eps)
        out_j = W - lr*steps_j/(1 - beta1^step) * m / (the same)   for every (steps_j, out_j)

    Args:
        params: W.
        grads: g; bfloat16 or float16 for float32 (master) weights is allowed. A tensor whose entry
            is None is not updated, and its outs receive W.
        exp_avgs: m; like W, float32 for 16-bit weights, or bfloat16 for float32 weights.
        exp_avg_sqs: u, of the dtype of m. In bfloat16 it is rounded stochastically where beta2 is
            above 1 - 2^-8: rounded to nearest, it would not move. The random bits depend only on
            `step` and the element's position in the concatenated tensors of the call. All else is
            rounded to nearest.
        lr: learning rate, >= 0.
        step: number of this update, counted from 1. If `lr` or `step` is a CUDA tensor of one
            element, the kernel reads it when it runs, and what bias correction makes of it has the
            same bits; not for NAdam. Add 1 to such a count before each step, on its stream, and in
            a step that `found_inf` may skip 1 - found_inf.
        betas: (beta1, beta2), each in [0, 1).
        eps: >= 0.
        weight_decay: L2 penalty, or AdamW's decay with `decoupled_weight_decay`.
        decoupled_weight_decay: AdamW.
        maximize: maximize the objective instead of minimizing it.
        momentum_decay: selects NAdam (torch's schedule of mu); usually 4e-3.
        mu_product: NAdam's product of mu_1 to mu_step.
        predict: pairs of a horizon (in updates, or a law of `spectrain_ext.laws`) and outputs like
            the parameters; bfloat16 or float16 is allowed for float32 parameters. Predictions use
            the stored values.
        grad_scale, found_inf, clip_factor: as in `sgd_step_`. A skipped step is not counted: the
            next one has the same number.
        zero_grad, rounding_seed: as in `sgd_step_`.
        stream: CUDA stream; None: the current one.

    Example:
        >>> weights, gradients = torch.ones(2), torch.ones(2)
        >>> m, u, ahead = torch.zeros(2), torch.zeros(2), torch.empty(2)
        >>> st.adam_step_(weights, gradients, m, u, lr=0.25, step=1, predict=[(1, ahead)])
        >>> weights, ahead
        (tensor([0.7500, 0.7500]), tensor([0.5000, 0.5000]))
    """
    _step("adam_step_", locals())


@operator
def lion_step_(
    params: Written,
    grads: Gradients,
    exp_avgs: Written,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    stream: Any = None,
    **options: Unpack[StepOptions],
) -> None:
    """Make one step of Lion and write predictions, in one pass over memory.

    Chen et al., arXiv 2302.06675, with fused multiply-adds::

        d = g (or -g with maximize)
        W = (1 - lr*weight_decay)*W - lr*sign(beta1*m + (1 - beta1)*d)
        m = beta2*m + (1 - beta2)*d
        out_j = W - lr*steps_j*sign(m)/2          for every (steps_j, out_j) in predict

    The direction of the next update needs the next gradient. The prediction takes the sign of m and
    half of the way, as about half of the signs come true. The sign of 0 is 0, of NaN NaN.

    Args:
        params: W.
        grads: g; bfloat16 or float16 for float32 (master) weights is allowed. A tensor whose entry
            is None is not updated, and its outs receive W.
        exp_avgs: m; like W, float32 for 16-bit weights, or bfloat16 for float32 weights.
        lr: learning rate, >= 0; a CUDA tensor of one element is read when the kernel runs.
        betas: (beta1, beta2), each in [0, 1).
        weight_decay: decoupled decay, >= 0.
        maximize: maximize the objective instead of minimizing it.
        predict: pairs of a horizon (in updates, or a law of `spectrain_ext.laws`) and outputs like
            the parameters; bfloat16 or float16 is allowed for float32 parameters. Predictions use
            the stored values.
        grad_scale, found_inf, clip_factor, zero_grad, rounding_seed: as in `sgd_step_`.
        stream: CUDA stream; None: the current one.

    Example:
        >>> weights, gradients, m = torch.ones(2), torch.ones(2), torch.zeros(2)
        >>> ahead = torch.empty(2)
        >>> st.lion_step_(weights, gradients, m, lr=0.25, predict=[(2, ahead)])
        >>> weights, ahead
        (tensor([0.7500, 0.7500]), tensor([0.5000, 0.5000]))
    """
    _step("lion_step_", locals())


#: By name.
ROWS = {
    row.name: row
    for row in (
        StepRow(SgdNumbers, sgd_step_),
        StepRow(AdamNumbers, adam_step_),
        StepRow(LionNumbers, lion_step_),
    )
}
