"""Implements torch.optim's SGD, Adam, AdamW, NAdam and Muon, and SOAP, with predictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.corrections import Correction

from . import rule
from .base import PredictingOptimizer

_EXTRAS = ("smoothed", "decoupled_weight_decay")  # options of SGD that torch's does not have


class SGD(PredictingOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum, which can predict weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are those of ``torch.optim.SGD``;
    checkpoints load in both directions. A step is one kernel launch per device for all groups (two
    if some groups have momentum and others do not). The arithmetic is float64 for float64 weights
    and float32 for all others. 16-bit weights and momentum are rounded once per step, while torch's
    unfused step rounds after every operation.

    Args:
        params: parameters, named parameters or parameter groups: float32, float64, float16 or
            bfloat16, strided, on any devices.
        lr: learning rate (>= 0), a number or a CPU tensor with one element, or one on the device of
            all parameters, which kernels read when they run.
        momentum: momentum factor mu (>= 0).
        dampening: dampening of the gradient in the momentum, not applied to a buffer's first step.
        weight_decay: L2 penalty (>= 0).
        nesterov: Nesterov momentum; needs momentum and no dampening.
        maximize: ascend instead of descend.
        foreach: accepted for compatibility, without effect.
        differentiable: must be False.
        fused: accepted for compatibility, without effect.
        momentum_dtype: dtype of the momentum buffers; None means the parameter's. 16-bit parameters
            may have ``torch.float32`` momentum.
        smoothed: the momentum is the SpecTrain paper's smoothed gradient,
            ``v = momentum*v + (1 - momentum)*g`` from ``v = 0``; needs ``0 < momentum < 1`` and no
            dampening.
        decoupled_weight_decay: multiply the weights by ``1 - lr*weight_decay`` before each step
            instead of adding an L2 penalty to the gradient.

    ``smoothed`` and ``decoupled_weight_decay`` can be set per parameter group. They are keys of the
    groups only if one of them is used.

    Raises:
        ValueError: ``differentiable=True``, a number out of range or NaN, a duplicate parameter.
        TypeError: a parameter's dtype or ``momentum_dtype`` is not supported.

    The prediction ``steps`` updates ahead is ``W - lr*steps*v``, with v the momentum buffer
    (SpecTrain, arXiv 1809.02839, equation 4). A parameter without a momentum buffer is predicted to
    stay unchanged.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> for _ in range(3):
        ...     with optimizer.predicted(steps=2):  # forward and backward with predicted weights
        ...         model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    _rule = rule.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
        smoothed: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        # Only where they are asked for: by default the groups' keys are torch's.
        asked = {"smoothed": smoothed, "decoupled_weight_decay": decoupled_weight_decay}
        self.defaults.update((key, True) for key in _EXTRAS if asked[key])
        self._complete_groups()
        for index in range(len(self.param_groups)):
            self._check_group(index)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over state; groups that were saved by torch.optim.SGD lack this class's extras."""
        super().__setstate__(state)
        self._complete_groups()

    def _complete_groups(self) -> None:
        for key in _EXTRAS:
            if key in self.defaults:
                for group in self.param_groups:
                    group.setdefault(key, self.defaults[key])


class Adam(PredictingOptimizer, torch.optim.Adam):
    """Adam, which can predict weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are those of ``torch.optim.Adam``;
    checkpoints load in both directions. A step is one kernel launch per device for all groups. The
    arithmetic is float64 for float64 weights and float32 for all others. 16-bit weights and moments
    are rounded once per step, while torch's unfused step rounds after every operation.

    Args:
        params: parameters, named parameters or parameter groups: float32, float64, float16 or
            bfloat16, strided, on any devices.
        lr: learning rate (>= 0), a number or a CPU tensor with one element, or one on the device of
            all parameters, which kernels read when they run.
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root of the second moment (>= 0).
        weight_decay: L2 penalty, or decoupled decay (>= 0).
        amsgrad: must be False.
        foreach: accepted for compatibility, without effect.
        maximize: ascend instead of descend.
        capturable: must be False.
        differentiable: must be False.
        fused: accepted for compatibility, without effect.
        decoupled_weight_decay: selects AdamW.
        momentum_dtype: dtype of the moments; None means the parameter's. 16-bit parameters may have
            ``torch.float32`` moments.

    Raises:
        ValueError: ``amsgrad``, ``capturable`` or ``differentiable``, a number out of range or NaN,
            a duplicate parameter.
        TypeError: a parameter's dtype or ``momentum_dtype`` is not supported.

    The prediction ``steps`` updates ahead is ``W - steps*lr*m_hat/(sqrt(u_hat) + eps)`` with the
    bias corrections of the last step (PipeOptim, 2023); ``laws.Geometric`` is FTPipe's. A parameter
    that was never updated is predicted to stay unchanged.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = st.optim.Adam([weight], lr=0.25)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> with optimizer.predicted(steps=2):
        ...     print(f"{weight.item():.2f}")
        0.25
    """

    _rule = rule.ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(PredictingOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, ``torch.optim.AdamW`` with predictions; see ``Adam``.

    The linear prediction ignores the decay; the geometric law includes it.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = st.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    """

    _rule = rule.ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )


class NAdam(PredictingOptimizer, torch.optim.NAdam):
    """Adam with Nesterov momentum (Dozat, 2016), ``torch.optim.NAdam`` with predictions.

    See ``Adam`` for the arguments; ``momentum_decay`` (>= 0) sets how fast the momentum grows. The
    prediction continues the momentum part of the last step, without a gradient.

    Example:
        >>> optimizer = st.optim.NAdam(nn.Linear(4, 2).parameters(), lr=2e-3, momentum_decay=4e-3)
    """

    _rule = rule.NADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            momentum_decay,
            decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
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
        given = param_group["params"]
        for entry in [given] if isinstance(given, Tensor) else given:
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
                mine = given if isinstance(given, set) else kinds[is_matrix]  # torch rejects a set
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

    _rule = rule.MUON

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

    _rule = rule.SOAP

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
    found: set[Tensor] = set()
    others: set[Tensor] = set()
    own: set[Tensor] = set()
    for module in model.modules():
        own = {p for p in module.parameters(recurse=False) if p.dim() == 2} or own
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            others |= own
        found |= own
    return found - others - own
