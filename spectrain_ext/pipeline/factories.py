"""Makes each stage's optimizer, scheduler and weights from the caller's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spectrain_ext.errors import placed
from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import local_part

from .arguments import needed_arguments
from .ties import Copy, copies_in

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


def weights_of(
    modules: Mapping[int, nn.Module],  # by index
    copies: Sequence[Copy],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[Any], LRScheduler] | None,
    master_dtype: torch.dtype | None,
) -> list[StageWeights | None]:
    """Make optimizers and schedulers; return each stage's weights, None: it only has copies."""
    found: list[StageWeights | None] = []
    for k, module in modules.items():
        held = copies_in(copies, k).keys()
        params = [p for p in module.parameters() if p.requires_grad and p not in held]
        if not params:
            found.append(None)
            continue
        own = _optimizer(optimizer, [local_part(p) for p in params], k)
        its_scheduler = None if scheduler is None else _scheduler(scheduler, own, k)
        found.append(StageWeights(module, own, its_scheduler, master_dtype, held))
    return found


def _optimizer(
    factory: Callable[[list[Any]], torch.optim.Optimizer], params: list[Tensor], k: int
) -> torch.optim.Optimizer:
    with placed(f"in optimizer, for stages[{k}]"):
        made: object = factory(params)
    if not isinstance(made, torch.optim.Optimizer):
        kind = f"{type(made).__module__}.{type(made).__qualname__}"
        raise TypeError(
            f"optimizer: for stages[{k}] it made a {kind}, expected a torch.optim.Optimizer: "
            "optimizer=lambda params: spectrain_ext.optim.SGD(params, lr=..., momentum=...)"
        )
    _check_step("optimizer", made, k)
    in_groups = [p for group in made.param_groups for p in group["params"]]
    if len(in_groups) != len(params) or set(in_groups) != set(params):
        raise ValueError(
            f"optimizer: for stages[{k}] it holds {len(in_groups)} parameters, expected exactly "
            f"the stage's {len(params)} trainable ones: make it of the list that the function "
            "gets; freeze others with requires_grad_(False)"
        )
    return made


def hidden_use(weights: Iterable[StageWeights | None]) -> tuple[int, int, str]:
    """Count the trainable matrices in ``hidden``, and those trained; describe one that is not."""
    hidden: set[Tensor] = set()
    trained: set[Tensor] = set()
    for optimizer in (each.optimizer for each in weights if each is not None):
        if isinstance(optimizer, PredictingOptimizer):
            hidden.update(getattr(optimizer, "hidden", None) or ())
        trained.update(p for group in optimizer.param_groups for p in group["params"])
    trainable = {p for p in hidden if p.requires_grad or not isinstance(p, nn.Parameter)}
    left = [f"shape {tuple(p.shape)} on {p.device}" for p in trainable - trained]
    return len(trainable), len(trainable) - len(left), min(left, default="")


def check_hidden(use: Sequence[Sequence[Any]], firsts: Iterable[int] = (0,)) -> None:
    """Refuse matrices in ``hidden`` that no stage has; ``firsts`` have the first replicas."""
    # A process may know the matrices of all stages, or only its own.
    trained = sum(use[r][1] for r in set(firsts))
    for trainable, used, left in use:
        if used < trainable and trained != trainable:
            raise ValueError(
                f"optimizer: stages train {trained} of the {trainable} matrices in hidden, and no "
                f"stage has the others, one of them of {left}; AdamW would train what they stand "
                "for. materialize makes new parameters: call hidden_matrices(model) after it"
            )


def _scheduler(factory: Callable[[Any], LRScheduler], optimizer: Any, k: int) -> LRScheduler:
    with placed(f"in scheduler, for stages[{k}]"):
        made = factory(optimizer)
    if isinstance(made, torch.optim.Optimizer) or not callable(getattr(made, "step", None)):
        raise TypeError(
            f"scheduler: for stages[{k}] it made a {type(made).__name__}, expected a learning-rate "
            "scheduler: scheduler=lambda optimizer: StepLR(optimizer, ...)"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"scheduler: for stages[{k}] it made a {type(made).__name__} of another optimizer; "
            "make it of the one that the function gets"
        )
    if not isinstance(made, ReduceLROnPlateau):  # the caller steps that one, between runs
        _check_step("scheduler", made, k)
    return made


def _check_step(argument: str, made: Any, k: int) -> None:
    if needed := needed_arguments(made.step):
        raise ValueError(
            f"{argument}: for stages[{k}] it made a {type(made).__name__}, whose step() needs "
            f"{needed}; the pipeline steps it without arguments, once per minibatch"
        )
