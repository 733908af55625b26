"""SGD, Adam, AdamW, NAdam, Muon: torch.optim's, in one fused pass, with predictions; SOAP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.corrections import Correction

from . import rule
from .base import PredictingOptimizer

_EXTRAS = ("ema", "decoupled_weight_decay")  # of SGD, that torch's has not


class SGD(PredictingOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum that can predict the weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are ``torch.optim.SGD``'s; checkpoints
    load in both directions. A step is one launch per device for all groups (two where some groups
    have momentum and others have none). The arithmetic is float32 for weights of at most 32 bits
    (16-bit weights and momentum are rounded once per step, where torch's unfused step rounds after
    every operation) and float64 for float64.

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
        ema: averaged momentum, ``v = momentum*v + (1 - momentum)*g`` from ``v = 0``, as the
            SpecTrain paper writes it; needs ``0 < momentum < 1`` and no dampening.
        decoupled_weight_decay: shrink the weights by ``1 - lr*weight_decay`` before each step
            instead of adding an L2 penalty to the gradient.

    ``ema`` and ``decoupled_weight_decay`` are keys of the parameter groups where they are asked
    for, and can be given per group.

    Raises:
        ValueError: ``differentiable=True``, a number out of range or NaN, a duplicate parameter.
        TypeError: a parameter or ``momentum_dtype`` that the kernels do not know.

    The prediction (SpecTrain, arXiv 1809.02839, equation 4) of the weights ``steps`` updates ahead
    is ``W - lr*steps*v``, with v the momentum buffer. A parameter that has no momentum buffer yet
    is predicted to stay as it is.
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
        ema: bool = False,
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
        asked = {"ema": ema, "decoupled_weight_decay": decoupled_weight_decay}
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
    """Adam that can predict the weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are ``torch.optim.Adam``'s; checkpoints
    load in both directions. A step is one launch per device for all groups. The arithmetic is
    float32 for weights of at most 32 bits (16-bit weights and moments are rounded once per step,
    where torch's unfused step rounds after every operation) and float64 for float64.

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
        decoupled_weight_decay: makes it AdamW.
        momentum_dtype: dtype of the moments; None means the parameter's. 16-bit parameters may have
            ``torch.float32`` moments.

    Raises:
        ValueError: ``amsgrad``, ``capturable`` or ``differentiable``, a number out of range or NaN,
            a duplicate parameter.
        TypeError: a parameter or ``momentum_dtype`` that the kernels do not know.

    The prediction ``steps`` updates ahead is ``W - steps*lr*m_hat/(sqrt(u_hat) + eps)`` with the
    bias corrections of the last step (PipeOptim, 2023); ``laws.Geometric`` is FTPipe's. A parameter
    that was never updated is predicted to stay as it is.
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
    """Adam with decoupled weight decay, ``torch.optim.AdamW`` that can predict; see ``Adam``.

    The linear prediction leaves the decay out, the geometric law has it.
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
    """Adam with Nesterov momentum (Dozat, 2016), ``torch.optim.NAdam`` that can predict.

    As ``Adam``, which see; with ``momentum_decay`` (>= 0), the pace at which the momentum grows.
    The prediction goes on with the momentum part of the last step, without a gradient.
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
    """What ``Muon`` and ``SOAP`` share: groups of matrices, and groups of the rest, AdamW's."""

    _rest: dict[str, Any]
    _hidden: Collection[Tensor] | None = None

    def _make(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        adamw: Mapping[str, Any],
        hidden: Collection[Tensor] | None,
    ) -> None:
        key = self._rule.kind
        self._rest = {**AdamW([torch.empty(0)], **adamw).defaults, key: False}
        self._hidden = None if hidden is None else set(hidden)
        # Not the constructor of torch's Muon, which refuses the rest.
        torch.optim.Optimizer.__init__(self, params, {**defaults, key: True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, or two of one of both kinds; as of ``SGD`` otherwise."""
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
                mine = given if isinstance(given, set) else kinds[is_matrix]  # torch refuses a set
                super().add_param_group({**param_group, "params": mine})
        except Exception:
            del self.param_groups[count:]
            raise
        finally:
            self.defaults = defaults

    def _is_hidden(self, p: Any) -> bool:
        is_matrix = isinstance(p, Tensor) and p.dim() == 2
        return is_matrix and (self._hidden is None or p in self._hidden)

    def __getstate__(self) -> dict[str, Any]:
        """As ``PredictingOptimizer``, with what later groups are made from."""
        return {**super().__getstate__(), "_rest": self._rest, "_hidden": self._hidden}

    def check_correction(self, correction: Correction | None) -> None:
        """Raise ValueError: no correction is defined for updates of matrices."""
        if correction is not None:
            raise ValueError(
                f"{correction} is not defined for the updates of {type(self).__name__}"
            )


class Muon(_OfMatrices, torch.optim.Muon):
    """Muon for hidden matrices and AdamW for the rest, in one optimizer that can predict.

    Of matrices arguments, groups and results are ``torch.optim.Muon``'s, whose ``state_dict`` loads
    here; of the rest ``AdamW``'s. Each parameter group is of one kind, by its key ``use_muon``. A
    group without that key and with no options of its own, as a plain list of parameters is, becomes
    up to two: its hidden matrices, then the rest. Orthogonalizing is matrix products of torch's;
    the step is one launch per device and kind.

    Args:
        params: parameters, named parameters or parameter groups, as ``SGD``.
        lr: learning rate of matrices (>= 0).
        weight_decay: decoupled decay of matrices (>= 0).
        momentum: decay of the averaged gradient (>= 0).
        nesterov: orthogonalizes the average mixed with the gradient once more.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: the least norm that a matrix is divided by before it.
        ns_steps: iterations, fewer than 100.
        adjust_lr_fn: ``"original"`` (or None) multiplies the update by ``sqrt(max(1, rows /
            columns))``, ``"match_rms_adamw"`` by ``0.2 * sqrt(max(rows, columns))``.
        hidden: the parameters that are hidden matrices, usually ``hidden_matrices(model)``; None:
            all with two dimensions.
        adamw: options of ``AdamW`` for the rest. Without an ``lr`` that is Muon's where
            ``adjust_lr_fn="match_rms_adamw"`` makes updates as large as AdamW's, else 1e-3.
        momentum_dtype: dtype of all state, as of ``SGD``.

    Raises:
        ValueError: a number out of range, an update by Muon of what is no matrix, a group with
            options of both kinds of parameters and without ``use_muon``.
        TypeError: as ``SGD``; an option that ``AdamW`` does not have.

    A matrix has as state ``momentum_buffer``, and ``update_buffer``, its last update U with the
    adjustment: ``W <- (1 - lr*weight_decay)*W - lr*U``. The prediction ``steps`` updates ahead is
    ``W - lr*steps*U``; ``laws.Geometric`` has the decay as well, and ``laws.SecondOrder`` adds
    half of the last change of U. ``bind`` keeps the moments of the rest in the same two buffers.
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
        """As ``SGD``; with what torch's Muon has saved, predictions begin after a step."""
        state = {}
        for key, entry in state_dict["state"].items():
            if "momentum_buffer" in entry and "update_buffer" not in entry:
                last = torch.zeros_like(entry["momentum_buffer"])
                entry = {**entry, "step": 0.0, "update_buffer": last}
            state[key] = entry
        super().load_state_dict({**state_dict, "state": state})


class SOAP(_OfMatrices):
    """Adam in the eigenbasis of gradients for matrices and AdamW for the rest, which can predict.

    SOAP (arXiv 2409.11321), and basis rotation (arXiv 2602.03515), which is SOAP with its momentum
    kept un-rotated, as here: the same in exact arithmetic. A matrix G of gradients has as
    covariances the averages L of G G^T and R of G^T G. Every ``precondition_frequency`` steps their
    eigenvectors Q_L, Q_R follow them, by one iteration of the power method and a QR decomposition.
    The second moments are averages of (Q_L^T G Q_R)^2, and the update is what Adam's is in that
    basis, turned back. Each parameter group is of one kind, by its key ``rotated``; of ``Muon`` is
    how a plain list becomes two groups.

    Args:
        params: parameters, named parameters or parameter groups, as ``SGD``.
        lr: learning rate of matrices (>= 0).
        betas: decay of the first and of the second moment, each in [0, 1).
        shampoo_beta: decay of the covariances, in [0, 1); None: ``betas[1]``.
        eps: added to the root of the second moment (>= 0).
        weight_decay: decoupled decay of matrices (>= 0).
        precondition_frequency: steps from basis to basis.
        max_dimension: a side that is longer has no basis, and is not rotated.
        hidden: the parameters that are rotated, of those with two dimensions; None: all, which
            with late gradients was better than ``hidden_matrices(model)``.
        adamw: options of ``AdamW`` for the rest, with the same ``lr`` and ``betas`` unless given.
        momentum_dtype: dtype of moment and update, as of ``SGD``; all else of the state is float32,
            or float64 of a float64 parameter.

    Raises:
        ValueError: a number out of range, a rotation of what is no matrix, a group with options of
            both kinds of parameters and without ``rotated``.
        TypeError: as ``SGD``; an option that ``AdamW`` does not have.

    A matrix has as state ``exp_avg``, ``exp_avg_sq`` in the basis, ``left``, ``right``,
    ``left_basis``, ``right_basis``, and ``update_buffer``, its last update U with the bias
    corrections: ``W <- (1 - lr*weight_decay)*W - lr*U``. Predictions are those of ``Muon``. A
    gradient that is not finite makes all of a matrix NaN, where of ``AdamW`` it does an element.
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
    """The parameters of a model that Muon is for: matrices between embeddings and head.

    Those with two dimensions, but for those of ``nn.Embedding`` and ``nn.EmbeddingBag``, and of the
    last module that has any, which is taken for the head (https://kellerjordan.github.io/posts/muon).
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
