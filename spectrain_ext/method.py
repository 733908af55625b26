"""Method: which weights, predicted how far, each forward and backward of a stage computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StageRule = Callable[[int, int], int]  # (stage k, number of stages N) -> a count

Backward = Literal["current", "predict", "stash"]


def _none(k: int, n: int) -> int:
    return 0


def _one(k: int, n: int) -> int:
    return 1


def _classic_window(k: int, n: int) -> int:
    return n - k


def _local_horizon(k: int, n: int) -> int:
    """Updates between a minibatch's forward and its backward on the same stage."""
    return n - k - 1


def _paper_forward(k: int, n: int) -> int:
    """Rounds until the minibatch's backward has ended on stage 0 (arXiv 1809.02839)."""
    return k // 2 + n - k - 1


def _paper_backward(k: int, n: int) -> int:
    return k // 2


@dataclass(frozen=True)
class Method:
    """A pipeline training method as a row of independent choices.

    Attributes:
        name: the name that ``Pipeline(method=...)`` accepts.
        summary: one line for people.
        window: ``(k, N) -> w``, how many minibatches stage ``k`` of ``N`` may have in flight.
        forward_horizon: ``(k, N) -> s``, by how many updates the forward's weights are predicted
            ahead of the version the forward reads: ``W - s*lr*v``. 0 reads the version itself.
        backward: the weights that the backward meets. ``"current"``: the newest version;
            ``"predict"``: the newest version predicted ahead by ``backward_horizon``; ``"stash"``:
            the very weights of its forward.
        backward_horizon: ``(k, N) -> s`` of ``backward="predict"``.
    """

    name: str
    summary: str
    window: StageRule = _classic_window
    forward_horizon: StageRule = _none
    backward: Backward = "current"
    backward_horizon: StageRule = _none


_REGISTRY = {
    method.name: method
    for method in (
        Method("sync", "one minibatch at a time, no overlap: the yardstick", window=_one),
        Method("vanilla", "forward and backward at the newest version"),
        Method("pipedream", "the backward reloads its forward's version", backward="stash"),
        Method(
            "spectrain",
            "forward and backward predict the weights at the minibatch's end (arXiv 1809.02839)",
            forward_horizon=_paper_forward,
            backward="predict",
            backward_horizon=_paper_backward,
        ),
        Method(
            "spectrain-stash",
            "the forward predicts its own backward's version, the backward reuses that prediction",
            forward_horizon=_local_horizon,
            backward="stash",
        ),
    )
}


def methods() -> tuple[str, ...]:
    """Names that ``Pipeline(method=...)`` accepts."""
    return tuple(_REGISTRY)


def find_method(method: str | Method) -> Method:
    """The method of that name; a ``Method`` is returned as it is.

    Raises:
        ValueError: there is no method of that name; the message lists those that exist.
        TypeError: ``method`` is neither a name nor a Method.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name or a Method, got {type(method).__name__}")
    if method not in _REGISTRY:
        raise ValueError(f"method: there is no {method!r}; there are {', '.join(_REGISTRY)}")
    return _REGISTRY[method]
