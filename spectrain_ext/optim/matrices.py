"""Muon and SOAP: matrices by updates of their own, and AdamW for the rest, with predictions.

Their updates are expressed as steps of SGD, so that all prediction laws apply.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.calls import Role
from spectrain_ext.operators.numbers import Adam, Sgd, fraction, non_negative, number

from .base import PredictingOptimizer
from .optimizers import ADAM, AdamW
from .saved import loose_dtype
from .state import Group, Rule, betas_of, plain, rate_of

if TYPE_CHECKING:
    from spectrain_ext.operators.corrections import Correction

State: TypeAlias = MutableMapping[str, Any]  # of one parameter

_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate(Sgd):
    """A matrix update as SGD with momentum 1, whose gradient is the change of the update.

    SGD's buffer is then the last update, so every law of SGD predicts along it, and the
    second-order law uses its last change.
    """

    # Half the last change: the norm of such an update hardly depends on the gradient's. With half,
    # Muon with gradients 1, 2 or 4 updates late ended with a lower loss than with none of the
    # change or the difference law, and from 2 on lower than with all of it. At 7 updates seeds
    # differ by as much. For SOAP none, half and all differ less than seeds.
    trust: ClassVar[float] = 0.5

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        """Update momentum and other state; return this step's update, shaped like the weight."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonal(MatrixUpdate):
    """Hyperparameters of Muon's update, the orthogonalized momentum."""

    beta: float
    mixes: bool  # Nesterov
    coefficients: tuple[float, float, float]
    eps: float
    iterations: int
    adjusts: str | None

    def __post_init__(self) -> None:
        MatrixUpdate.__post_init__(self)  # slots: no super()
        non_negative("momentum", self.beta)
        non_negative("eps", self.eps)
        if not isinstance(self.coefficients, tuple) or len(self.coefficients) != 3:
            raise ValueError(f"ns_coefficients: expected three, got {self.coefficients!r}")
        for i, coefficient in enumerate(self.coefficients):
            number(f"ns_coefficients[{i}]", coefficient)
        if type(self.iterations) is not int or not 0 <= self.iterations < 100:
            raise ValueError(f"ns_steps: expected 0 to 99, got {self.iterations!r}")
        if self.adjusts not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                "adjust_lr_fn: expected one of None, 'original', 'match_rms_adamw', "
                f"got {self.adjusts!r}"
            )

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        gradient = gradient.to(momentum.dtype)
        momentum.lerp_(gradient, 1.0 - self.beta)
        mixed = gradient.lerp(momentum, self.beta) if self.mixes else momentum
        new = orthogonalized(mixed, self.coefficients, self.iterations, self.eps)
        rows, columns = weight.shape
        ratio = 0.2 * math.sqrt(max(rows, columns))
        if self.adjusts != "match_rms_adamw":
            ratio = math.sqrt(max(1.0, rows / columns))
        return torch.empty_like(weight).copy_(new).mul_(ratio)


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> Tensor:
    """Approximate U V^T of a matrix U S V^T, in bfloat16, by fifth-order Newton-Schulz iterations.

    The iteration is that of https://kellerjordan.github.io/posts/muon, with the order of operations
    of torch.optim.Muon. Singular values end between about 0.7 and 1.2.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if is_tall else x
    x /= x.norm().clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated(MatrixUpdate):
    """Hyperparameters of SOAP's update, with an unrotated momentum."""

    adam: Adam
    shampoo_beta: float
    frequency: int
    max_dimension: int

    def __post_init__(self) -> None:
        MatrixUpdate.__post_init__(self)  # slots: no super()
        fraction("shampoo_beta", self.shampoo_beta)
        for name, value, least in (
            ("precondition_frequency", self.frequency, 1),
            ("max_dimension", self.max_dimension, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: expected a whole number >= {least}, got {value!r}")

    def loose(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return keys and shapes of a matrix's state outside the buffers of ``bind``."""
        shapes = {"exp_avg_sq": tuple(shape)}
        for side, size in zip(_SIDES, shape, strict=True):
            if size <= self.max_dimension:
                shapes[side] = shapes[f"{side}_basis"] = size, size
        return shapes

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        dtype = loose_dtype(weight)
        is_new = {}
        for key, shape in self.loose(weight.shape).items():
            tensor = state.get(key)
            is_new[key] = tensor is None
            if tensor is None:
                tensor = torch.zeros(shape, device=weight.device)
            state[key] = tensor.to(weight.device, dtype)  # the parameter may have moved
        momentum.lerp_(gradient.to(momentum.dtype), 1.0 - self.adam.betas[0])
        gradient, squares = gradient.to(dtype), state["exp_avg_sq"]
        bases: list[Tensor | None] = [None, None]
        for i, side in enumerate(_SIDES):
            if side not in is_new:
                continue
            rows, basis = (gradient.T if i else gradient), state[f"{side}_basis"]
            covariance = state[side].lerp_(rows @ rows.T, 1.0 - self.shampoo_beta)
            if is_new[f"{side}_basis"]:
                basis.copy_(_eigenvectors(covariance))
            elif step % self.frequency == 0:
                turned = covariance @ basis
                order = (basis * turned).sum(0).argsort(descending=True)
                squares.copy_(squares.index_select(i, order))
                basis.copy_(torch.linalg.qr(turned[:, order]).Q)  # an iteration of the power method
            bases[i] = basis
        left, right = bases
        into = None if left is None else left.T, right
        out_of = left, None if right is None else right.T

        beta1, beta2 = self.adam.betas
        turned = _turned(gradient, *into)
        squares.mul_(beta2).addcmul_(turned, turned, value=1.0 - beta2)
        scaled = _turned(momentum.to(dtype), *into) / squares.sqrt().add_(self.adam.eps)
        factor = (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step)
        return torch.empty_like(weight).copy_(_turned(scaled, *out_of).mul_(factor))


def _turned(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return eigenvectors by descending eigenvalue, or the identity (Adam) if it fails."""
    if bool(matrix.isfinite().all()):  # no extra cost: eigh synchronizes too
        for dtype in (matrix.dtype, torch.float64):
            try:
                vectors: Tensor = torch.linalg.eigh(matrix.to(dtype)).eigenvectors
                return vectors.flip(1)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                continue
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _of_updates(group: Group) -> dict[str, Any]:
    decay = plain(group["weight_decay"], "weight_decay")
    decoupled = {"weight_decay": decay, "decoupled_weight_decay": True}
    return {"lr": rate_of(group["lr"]), "momentum": 1.0, **decoupled}


def _muon_numbers(group: Group) -> Orthogonal:
    return Orthogonal(
        **_of_updates(group),
        beta=plain(group["momentum"], "momentum"),
        mixes=bool(group["nesterov"]),
        coefficients=group["ns_coefficients"],
        eps=group["eps"],
        iterations=group["ns_steps"],
        adjusts=group["adjust_lr_fn"],
    )


def _soap_numbers(group: Group) -> Rotated:
    adam = Adam(1.0, betas_of(group), plain(group["eps"], "eps"), step=1)
    beta = group["shampoo_beta"]
    return Rotated(
        **_of_updates(group),
        adam=adam,
        shampoo_beta=adam.betas[1] if beta is None else plain(beta, "shampoo_beta"),
        frequency=group["precondition_frequency"],
        max_dimension=group["max_dimension"],
    )


#: The kernel uses the update; the momentum behind it is not the kernel's.
_MUON = Rule(
    _muon_numbers,
    buffers=("update_buffer", "momentum_buffer"),
    columns={"momentum_buffers": Role.MOMENTUM},
    scalars={"step": 0.0},
    refused={},
    kind="use_muon",
    rest=ADAM,
)
_SOAP = replace(
    _MUON,
    numbers=_soap_numbers,
    buffers=("update_buffer", "exp_avg"),
    loose=("exp_avg_sq", *_SIDES, *(f"{side}_basis" for side in _SIDES)),
    kind="rotated",
)


class _OfMatrices(PredictingOptimizer):
    """Base of ``Muon`` and ``SOAP``: parameter groups of matrices, and AdamW's for the rest."""

    _rest: dict[str, Any]
    hidden: frozenset[Tensor] | None = None  # pipelines check that stages have all of them

    def _make(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        adamw: Mapping[str, Any],
        hidden: Collection[Tensor] | None,
    ) -> None:
        key = self._rule.kind
        self._rest = {**AdamW([torch.empty(0)], **adamw).defaults, key: False}
        self.hidden = None if hidden is None else _checked_hidden(hidden)
        # Not the constructor of torch's Muon, which refuses the rest.
        torch.optim.Optimizer.__init__(self, params, {**defaults, key: True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, or split a mixed one into two."""
        key, kinds = self._rule.kind, dict[bool, list[Any]]({True: [], False: []})
        params = param_group["params"]
        for entry in [params] if isinstance(params, Tensor) else params:
            p = entry[1] if isinstance(entry, tuple) else entry
            is_matrix = bool(param_group.get(key, self._is_hidden(p)))
            if is_matrix and p.dim() != 2:
                raise ValueError(
                    f"{key}: expected matrices alone, got a parameter of shape {tuple(p.shape)}"
                )
            kinds[is_matrix].append(entry)
        if all(kinds.values()) and len(param_group) > 1:
            raise ValueError(
                "param_group: its options are for hidden matrices or for the rest, and it has "
                f"both; give each a group of its own, with {key}=True and {key}=False"
            )
        count, defaults = len(self.param_groups), self.defaults
        try:
            for is_matrix in [kind for kind, mine in kinds.items() if mine] or [True]:
                self.defaults = defaults if is_matrix else self._rest
                # torch rejects a set
                mine = params if isinstance(params, set) else kinds[is_matrix]
                super().add_param_group({**param_group, "params": mine})
        except Exception:
            del self.param_groups[count:]
            raise
        finally:
            self.defaults = defaults

    def _is_hidden(self, p: Any) -> bool:
        is_matrix = isinstance(p, Tensor) and p.dim() == 2
        return is_matrix and (self.hidden is None or p in self.hidden)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of ``PredictingOptimizer`` and the settings for later groups."""
        return {**super().__getstate__(), "_rest": self._rest, "hidden": self.hidden}

    def check_correction(self, correction: Correction | None) -> None:
        """Raise ValueError: no correction is defined for updates of matrices."""
        if correction is not None:
            raise ValueError(
                f"{correction} is not defined for the updates of {type(self).__name__}"
            )


def _checked_hidden(hidden: Collection[Tensor]) -> frozenset[Tensor]:
    for n, p in enumerate(hidden):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"hidden[{n}]: expected a parameter, got {p!r}; hidden_matrices(model) returns them"
            )
        if p.dim() != 2:
            raise ValueError(
                f"hidden[{n}]: expected matrices alone, got a parameter of shape {tuple(p.shape)}"
            )
    return frozenset(hidden)


class Muon(_OfMatrices, torch.optim.Muon):
    """Muon for hidden matrices and AdamW for the rest, in one optimizer with predictions.

    Arguments, groups and results are those of ``torch.optim.Muon`` for matrices, whose
    ``state_dict`` loads here, and those of ``AdamW`` for the rest. The key ``use_muon`` of a
    parameter group selects between them. A group without this key and without other options, such
    as a plain list of parameters, is split into its hidden matrices and the rest. Torch's matrix
    products orthogonalize; the step is one kernel launch per device and kind.

    Args:
        params: parameters, named parameters or parameter groups, as ``SGD``.
        lr: learning rate of matrices (>= 0).
        weight_decay: decoupled decay of matrices (>= 0).
        momentum: decay of the averaged gradient (>= 0).
        nesterov: orthogonalize the average mixed with the gradient.
        ns_coefficients: coefficients of the Newton-Schulz iteration.
        eps: lower bound of the norm that a matrix is divided by before the iteration.
        ns_steps: iterations, fewer than 100.
        adjust_lr_fn: ``"original"`` (or None) multiplies the update by ``sqrt(max(1, rows /
            columns))``, ``"match_rms_adamw"`` by ``0.2 * sqrt(max(rows, columns))``.
        hidden: the hidden matrices, usually ``hidden_matrices(model)``; None: all parameters with
            two dimensions. Those of other optimizers may be in it; a pipeline refuses trainable
            ones that no stage has.
        adamw: options of ``AdamW`` for the rest. Its ``lr`` defaults to Muon's with
            ``adjust_lr_fn="match_rms_adamw"``, which makes updates as large as AdamW's, else 1e-3.
        momentum_dtype: dtype of all state, as in ``SGD``.

    Raises:
        ValueError: a number out of range, a parameter in ``hidden`` or with ``use_muon`` that is
            not a matrix, or a mixed group with options but without ``use_muon``.
        TypeError: as in ``SGD``; an option that ``AdamW`` does not have; a name in ``hidden``.

    A matrix has the state ``momentum_buffer`` and ``update_buffer``, its last adjusted update U:
    ``W <- (1 - lr*weight_decay)*W - lr*U``. The prediction ``steps`` updates ahead is
    ``W - lr*steps*U``; ``laws.Geometric`` includes the decay, and ``laws.SecondOrder`` adds half
    the last change of U. ``bind`` keeps AdamW's moments in the same two buffers.

    Example:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
        >>> hidden = st.optim.hidden_matrices(model)
        >>> optimizer = st.optim.Muon(model.parameters(), lr=0.02, hidden=hidden)
        >>> [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups]
        [(True, 1), (False, 4)]
    """

    _rule = _MUON

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        hidden: Collection[Tensor] | None = None,
        adamw: Mapping[str, Any] = {},
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        if adjust_lr_fn == "match_rms_adamw":
            adamw = {"lr": lr, **adamw}
        defaults = {
            **{"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov},
            **{"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps},
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._make(params, defaults, adamw, hidden)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict, see ``SGD``; after one of torch's Muon, predictions need a step."""
        state = {}
        for key, entry in state_dict["state"].items():
            if "momentum_buffer" in entry and "update_buffer" not in entry:
                last = torch.zeros_like(entry["momentum_buffer"])
                entry = {**entry, "step": 0.0, "update_buffer": last}
            state[key] = entry
        super().load_state_dict({**state_dict, "state": state})


class SOAP(_OfMatrices):
    """Adam in the eigenbasis of gradients for matrices, AdamW for the rest, with predictions.

    SOAP (arXiv 2409.11321) with an unrotated momentum, as in basis rotation (arXiv 2602.03515); in
    exact arithmetic both are equal. L and R are averages of G G^T and G^T G over the gradients G of
    a matrix. Every ``precondition_frequency`` steps, one power iteration and a QR decomposition
    update their eigenvectors Q_L and Q_R. The second moments are averages of (Q_L^T G Q_R)^2. The
    update is Adam's in that basis, rotated back. The key ``rotated`` of a parameter group selects
    SOAP or AdamW; a plain list is split as in ``Muon``.

    Args:
        params: parameters, named parameters or parameter groups, as ``SGD``.
        lr: learning rate of matrices (>= 0).
        betas: decay of the first and of the second moment, each in [0, 1).
        shampoo_beta: decay of the covariances, in [0, 1); None: ``betas[1]``.
        eps: added to the root of the second moment (>= 0).
        weight_decay: decoupled decay of matrices (>= 0).
        precondition_frequency: steps between updates of the basis.
        max_dimension: longer sides of a matrix are not rotated.
        hidden: the matrices to rotate, as in ``Muon``; None: all parameters with two dimensions,
            which was better with stale gradients than ``hidden_matrices(model)``.
        adamw: options of ``AdamW`` for the rest; ``lr`` and ``betas`` default to the same values.
        momentum_dtype: dtype of first moment and update, as in ``SGD``; other state is float32, or
            float64 for a float64 parameter.

    Raises:
        ValueError: a number out of range, a parameter in ``hidden`` or with ``rotated`` that is not
            a matrix, or a mixed group with options but without ``rotated``.
        TypeError: as in ``SGD``; an option that ``AdamW`` does not have; a name in ``hidden``.

    A matrix has the state ``exp_avg``, ``exp_avg_sq`` (in the basis), ``left``, ``right``,
    ``left_basis``, ``right_basis`` and ``update_buffer``, its last update U with bias corrections:
    ``W <- (1 - lr*weight_decay)*W - lr*U``. Predictions are those of ``Muon``. A gradient that is
    not finite makes the whole matrix NaN; with ``AdamW`` it affects single elements.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
        >>> optimizer = st.optim.SOAP(model.parameters(), lr=3e-3)
        >>> [(group["rotated"], len(group["params"])) for group in optimizer.param_groups]
        [(True, 2), (False, 2)]
    """

    _rule = _SOAP

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        precondition_frequency: int = 3,
        max_dimension: int = 10_000,
        *,
        hidden: Collection[Tensor] | None = None,
        adamw: Mapping[str, Any] = {},
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        defaults = {
            **{"lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps},
            **{"weight_decay": weight_decay, "max_dimension": max_dimension},
            "precondition_frequency": precondition_frequency,
        }
        self._make(params, defaults, {"lr": lr, "betas": betas, **adamw}, hidden)


def hidden_matrices(model: nn.Module) -> set[Tensor]:
    """Return the parameters for Muon: the matrices between embeddings and head.

    These are all parameters with two dimensions, except those of ``nn.Embedding``,
    ``nn.EmbeddingBag`` and the last module with such a parameter, assumed to be the head
    (https://kellerjordan.github.io/posts/muon). Call it after ``materialize``, which makes new
    parameters.

    Example:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
        >>> [tuple(matrix.shape) for matrix in st.optim.hidden_matrices(model)]
        [(4, 4)]
    """
    matrices: set[Tensor] = set()
    embeddings: set[Tensor] = set()
    last: set[Tensor] = set()  # in the end those of the head
    for module in model.modules():
        last = {p for p in module.parameters(recurse=False) if p.dim() == 2} or last
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            embeddings |= last
        matrices |= last
    return matrices - embeddings - last
