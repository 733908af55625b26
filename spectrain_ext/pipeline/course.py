"""Determines the course of a training: by which methods, with which clipping and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spectrain_ext.errors import placed
from spectrain_ext.method import Method, Window, check_optimizer, factor_of, phases_on, rules_at
from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.schedule import Generator, Place, Replicas, Rules, count_stage, flushes
from spectrain_ext.weights import StageMemory, StageWeights
from spectrain_ext.weights.storage import local_part

from .arguments import needed_arguments
from .ties import Copy, copies_in

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


#: Whose gradient norm clips.
ClipScope = Literal["auto", "stage", "global"]


class AppliedMethod(NamedTuple):
    """A method on the stages of a pipeline, which trains by one at a time."""

    method: Method
    places: list[Place]  # of all stages
    max_norms: list[float | None]  # the largest gradient norms, of all stages
    globally: bool  # whether by the norm of all stages' gradients

    def followed_by(
        self, k: int, optimizer: torch.optim.Optimizer
    ) -> tuple[Rules, tuple[Place, Place], str | Generator]:
        """Return what ``StageWeights.follow`` takes for a stage with this optimizer."""
        rules = rules_at(self.method, self.places[k], optimizer)
        return rules, (self.places[0], self.places[k]), self.method.schedule

    def memory(self, k: int, weights: StageWeights | None) -> StageMemory:
        if weights is not None:
            return weights.predicted(*self.followed_by(k, weights.optimizer))
        count = count_stage(self.method.schedule, self.places[0], self.places[k], Rules(), False)
        return StageMemory(0, 0, count.in_flight)


def applied(
    method: Method,
    microbatches: int,
    window: Window,
    replicas: Replicas,
    clip_norm: float | None,
    clip_scope: ClipScope,
) -> list[AppliedMethod]:
    """Apply a method, and those that it changes to, to stages; refuse what is impossible."""
    found = []
    for one, places in phases_on(method, replicas.stages, microbatches, window, replicas):
        for place in places:
            rules_at(one, place)  # refuses what a stage cannot have
        norms = [max_norm_at(one, place, clip_norm) for place in places]
        globally = clips_globally(one, clip_norm, clip_scope)
        found.append(AppliedMethod(one, places, norms, globally))
    return found


def check_optimizers(
    methods: Iterable[AppliedMethod], weights: Mapping[int, StageWeights | None]
) -> None:
    """Refuse optimizers, by the indices of their stages, that do not fit a method."""
    for each in methods:
        for k, own in ((k, w.optimizer) for k, w in weights.items() if w is not None):
            _check_rates(each.method, each.places[k], own)
            check_optimizer(each.method, each.followed_by(k, own)[0], k, own)


def _check_rates(method: Method, place: Place, optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups if factor_of(method, place) else ()):
        if group.get("lr") is None:
            raise ValueError(
                f"optimizer: parameter group {index} of the {type(optimizer).__name__} of "
                f"stages[{place.stage}] has no 'lr' that method {method.name!r} could multiply; "
                "set it, or choose a method without rates"
            )


# Clipping.


def clips_globally(method: Method, clip_norm: float | None, clip_scope: ClipScope) -> bool:
    """Whether a method clips by the gradient norm of all stages together."""
    if clip_scope not in get_args(ClipScope):
        raise ValueError(f"clip_scope: expected one of {get_args(ClipScope)}, got {clip_scope!r}")
    if clip_scope == "auto":
        return clip_norm is not None and flushes(method.schedule)
    if clip_scope == "global" and not flushes(method.schedule):
        raise ValueError(
            f"clip_scope: under method {method.name!r} the stages of an asynchronous pipeline "
            "update at different times, each with another minibatch's gradient: there is no norm "
            "over all stages; expected 'stage', or 'auto'"
        )
    if clip_scope == "global" and clip_norm is None:
        raise ValueError("clip_scope: 'global' needs a clip_norm")
    return clip_scope == "global"


def max_norm_at(method: Method, place: Place, clip_norm: float | None) -> float | None:
    if clip_norm is not None:
        return _positive("clip_norm", clip_norm)
    if method.clip is None:
        return None
    where = f"method: clip of {method.name!r} for stage {place.stage} of {place.stages}"
    return _positive(where, method.clip(place))


def _positive(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where}: expected a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{where}: expected a number > 0, got {value}")
    return float(value)


# Optimizers and schedulers.


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
