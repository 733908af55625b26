"""Defines passes: optional behaviours of a pipeline, each of which is one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from spectrain_ext.method import phases_of
from spectrain_ext.schedule import STEPS_OF_TRAINING, Kind
from spectrain_ext.transport import Message

if TYPE_CHECKING:
    import torch

    from spectrain_ext.method import Method

    from .views import ProcessesView, RunView, StageView


#: Runs a step of an instruction, for minibatch i and microbatch j.
Handler = Callable[[int, int], None]


class Pass:
    """An optional behaviour, given to ``Pipeline(passes=[...])``: the base class of your own.

    A pass is a value: its ``repr`` is the same on all ranks, which compare it. Each stage has a
    copy with the attribute ``stage``, and keeps there what it needs. During a run, the pass adds
    steps to the stage's instructions, and its hooks are called: docs/pipeline.md lists all steps.
    A hook that a pass does not define costs nothing.

    Attributes:
        stage: the stage of this copy.
        skips: whether the stage leaves out the update of the minibatch that it is finishing.
        own_minibatches: whether each replica trains on minibatches of its own.
        moves_weights: whether it changes weights after an update.
        alone: what it does that forbids replicas of a late stage which sum gradients.

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

    # Some of these serve one pass of this package, because no step could. Flags: ranks deal batches
    # out by ``own_minibatches``, and refuse replicas by ``alone``, before there are stages; the
    # update asks ``skips`` and ``moves_weights`` before it chooses what it writes. Hooks:
    # ``finished``, since the loss's step makes the mean; ``crosses``, since a call has no run;
    # ``gradient_norm`` and ``whole_lengths``, since only that pass knows shards; ``tells``, which
    # travels with norms; ``evaluated_weights``, between runs.
    stage: StageView
    skips = False
    own_minibatches = False
    moves_weights = False
    alone = ""

    def __repr__(self) -> str:
        own = ((n, v) for n, v in vars(self).items() if n[0] != "_" and not hasattr(Pass, n))
        values = (f"{name}={value!r}" for name, value in own if name != "stage")
        return f"{type(self).__name__}({', '.join(values)})"

    def check(self, method: Method) -> None:
        """Raise ValueError if this pass does not work with a method, or with one of its phases."""

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        """Return a copy for one stage; ValueError if the stage does not allow it."""
        made = copy(self)
        made.stage = stage
        return made

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        """Begin a run, without anything that an earlier one left; return the steps of this one.

        Where a step has a handler already, both run: that of the stage, then those of its passes in
        the order in which the pipeline got them, then those of the method. In an evaluation, no
        steps of passes run.
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

    def received_activation(self, i: int, j: int, message: Message) -> Message:
        """Return an activation as it was before ``sends_activation`` of the previous stage."""
        return message

    def sends_gradient(self, i: int, j: int, message: Message) -> Message:
        """Return a microbatch's gradient as it goes to the previous stage."""
        return message

    def received_gradient(self, i: int, j: int, message: Message) -> Message:
        """Return a gradient as it was before ``sends_gradient`` of the next stage."""
        return message

    def crosses(self, value: Any) -> Any:
        """Return what this stage gets of the previous one's output, when the pipeline is called."""
        return value

    def saving(self, inner: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Return a context, around ``inner``, in which forwards save tensors for backwards."""
        return inner

    def gradient_norm(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of the parameters' gradients, 0-d; one pass may define this."""
        raise NotImplementedError

    def whole_lengths(self, params: Sequence[Tensor], lengths: Tensor) -> Tensor:
        """Return 2-norms of whole tensors, [..., n], of those of what n parameters have here."""
        return lengths

    def weights_loaded(self) -> None:
        """Called when the stage has got other weights: by ``load_state_dict``, or a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this stage's copy: JSON types and tensors.

        What stands under a parameter's name in the stage's module follows that parameter into other
        cuts. All else must be the same in those saved stages of which a stage has parameters.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``; it is empty if the checkpoint has none for this stage."""

    def evaluated_weights(self) -> Callable[[], list[Tensor]]:
        """Begin to compute the weights that are evaluated and saved in the place of a replica's.

        With ``own_minibatches`` all replicas call this, and then its result, which waits.
        """
        raise NotImplementedError

    def tells(self, i: int) -> float:
        """Return a number of which all stages get the largest, under a schedule that flushes."""
        return 0.0


def handlers_of(each: Pass, run: RunView) -> Mapping[Kind, Handler]:
    """Begin a run of a pass; refuse steps of its own that no training has."""
    steps = each.begin(run)
    for kind in steps:
        if kind not in STEPS_OF_TRAINING:
            raise ValueError(
                f"passes: begin() of {type(each).__name__} returned a handler for {kind}, which is "
                "no step of a training; docs/pipeline.md lists those"
            )
    return steps


def hooks(passes: Sequence[Pass], name: str) -> list[Any]:
    """Return a hook of those passes that define it."""
    base = getattr(Pass, name)
    return [getattr(each, name) for each in passes if getattr(type(each), name) is not base]


def chained(*handlers: Handler) -> Handler:
    """Return a handler that calls these one after another."""

    def run(i: int, j: int) -> None:
        for handler in handlers:
            handler(i, j)

    return run


def checked_passes(passes: object, method: Method) -> list[Pass]:
    """Refuse what are no passes, and two of a kind, beside those of each phase of a method."""
    given = _checked("passes", passes)
    for phase in phases_of(method):
        _checked(f"method: passes of {phase.name!r}", phase.passes, given)
        for each in given:
            each.check(phase)
    return given


def _checked(where: str, passes: object, others: Sequence[Pass] = ()) -> list[Pass]:
    if isinstance(passes, Pass) or not isinstance(passes, Sequence):
        raise TypeError(f"{where}: expected a list of passes, got {passes!r:.80}")
    for n, each in enumerate(passes):
        if not isinstance(each, Pass):
            is_class = isinstance(each, type) and issubclass(each, Pass)
            remedy = f": {each.__name__}(...)" if is_class else ""
            raise TypeError(f"{where}[{n}]: expected a Pass, got {each!r:.80}{remedy}")
        if type(each) in map(type, (*others, *passes[:n])):
            raise ValueError(f"{where}[{n}]: there is another {type(each).__name__}; give one")
    return list(passes)
