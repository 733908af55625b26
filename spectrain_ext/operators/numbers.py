"""Checks the hyperparameters of an optimizer step and computes the kernels' coefficients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, SupportsFloat, TypeAlias, cast

from torch import Tensor

from spectrain_ext._C import power  # has the bits of a kernel that reads a step count


class Term(NamedTuple):
    """Coefficients of a real or predicted update: W <- keep*W - (momentum*v + gradient*d) / D.

    v is the momentum buffer and d the gradient with weight decay. D is 1 for SGD and
    sqrt(second moment)*root + eps for Adam. Lion predicts keep*W - momentum*sign(v + gradient*d).
    """

    keep: float
    momentum: float
    gradient: float = 0.0
    root: float = 1.0
    # What a kernel adds per unit of a learning rate, where it reads numbers in memory, see `Rate`.
    keep_per_lr: float = 0.0
    momentum_per_lr: float = 0.0
    gradient_per_lr: float = 0.0
    ahead: float = -1.0  # the updates ahead of `StepCount`, for Adam's bias corrections; -1: none

    def split(self) -> Term:
        """Return the term with each coefficient a + b*lr as the two numbers a and b."""
        (keep, keep_lr), (momentum, momentum_lr), (gradient, gradient_lr) = (
            (x.constant, x.per_lr) if isinstance(x, Rate) else (x, 0.0) for x in self[:3]
        )
        root: Any = self.root
        aheads = {cast(Rate, x).ahead for x in self[1:3] if isinstance(x, Rate) and x}
        if isinstance(root, StepCount):
            aheads.add(root.ahead)
            root = 1.0
        if len(aheads) > 1:
            raise ValueError(
                "lr: expected a number on the host, since this prediction mixes the bias "
                "corrections of several updates in one term"
            )
        (ahead,) = aheads or {-1.0}
        return Term(keep, momentum, gradient, root, keep_lr, momentum_lr, gradient_lr, ahead)


class Rate:
    """The number constant + per_lr*lr, where a kernel computes lr from memory when it runs.

    It takes the place of a learning rate in the formulas of steps and laws, which have to be linear
    in it. The kernel's lr is factor*value. With ``ahead``, it is the first factor of Adam's update
    so many updates ahead: factor*value / (1 - beta1^(count + ahead)).
    """

    __slots__ = ("ahead", "constant", "factor", "per_lr", "value")

    def __init__(
        self,
        value: Tensor | float,
        factor: float = 1.0,
        ahead: float = -1.0,
        constant: float = 0.0,
        per_lr: float = 1.0,
    ) -> None:
        self.value, self.factor, self.ahead = value, factor, ahead
        self.constant, self.per_lr = constant, per_lr

    def _with(self, constant: float, per_lr: float) -> Rate:
        return Rate(self.value, self.factor, self.ahead, constant, per_lr)

    def as_unit(self) -> Rate:
        """Return a multiple of a learning rate as a rate of its own."""
        return self if self.per_lr == 1.0 else Rate(self.value, self.factor * self.per_lr)

    def corrected(self, ahead: float) -> Rate:
        """Return the rate over Adam's bias correction of the first moment."""
        return Rate(self.value, self.factor, ahead)

    def __add__(self, other: float) -> Rate:
        self._check_linear(other)
        return self._with(self.constant + other, self.per_lr)

    def __mul__(self, other: float) -> Rate:
        self._check_linear(other)
        return self._with(self.constant * other, self.per_lr * other)

    def __truediv__(self, other: float) -> Rate:
        self._check_linear(other)
        return self._with(self.constant / other, self.per_lr / other)

    def __neg__(self) -> Rate:
        return self * -1.0

    def __sub__(self, other: float) -> Rate:
        return self + -other

    def __rsub__(self, other: float) -> Rate:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        return self.constant != 0.0 or self.per_lr != 0.0

    def _check_linear(self, other: object) -> None:
        if isinstance(other, Rate):
            where = self.value.device if isinstance(self.value, Tensor) else "the host"
            raise TypeError(
                "lr: expected a number on the host, since this prediction is not linear in it, "
                f"got a learning rate or a step count in memory, on {where}, that a kernel reads"
            )


class StepCount:
    """The number of an update, `value + ahead`, where a kernel reads Adam's step count."""

    __slots__ = ("ahead", "value")

    def __init__(self, value: Tensor | float, ahead: float = 0.0) -> None:
        self.value, self.ahead = value, ahead

    def __add__(self, ahead: float) -> StepCount:
        return StepCount(self.value, self.ahead + ahead)

    __radd__ = __add__


