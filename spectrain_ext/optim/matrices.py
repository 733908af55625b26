"""Muon and SOAP: matrices by updates of their own, and AdamW for the rest, with predictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.calls import Role
from spectrain_ext.operators.numbers import AdamNumbers

from .base import PredictingOptimizer
from .matrix_updates import SIDES, Orthogonal, Rotated
from .optimizers import ADAM, AdamW
from .state import Group, Rule, betas_of, plain, rate_of


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
    adam = AdamNumbers(1.0, betas_of(group), plain(group["eps"], "eps"), step=1)
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
    rest=replace(
        ADAM, refused={**ADAM.refused, "capturable": "the matrices' step counts live on the host"}
    ),
)
_SOAP = replace(
    _MUON,
    numbers=_soap_numbers,
    buffers=("update_buffer", "exp_avg"),
    loose=("exp_avg_sq", *SIDES, *(f"{side}_basis" for side in SIDES)),
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
            for is_matrix in [k for k in kinds if kinds[k]] or [bool(param_group.get(key, True))]:
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
        state_dtype: dtype of all state, as in ``SGD``.

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
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(state_dtype)
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
        state_dtype: dtype of first moment and update, as in ``SGD``; other state is float32, or
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
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(state_dtype)
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
