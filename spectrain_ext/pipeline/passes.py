"""Defines passes: optional behaviours of a pipeline, each of which is one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from math import nan
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from spectrain_ext.method import phases_of
from spectrain_ext.schedule import Kind
from spectrain_ext.schedule.lowering import STEPS_OF_TRAINING
from spectrain_ext.transport import Message

if TYPE_CHECKING:
    import torch

    from spectrain_ext.method import Method


#: Runs a step of an instruction, for minibatch i and microbatch j.
Handler = Callable[[int, int], None]


class Pass:
    """An optional behaviour, given to ``Pipeline(passes=[...])``: the base class of your own.

    A pass is a value: its ``repr`` is the same on all ranks, which compare it. Each stage has a
    copy with the attribute ``stage``, and keeps there what it needs. During a run, the pass adds
    steps to the stage's instructions, and its hooks are called. ``schedule/lowering.py`` has the
    order of all steps. A hook that a pass does not define costs nothing.

    Attributes:
        stage: the stage of this copy.
        skips: whether the stage leaves out the update of the minibatch that it is finishing.
        skipped: how many updates it has left out, in all runs.
        undone: minibatches of all runs after which all is as if they had never come.
        tells_all: whether ``tells`` goes to all stages, under a schedule that flushes.
        own_minibatches: whether each replica trains on minibatches of its own.
        moves_weights: whether it changes weights after an update.

    Example:
        >>> class Noise(st.passes.Pass):
        ...     def __init__(self, deviation):
        ...         self.deviation = deviation
        ...
        ...     def begin(self, run):
        ...         return {st.passes.Kind.CHANGE_GRADIENTS: self.add}
        ...
        ...     def add(self, i, j):
        ...         with self.stage.changing_gradients() as gradients:
        ...             for gradient in gradients:
        ...                 gradient += self.deviation * torch.randn_like(gradient)
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
        >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, passes=[Noise(0.01)])
        >>> len(pipe.fit([(torch.ones(4, 2), torch.ones(4, 1))]))
        1
        >>> pipe.release()
    """

    stage: Any  # a Stage, whose file imports this one
    skips = False
    skipped = 0
    undone = 0
    tells_all = False
    own_minibatches = False
    moves_weights = False

    def __repr__(self) -> str:
        own = ((n, v) for n, v in vars(self).items() if n[0] != "_" and not hasattr(Pass, n))
        values = (f"{name}={value!r}" for name, value in own if name != "stage")
        return f"{type(self).__name__}({', '.join(values)})"

    def check(self, method: Method) -> None:
        """Raise ValueError if this pass does not work with a method."""

    def on(self, stage: Any, processes: Any) -> Self:
        """Return a copy for one stage; ValueError if the stage does not allow it.

        Args:
            stage: a ``Stage``.
            processes: the ``Processes`` that the pipeline spans.
        """
        made = copy(self)
        made.stage = stage
        return made

    def begin(self, run: Any) -> Mapping[Kind, Handler]:
        """Begin a run, without anything that an earlier one left; return the steps of this one.

        Where a step has a handler already, both run: that of the stage, then those of its passes in
        the order in which the pipeline got them. In an evaluation, no steps of passes run.

        Args:
            run: the stage's ``StageRun``.
        """
        return {}

    def calls(self, i: int, j: int, function: object, inputs: Message) -> None:
        """Called before a forward calls the stage's module, and the loss function."""

    def lost(self, i: int, j: int, loss: Tensor) -> None:
        """Called with a microbatch's part of the loss, 0-d, without a graph."""

    def finished(self, i: int, loss: Tensor) -> None:
        """Called on the last stage with a minibatch's loss, 0-d, without a graph."""

    def sends_activation(self, i: int, j: int, message: Message) -> Message:
        """Return an activation as it goes to the next stage, in an evaluation too."""
        return message

    def received_activation(self, message: Message) -> Message:
        """Return an activation as it was before ``sends_activation`` of the previous stage."""
        return message

    def sends_gradient(self, i: int, j: int, message: Message) -> Message:
        """Return a microbatch's gradient as it goes to the previous stage."""
        return message

    def received_gradient(self, i: int, message: Message) -> Message:
        """Return a gradient as it was before ``sends_gradient`` of the next stage."""
        return message

    def number_back(self, i: int, j: int) -> float:
        """Return a number that goes back with a microbatch's gradient; one pass may use this."""
        return nan

    def came_back(self, i: int, j: int, number: float) -> None:
        """Called with what ``number_back`` of the next stage returned."""

    def crosses(self, value: Any) -> Any:
        """Return what this stage gets of the previous one's output, when the pipeline is called."""
        return value

    def saving(self, inner: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Return a context, around ``inner``, in which forwards save tensors for backwards."""
        return inner

    def gradient_norm(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of the parameters' gradients, 0-d; one pass may define this."""
        raise NotImplementedError

    def weights_loaded(self) -> None:
        """Called when the pipeline has got other weights, by ``load_state_dict``."""

    def tells(self, i: int) -> float:
        """Return a number that all stages get the largest of, see ``tells_all``."""
        return 0.0


def handlers_of(each: Pass, run: Any) -> Mapping[Kind, Handler]:
    """Begin a run of a pass; refuse steps of its own that no training has."""
    steps = each.begin(run)
    for kind in steps:
        if kind not in STEPS_OF_TRAINING:
            raise ValueError(
                f"passes: begin() of {type(each).__name__} returned a handler for {kind}, which is "
                "no step of a training; schedule/lowering.py has those that a stage runs"
            )
    return steps


def hooks(passes: Sequence[Pass], name: str) -> list[Any]:
    """Return a hook of those passes that define it."""
    base = getattr(Pass, name)
    return [getattr(each, name) for each in passes if getattr(type(each), name) is not base]


def in_turn(*handlers: Handler) -> Handler:
    def run(i: int, j: int) -> None:
        for handler in handlers:
            handler(i, j)

    return run


def checked_passes(passes: object, method: Method) -> list[Pass]:
    if isinstance(passes, Pass) or not isinstance(passes, Sequence):
        raise TypeError(f"passes: expected a list of passes, got {passes!r:.80}")
    for n, each in enumerate(passes):
        if not isinstance(each, Pass):
            is_class = isinstance(each, type) and issubclass(each, Pass)
            remedy = f": {each.__name__}(...)" if is_class else ""
            raise TypeError(f"passes[{n}]: expected a Pass, got {each!r:.80}{remedy}")
        if type(each) in map(type, passes[:n]):
            raise ValueError(f"passes[{n}]: there is another {type(each).__name__}; give one")
        for one in phases_of(method):
            each.check(one)
    return list(passes)
