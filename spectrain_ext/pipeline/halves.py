"""Splits a backward in two: the gradients of a stage's inputs first, those of its weights later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .tape import differentiate

# Nodes that autograd refuses to run for some inputs only, or twice. The names are torch's.
_WHOLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")
# torch 2.13 ends the process if asked for the weights' gradients alone with a channels_last input.
_NOT_ALONE = "NativeGroupNormBackward0"


class _Arrived:
    """A prehook of a node: notes the gradients that arrive in the first half, after other hooks.

    In the second half it returns what it noted, so that those hooks have no further effect.
    """

    gradients: tuple[Tensor | None, ...] | None = None

    def __call__(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if self.gradients is None:
            self.gradients = gradients
        return self.gradients


def differentiate_inputs(
    pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor | None]
) -> Callable[[], None] | None:
    """Compute the gradients of the inputs, which are leaves; return the second half, if any.

    At each node on the way to the inputs, autograd computes only the gradients that lead there.
    Where other leaves join at such a node, as a layer's weights do, the second half runs the node
    once more for these leaves alone, from the gradients that arrived at it. No gradient is computed
    twice, except by functions that compute all of theirs at once.

    Computed in the first half: leaves that join at a function written in Python
    (``torch.autograd.Function``), the weights of a group norm, and leaves that join at several
    nodes, such as the weights of a layer that is used several times, since autograd would go from
    one of these nodes to the next. A graph with compiled or reentrantly checkpointed parts, which
    autograd runs only as a whole, leaves nothing for the second half.
    """
    wanted = [leaf for leaf in inputs if leaf is not None]
    if not wanted:
        return partial(differentiate, pairs) if pairs else None
    roots = [get_gradient_edge(output).node for output, _ in pairs]
    users = _users(roots)
    if any(isinstance(node, BackwardCFunction) and node.name() in _WHOLE for node in users):
        differentiate(pairs)
        return None
    way = _nodes_on_path([get_gradient_edge(leaf).node for leaf in wanted], users)
    meetings: dict[Node | None, list[Node]] = {
        node: [child for child, _ in node.next_functions if child is not None and child not in way]
        for node in users
        if node in way
    }
    meetings[None] = [root for root in roots if root not in way]  # the second half may start there
    alone, at_once = _leaves(meetings)
    layers: list[tuple[Node, _Arrived, Sequence[GradientEdge]]] = []
    for node, leaves in alone.items():
        if node is None:
            continue
        if isinstance(node, BackwardCFunction) or node.name() == _NOT_ALONE:
            at_once += leaves
        else:
            caught = _Arrived()
            node.register_prehook(caught)
            layers.append((node, caught, leaves))
    differentiate(pairs, [*wanted, *at_once], keep=True)
    outside = alone.get(None, [])
    away = [pair for pair, root in zip(pairs, roots, strict=True) if outside and root not in way]

    def differentiate_rest() -> None:
        differentiate(away, outside)
        for node, caught, leaves in layers:
            found = enumerate(caught.gradients or ())
            differentiate([(GradientEdge(node, n), g) for n, g in found if g is not None], leaves)

    return differentiate_rest if outside or layers else None


def _users(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return all nodes reachable from the roots, each with the nodes that pass it a gradient."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    left = list(users)
    while left:
        node = left.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in users:
                users[child] = []
                left.append(child)
            users[child].append(node)
    return users


def _nodes_on_path(ends: Sequence[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """Return the nodes that a gradient passes on its way to these."""
    left = [end for end in ends if end in users]
    way = set(left)
    while left:
        for user in users[left.pop()]:
            if user not in way:
                way.add(user)
                left.append(user)
    return way


def _leaves(
    meetings: dict[Node | None, list[Node]],
) -> tuple[dict[Node | None, list[GradientEdge]], list[GradientEdge]]:
    """Return the leaves below exactly one of the given nodes, by node, and those below several."""
    # As edges of this graph, not as tensors: a tensor whose ``data`` has had another dtype since
    # the forward belongs to other graphs, and autograd would leave its gradient out silently.
    several: Any = object()
    owners: dict[Node, Any] = {}
    for owner, below in meetings.items():
        left: list[tuple[Node, Any]] = [(node, owner) for node in below]
        while left:
            node, mine = left.pop()
            known = owners.get(node, mine)
            if node in owners and (known is mine or known is several):
                continue
            owners[node] = now = mine if known is mine else several
            left += [(child, now) for child, _ in node.next_functions if child is not None]
    alone: dict[Node | None, list[GradientEdge]] = {}
    shared: list[GradientEdge] = []
    for node, owner in owners.items():
        if not node.next_functions and getattr(node, "variable", None) is not None:
            leaves = shared if owner is several else alone.setdefault(owner, [])
            leaves.append(GradientEdge(node, 0))
    return alone, shared