def is_in_memory(value: object) -> bool:
    """Return whether a kernel reads a learning rate or a step count."""
    return isinstance(value, (Rate, StepCount)) or (isinstance(value, Tensor) and value.is_cuda)


#: What terms are computed from when a kernel runs: learning rate, its factor, step count, betas.
Source: TypeAlias = "tuple[Tensor | float, float, Tensor | float, float, float] | None"

# Sign, L2 penalty, decay, gain, second decay, eps, step count, step: as csrc/bindings/numbers.h
# reads them. A NamedTuple would take 0.2 us to create, several times per step.
Setting: TypeAlias = tuple[float, float, float, float, float, float, float, Term]


def number(name: str, value: SupportsFloat) -> float:
    """Return a finite float, or raise TypeError or ValueError. Waits for a value on a device."""
    result = _float(name, value)
    if not math.isfinite(result):
        raise ValueError(f"{name}: expected a finite number, got {result!r}")
    return result


def non_negative(name: str, value: SupportsFloat) -> float:
    """Return a finite float >= 0, see `number`."""
    if type(value) is float and 0.0 <= value < math.inf:  # the common case, made fast
        return value
    result = _float(name, value)
    if not 0.0 <= result < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0, got {result!r}")
    return result


def learning_rate(value: SupportsFloat | Rate) -> float:
    """Return a learning rate >= 0, or a `Rate` for a CUDA tensor, whose value is not checked."""
    if isinstance(value, Tensor) and is_in_memory(value):
        value = Rate(value)
    return cast(float, value.as_unit()) if isinstance(value, Rate) else non_negative("lr", value)


def fraction(name: str, value: SupportsFloat) -> float:
    """Return a float in [0, 1), see `number`."""
    result = non_negative(name, value)
    if result >= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1), got {result!r}")
    return result


def pair_of_betas(betas: Any) -> tuple[float, float]:
    """Return two floats in [0, 1); TypeError or ValueError for anything else."""
    try:
        first, second = betas
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"betas: expected a pair of numbers, got {betas!r}") from None
    return fraction("betas[0]", first), fraction("betas[1]", second)


_WHOLE = 2**53  # a float represents every int up to here
_new = object.__new__


def whole_step(value: SupportsFloat) -> int:
    """Return the number of a step, an int >= 1; torch stores it as a float32 tensor."""
    if type(value) is int and 0 < value < _WHOLE:
        return value
    step = number("step", value)
    if step < 1 or step != int(step):
        raise ValueError(f"step: expected a whole number >= 1, got {value!r}")
    return int(step)


def horizon(name: str, value: SupportsFloat) -> float:
    """Return a number of updates as a float >= 0; TypeError for bools and non-numbers."""
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    if type(value) is int and 0 <= value <= _WHOLE:
        return float(value)
    if isinstance(value, (bool, str, bytes, type)) or value is None:
        what = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise TypeError(
            f"{name}: expected a number of updates or a law of spectrain_ext.laws, such as 2 or "
            f"laws.Geometric(2), got {what}"
        )
    return non_negative(name, value)


def _float(name: str, value: SupportsFloat) -> float:
    if isinstance(value, (str, bytes)):  # float() would parse them
        raise TypeError(f"{name}: expected a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got {value!r}") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None


