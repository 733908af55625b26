"""The numbers of one optimizer step: checked, and made the coefficients that kernels take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, SupportsFloat, TypeAlias, cast

from .expressions import Expression, traced


class Term(NamedTuple):
    """One update, real or predicted: W <- keep*W - (momentum*v + gradient*d) / D.

    v is the momentum buffer, d the gradient with weight decay. D is 1 for SGD, and
    sqrt(second moment)*root + eps for Adam.
    """

    keep: float
    momentum: float
    gradient: float = 0.0
    root: float = 1.0


# In the order of _C.SETTING. No NamedTuple: making one takes 0.2 us, and every step makes a few.
Setting: TypeAlias = tuple[float, float, float, float, float, float, Term]


def number(name: str, value: SupportsFloat) -> float:
    """A finite float (TypeError, ValueError); what is read when the kernel runs, unchecked."""
    result = _float(name, value)
    if type(result) is float and not math.isfinite(result):
        raise ValueError(f"{name}: expected a finite number, got {result!r}")
    return result


def non_negative(name: str, value: SupportsFloat) -> float:
    """The same, and not negative."""
    if type(value) is float and 0.0 <= value < math.inf:  # the common case, without a detour
        return value
    result = _float(name, value)
    if type(result) is float and not 0.0 <= result < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0, got {result!r}")
    return result


def fraction(name: str, value: SupportsFloat) -> float:
    """The same, and below 1."""
    result = non_negative(name, value)
    if type(result) is float and result >= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1), got {result!r}")
    return result


_WHOLE = 2**53  # up to here every int is a float


def horizon(name: str, value: SupportsFloat) -> float:
    """A number of updates, as `non_negative`; no bool, and the TypeError says what it may be."""
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
    if isinstance(value, (str, bytes)):  # float() would read them
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not isinstance(value, (int, float)) and (expression := traced(name, value)) is not None:
        return cast(float, expression)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got {value!r}") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None


def _make_non_negative(numbers: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(numbers, name)
        if type(value) is not float or not 0.0 <= value < math.inf:  # asking is cheaper
            object.__setattr__(numbers, name, non_negative(name, value))


class Corrected(Protocol):
    """What says the step otherwise, see `corrections`."""

    def sgd(self, numbers: Sgd) -> Term:
        """The step under SGD."""

    def adam(self, numbers: Adam) -> Term:
        """The step under Adam, AdamW and NAdam."""


@dataclass(frozen=True, slots=True)
class Sgd:
    """SGD with momentum as torch.optim.SGD has it, or with an averaged (EMA) momentum."""

    trust: ClassVar[float] = 1.0  # in the momentum's last change, of a second-order prediction

    # Arguments of `spectrain_ext.sgd_step_`, which says what they are.
    lr: float
    momentum: float
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    ema: bool = False
    correction: Corrected | None = None  # gives the step otherwise

    def __post_init__(self) -> None:
        _make_non_negative(self, ("lr", "momentum", "weight_decay"))
        if type(self.dampening) is not float or self.dampening != 0.0:
            object.__setattr__(self, "dampening", number("dampening", self.dampening))
        # A momentum that is not known here is taken for one that will do.
        momentum = 0.5 if isinstance(self.momentum, Expression) else self.momentum
        if self.nesterov and (momentum <= 0.0 or self.dampening != 0.0):
            raise ValueError("nesterov: needs momentum > 0 and dampening == 0")
        if self.ema and (self.dampening != 0.0 or not 0.0 < momentum < 1.0):
            raise ValueError("ema: needs 0 < momentum < 1 and dampening == 0")

    @property
    def has_momentum(self) -> bool:
        return self.momentum != 0.0

    @property
    def gain(self) -> float:
        """The share of the gradient that the buffer takes."""
        return 1.0 - self.momentum if self.ema else 1.0 - self.dampening

    @property
    def l2(self) -> float:
        return 0.0 if self.decoupled_weight_decay else self.weight_decay

    def keep(self, lr: float) -> float:
        """What an update leaves of the weights."""
        return 1.0 - lr * self.weight_decay if self.decoupled_weight_decay else 1.0

    def term(self) -> Term:
        """The step without its correction."""
        keep = self.keep(self.lr)
        if self.momentum == 0.0:
            return Term(keep, 0.0, self.lr)
        if self.nesterov:
            return Term(keep, self.lr * self.momentum, self.lr * self.gain)
        return Term(keep, self.lr)

    def setting(self) -> Setting:
        step = self.term() if self.correction is None else self.correction.sgd(self)
        sign = -1.0 if self.maximize else 1.0
        return sign, self.l2, self.momentum, self.gain, 0.0, 0.0, step


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, AdamW or NAdam as torch.optim has them."""

    has_momentum: ClassVar[bool] = True

    # Arguments of `spectrain_ext.adam_step_`, which says what they are.
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    # The update that is made now, or (for a prediction alone) the last one made.
    step: int = 0  # which no update has: it has to be given
    decoupled_weight_decay: bool = False
    maximize: bool = False
    momentum_decay: float | None = None
    mu_product: float = 1.0
    correction: Corrected | None = None  # gives the step otherwise

    def __post_init__(self) -> None:
        _make_non_negative(self, ("lr", "eps", "weight_decay"))
        try:
            first, second = self.betas
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"betas: expected a pair of numbers, got {self.betas!r}") from None
        betas = fraction("betas[0]", first), fraction("betas[1]", second)
        object.__setattr__(self, "betas", betas)
        if type(self.step) is not int or not 0 < self.step < _WHOLE:
            step = number("step", self.step)
            if type(step) is float:
                if step < 1 or step != int(step):
                    raise ValueError(f"step: expected a whole number >= 1, got {self.step!r}")
                step = int(step)  # torch keeps it as a float32 tensor
            object.__setattr__(self, "step", step)
        if self.momentum_decay is not None:
            decay = non_negative("momentum_decay", self.momentum_decay)
            object.__setattr__(self, "momentum_decay", decay)
            object.__setattr__(self, "mu_product", fraction("mu_product", self.mu_product))

    def mu(self, step: float) -> float:
        """NAdam's momentum of an update (Dozat 2016, with torch's schedule)."""
        assert self.momentum_decay is not None
        return self.betas[0] * (1.0 - 0.5 * cast(float, 0.96 ** (step * self.momentum_decay)))

    def root(self, step: float) -> float:
        """The bias correction of the second moment's root."""
        return cast(float, (1.0 - self.betas[1] ** step) ** -0.5)

    def rate(self, lr: float, ahead: int = 0) -> float:
        """What an update multiplies the first moment by, `ahead` updates from now."""
        step = self.step + ahead if ahead else self.step
        if self.momentum_decay is None:
            return lr / (1.0 - self.betas[0] ** step)
        product = self.mu_product
        for i in range(1, ahead + 1):
            product *= self.mu(self.step + i)
        following = self.mu(step + 1)
        return lr * following / (1.0 - product * following)

    def keep(self, lr: float) -> float:
        """What an update leaves of the weights."""
        return 1.0 - lr * self.weight_decay if self.decoupled_weight_decay else 1.0

    def term(self) -> Term:
        """The step without its correction."""
        gradient = 0.0
        if self.momentum_decay is not None:
            gradient = self.lr * (1.0 - self.mu(self.step)) / (1.0 - self.mu_product)
        return Term(self.keep(self.lr), self.rate(self.lr), gradient, self.root(self.step))

    def setting(self) -> Setting:
        beta1, beta2 = self.betas
        step = self.term() if self.correction is None else self.correction.adam(self)
        l2 = 0.0 if self.decoupled_weight_decay else self.weight_decay
        sign = -1.0 if self.maximize else 1.0
        return sign, l2, beta1, 1.0 - beta1, beta2, self.eps, step
