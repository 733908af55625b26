"""Halves: a backward in two, the gradients of a stage's inputs first, its weights' later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .tape import Pairs, differentiate

# What autograd refuses to run for some inputs only, or twice. Whose names these are, is torch's.
_WHOLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")
# Of a channels_last input torch 2.13 ends the process where it is asked for the weights' alone.
_NOT_ALONE = "NativeGroupNormBackward0"


class _Caught:
    """The gradients that came to a node in the first half: what the second half starts with.

    As a hook of the node it notes them in the first half, after hooks of the node's tensors may
    have changed them, and hands them out instead of what those make of them in the second.
    """

    gradients: tuple[Tensor | None, ...] | None = None

    def __call__(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if self.gradients is None:
            self.gradients = gradients
        return self.gradients


def differentiate_inputs(
    pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor | None]
) -> Callable[[], None] | None:
    """Add the gradients of the inputs, which are leaves; return what is left to do, if anything.

    Of every node that inputs have a part in autograd computes the gradients that lead to inputs.
    Where other leaves have a part in such a node as well, as a layer's weights have, it is run
    once more, for these alone, from the gradients that came to it. No node's gradient is computed
    twice, but for functions that compute all of theirs at once. Such is every one written in
    Python (``torch.autograd.Function``): what meets the inputs there has its gradients at once. So
    do a group norm's weights, and leaves that meet inputs at several nodes, as the weights of a
    layer that is used several times: autograd would go from one of these nodes to the next. Nothing
    is left of a graph with compiled or reentrantly checkpointed parts, which autograd only runs as
    a whole.
    """
    wanted = [leaf for leaf in inputs if leaf is not None]
    if not wanted:
        return partial(differentiate, pairs) if pairs else None
    roots = [get_gradient_edge(output).node for output, _ in pairs]
    users = _users(roots)
    if any(isinstance(node, BackwardCFunction) and node.name() in _WHOLE for node in users):
        differentiate(pairs)
        return None
    way = _way([get_gradient_edge(leaf).node for leaf in wanted], users)
    meetings: dict[Node | None, list[Node]] = {
        node: [child for child, _ in node.next_functions if child is not None and child not in way]
        for node in users
        if node in way
    }
    meetings[None] = [root for root in roots if root not in way]  # the second half may start there
    alone, at_once = _leaves(meetings)
    layers: list[tuple[Node, _Caught, Sequence[Tensor]]] = []
    for node, leaves in alone.items():
        if node is None:
            continue
        if isinstance(node, BackwardCFunction) or node.name() == _NOT_ALONE:
            at_once += leaves
        else:
            caught = _Caught()
            node.register_prehook(caught)
            layers.append((node, caught, leaves))
    differentiate(pairs, [*wanted, *at_once], keep=True)
    outside = alone.get(None, [])
    away = [pair for pair, root in zip(pairs, roots, strict=True) if root not in way]
    if not (outside or layers):
        return None
    return partial(_differentiate_rest, away if outside else [], outside, layers)


def _differentiate_rest(
    pairs: Pairs, leaves: Sequence[Tensor], layers: Sequence[tuple[Node, _Caught, Sequence[Tensor]]]
) -> None:
    """Add what the first half has left: beside the inputs' way, and where weights meet it."""
    differentiate(pairs, leaves)
    for node, caught, alone in layers:
        found = enumerate(caught.gradients or ())
        differentiate([(GradientEdge(node, n), g) for n, g in found if g is not None], alone)


def _users(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """All nodes, from the roots on, each with those that pass a gradient on to it."""
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


def _way(ends: Sequence[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """The nodes that a gradient passes on its way to these."""
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
) -> tuple[dict[Node | None, list[Tensor]], list[Tensor]]:
    """The leaves below the nodes given: those below one of them alone, and those below several."""
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
    alone: dict[Node | None, list[Tensor]] = {}
    shared: list[Tensor] = []
    for node, owner in owners.items():
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            (shared if owner is several else alone.setdefault(owner, [])).append(leaf)
    return alone, shared