def _make_non_negative(numbers: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(numbers, name)
        if type(value) is not float or not 0.0 <= value < math.inf:  # cheaper than setting it
            object.__setattr__(numbers, name, non_negative(name, value))


class Corrected(Protocol):
    """A correction that replaces the step's coefficients, see `corrections`."""

    def sgd(self, numbers: SgdNumbers) -> Term:
        """Return the step under SGD."""

    def adam(self, numbers: AdamNumbers) -> Term:
        """Return the step under Adam, AdamW and NAdam."""


class Hyperparameters:
    """Hyperparameters of a parameter group under an update rule.

    The rule's operations in csrc/kernels/operations.h are called by its name: "<rule>_step", or
    "<rule>_plain" for steps without momentum, and "<rule>_predict".
    """

    __slots__ = ()
    rule: ClassVar[str]
    lr: float

    @property
    def has_momentum(self) -> bool:
        return True

    @property
    def operation(self) -> str:
        """Name of the operation that makes a step."""
        return self.rule + ("_step" if self.has_momentum else "_plain")

    def setting(self) -> Setting:
        """Return the kernel's coefficients of a step."""
        raise NotImplementedError

    def source(self) -> Source:
        """Return what the kernel computes terms from; None: they are numbers."""
        lr = cast("float | Rate", self.lr)
        return (lr.value, lr.factor, 0.0, 0.0, 0.0) if isinstance(lr, Rate) else None


@dataclass(frozen=True, slots=True)
class SgdNumbers(Hyperparameters):
    """Hyperparameters of SGD with torch's momentum, or with that of smoothed gradients."""

    rule: ClassVar[str] = "sgd"
    trust: ClassVar[float] = 1.0  # factor of the momentum's last change in predictions

    # The arguments of `spectrain_ext.sgd_step_`.
    lr: float  # or a CUDA tensor with one element, which kernels read
    momentum: float
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    smoothed: bool = False
    correction: Corrected | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", learning_rate(self.lr))
        _make_non_negative(self, ("momentum", "weight_decay"))
        if type(self.dampening) is not float or self.dampening != 0.0:
            object.__setattr__(self, "dampening", number("dampening", self.dampening))
        if self.nesterov and (self.momentum <= 0.0 or self.dampening != 0.0):
            raise ValueError("nesterov: needs momentum > 0 and dampening == 0")
        if self.smoothed and (self.dampening != 0.0 or not 0.0 < self.momentum < 1.0):
            raise ValueError("smoothed: needs 0 < momentum < 1 and dampening == 0")

    @property
    def has_momentum(self) -> bool:
        return self.momentum != 0.0

    @property
    def gain(self) -> float:
        """Factor of the gradient in the momentum buffer."""
        return 1.0 - self.momentum if self.smoothed else 1.0 - self.dampening

    @property
    def l2(self) -> float:
        return 0.0 if self.decoupled_weight_decay else self.weight_decay

    @property
    def keep(self) -> float:
        """Factor that weight decay leaves of the weights."""
        return 1.0 - self.lr * self.weight_decay if self.decoupled_weight_decay else 1.0

    def term(self) -> Term:
        """Return the step without its correction."""
        if self.momentum == 0.0:
            return Term(self.keep, 0.0, self.lr)
        if self.nesterov:
            return Term(self.keep, self.lr * self.momentum, self.lr * self.gain)
        return Term(self.keep, self.lr)

    def setting(self) -> Setting:
        step = self.term() if self.correction is None else self.correction.sgd(self)
        if isinstance(self.lr, Rate):
            step = step.split()
        sign = -1.0 if self.maximize else 1.0
        return sign, self.l2, self.momentum, self.gain, 0.0, 0.0, 0.0, step


@dataclass(frozen=True)  # without slots, which `at` would copy one by one
class AdamNumbers(Hyperparameters):
    """Hyperparameters of torch.optim's Adam, AdamW or NAdam."""

    rule: ClassVar[str] = "adam"
    has_momentum: ClassVar[bool] = True  # faster than a property
    operation: ClassVar[str] = "adam_step"

    # The arguments of `spectrain_ext.adam_step_`. If learning rate or step is a CUDA tensor,
    # a kernel reads it, and formulas have `Rate` and `StepCount` for both.
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    # The current update, or for a prediction without a step the last one. Required: 0 is invalid.
    step: int = 0
    decoupled_weight_decay: bool = False
    maximize: bool = False
    momentum_decay: float | None = None
    mu_product: float = 1.0
    correction: Corrected | None = None

    def __post_init__(self) -> None:
        _make_non_negative(self, ("eps", "weight_decay"))
        if type(self.lr) is not float or not 0.0 <= self.lr < math.inf:
            object.__setattr__(self, "lr", learning_rate(self.lr))
        object.__setattr__(self, "betas", pair_of_betas(self.betas))
        self._set_step(self.step)
        if self.momentum_decay is not None:
            decay = non_negative("momentum_decay", self.momentum_decay)
            object.__setattr__(self, "momentum_decay", decay)
            object.__setattr__(self, "mu_product", fraction("mu_product", self.mu_product))

    def _set_step(self, step: Any) -> None:
        if not is_in_memory(step) and not isinstance(self.lr, Rate):
            object.__setattr__(self, "step", whole_step(step))
            return
        if self.momentum_decay is not None:
            raise ValueError(
                "momentum_decay: NAdam needs learning rate and step count on the host, got a tensor"
            )
        if not isinstance(step, StepCount):
            step = StepCount(step if is_in_memory(step) else float(whole_step(step)))
        object.__setattr__(self, "step", step)
        if not isinstance(self.lr, Rate):
            object.__setattr__(self, "lr", Rate(self.lr))

    def at(self, step: Any, mu_product: float | None = None) -> AdamNumbers:
        """Return the hyperparameters of another step, whose numbers are valid: none is checked."""
        made = _new(AdamNumbers)
        made.__dict__.update(self.__dict__, step=step)
        if isinstance(step, StepCount) or isinstance(self.lr, Rate):
            made._set_step(step)
        if mu_product is not None:
            made.__dict__["mu_product"] = mu_product
        return made

    def mu(self, step: float) -> float:
        """Return NAdam's momentum at an update (Dozat 2016, torch's schedule)."""
        assert self.momentum_decay is not None
        return self.betas[0] * (1.0 - 0.5 * cast(float, 0.96 ** (step * self.momentum_decay)))

    def root(self, step: float) -> float:
        """Return the bias correction of the second moment's square root."""
        if isinstance(step, StepCount):
            return cast(float, step)
        return 1.0 / math.sqrt(1.0 - power(self.betas[1], step))

    def rate(self, ahead: int = 0) -> float:
        """Return the first moment's factor in the update `ahead` updates from now."""
        step: Any = self.step + ahead
        if isinstance(self.lr, Rate):
            return cast(float, self.lr.corrected(step.ahead))
        if self.momentum_decay is None:
            return self.lr / (1.0 - power(self.betas[0], step))
        product = self.mu_product
        for i in range(1, ahead + 1):
            product *= self.mu(self.step + i)
        following = self.mu(step + 1)
        return self.lr * following / (1.0 - product * following)

    @property
    def keep(self) -> float:
        """Factor that weight decay leaves of the weights."""
        return 1.0 - self.lr * self.weight_decay if self.decoupled_weight_decay else 1.0

    def term(self) -> Term:
        """Return the step without its correction."""
        gradient = 0.0
        if self.momentum_decay is not None:
            gradient = self.lr * (1.0 - self.mu(self.step)) / (1.0 - self.mu_product)
        return Term(self.keep, self.rate(), gradient, self.root(self.step))

    def setting(self) -> Setting:
        beta1, beta2 = self.betas
        step = self.term() if self.correction is None else self.correction.adam(self)
        l2 = 0.0 if self.decoupled_weight_decay else self.weight_decay
        sign = -1.0 if self.maximize else 1.0
        count = 0.0  # of a kernel that reads it
        if isinstance(self.lr, Rate):
            step = step.split()
        else:
            count = float(self.step)
        return sign, l2, beta1, 1.0 - beta1, beta2, self.eps, count, step

    def source(self) -> Source:
        lr, step = cast("float | Rate", self.lr), cast("int | StepCount", self.step)
        if not isinstance(lr, Rate) or not isinstance(step, StepCount):
            return None
        return lr.value, lr.factor, step.value, *self.betas


@dataclass(frozen=True, slots=True)
class LionNumbers(Hyperparameters):
    """Hyperparameters of Lion (Chen et al., arXiv 2302.06675)."""

    rule: ClassVar[str] = "lion"
    # The share of an update that predictions move. The next direction needs the next gradient. In a
    # character transformer the sign of the average had .35 to .74 of the next update's signs (less
    # those that differ), the last update .09 to .64. A prediction is best with this share.
    trust: ClassVar[float] = 0.5

    # The arguments of `spectrain_ext.lion_step_`.
    lr: float  # or a CUDA tensor with one element, which kernels read
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", learning_rate(self.lr))
        _make_non_negative(self, ("weight_decay",))
        object.__setattr__(self, "betas", pair_of_betas(self.betas))

    @property
    def keep(self) -> float:
        """Factor that weight decay leaves of the weights."""
        return 1.0 - self.lr * self.weight_decay

    def setting(self) -> Setting:
        beta1, beta2 = self.betas
        step = Term(self.keep, 0.0, self.lr)
        if isinstance(self.lr, Rate):
            step = step.split()
        sign = -1.0 if self.maximize else 1.0
        return sign, 0.0, beta2, 1.0 - beta2, beta1, 0.0, 0.0, step
