"""GraphStage: stages of what ``torch.distributed.pipelining.pipeline()`` returned."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from spectrain_ext.transport import Value

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe


class GraphStage(nn.Module):
    """One part of a ``Pipe``, with the values that only pass through it.

    Between stages goes a tensor, or a tuple of every tensor that some later stage needs: what one
    stage makes and a later but not the next one takes (a skip connection) is handed on unchanged.

    It computes what torch has traced: in the mode that the model was in, which a ``Pipe`` does not
    tell, and with that example's sizes and devices wherever the model's code asked for them.

    Args:
        part: computes this stage's outputs.
        inputs: names of the values that arrive.
        arguments: names of those that ``part`` takes, in order.
        results: names of what it returns.
        outputs: names of the values that leave.

    Parameters keep the names they have in the model.
    """

    def __init__(
        self,
        part: nn.Module,
        inputs: Sequence[str],
        arguments: Sequence[str],
        results: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        super().__init__()
        self.part = part
        self._inputs = tuple(inputs)
        self._arguments = tuple(arguments)
        self._results = tuple(results)
        self._outputs = tuple(outputs)

    def full_name(self, name: str) -> str:
        """Return the model's name of what is called ``name`` here."""
        return name.removeprefix("part.")

    def train(self, mode: bool = True) -> GraphStage:
        """Not of a stage out of a ``Pipe``.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{'train' if mode else 'eval'}: this stage is out of a Pipe, traced in the one mode "
            "that the model was in; partition(model, ..., split_points=...) traces both"
        )

    def forward(self, value: Value) -> Value:
        """Return what later stages need."""
        given = value if isinstance(value, tuple) else (value,)
        if len(given) != len(self._inputs):
            raise ValueError(
                f"expected {len(self._inputs)} tensors ({', '.join(self._inputs)}), got "
                f"{len(given)}"
            )
        known = dict(zip(self._inputs, given, strict=True))
        made = self.part(*(known[name] for name in self._arguments))
        if isinstance(made, (tuple, list)):
            known.update(zip(self._results, made, strict=True))
        else:
            known[self._results[0]] = made
        leaving = tuple(known[name] for name in self._outputs)
        return leaving[0] if len(leaving) == 1 else leaving


def from_pipe(pipe: Pipe) -> list[nn.Module]:
    """Return the stages of what ``torch.distributed.pipelining.pipeline()`` returned.

    They keep the mode that the model was traced in: ``train()`` and ``eval()`` raise RuntimeError.
    ``partition`` with ``split_points`` makes stages that have both.

    Raises:
        ValueError: stages that share a parameter, or between which something else than tensors is
            passed; a model that returns something else than a tensor or a tuple of tensors.
    """
    for shared in pipe.replicated_params:
        places = " and ".join(f"{name!r} of stage {part}" for part, name in shared.items())
        raise ValueError(
            f"pipe: parameter {places} are one; tied weights must be on one stage, move the split"
        )
    graph = pipe.split_gm.graph
    arrives: list[str] = []
    stages: list[tuple[nn.Module, list[str], list[str]]] = []
    final: list[str] = []
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
            arrives.append(node.name)
        elif node.op == "call_module":
            part = pipe.split_gm.get_submodule(node.target)
            arguments = [_name(names, argument, node) for argument in node.args]
            stages.append((part, arguments, _results(node, names)))
        elif node.op == "output":
            final = _final(names, node)
        elif not (node.op == "call_function" and node.target is operator.getitem):
            raise ValueError(f"pipe: between stages it has {node.format_node()}, expected tensors")
    return _plumbed(stages, arrives, final)


def _plumbed(
    stages: list[tuple[nn.Module, list[str], list[str]]], arrives: list[str], final: list[str]
) -> list[nn.Module]:
    made: list[nn.Module] = []
    for k, (part, arguments, results) in enumerate(stages):
        later = {name for _, needed, _ in stages[k + 1 :] for name in needed} | set(final)
        last = k == len(stages) - 1
        # What passes through keeps its order; the last stage's output is the model's.
        leaves = final if last else [n for n in (*arrives, *results) if n in later]
        if not leaves:
            raise ValueError(f"pipe: no later stage needs anything of stage {k}")
        made.append(GraphStage(part, arrives, arguments, results, leaves))
        arrives = leaves
    return made


def _results(node: fx.Node, names: dict[fx.Node, str]) -> list[str]:
    """Name what a stage returns: the node itself, or its items."""
    items = [u for u in node.users if u.op == "call_function" and u.target is operator.getitem]
    if not items:
        names[node] = node.name
        return [node.name]
    count = 1 + max(item.args[1] for item in items if isinstance(item.args[1], int))
    results = [f"{node.name}[{index}]" for index in range(count)]
    for item in items:
        assert isinstance(item.args[1], int)
        names[item] = results[item.args[1]]
    return results


def _name(names: dict[fx.Node, str], argument: Any, node: fx.Node) -> str:
    if not isinstance(argument, fx.Node) or argument not in names:
        raise ValueError(
            f"pipe: {node.target} takes {argument!r}; stages can pass on nothing but tensors"
        )
    value = argument.meta.get("val")
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(
            f"pipe: {node.target} takes {argument}, a {type(value).__name__}; stages can pass on "
            "nothing but tensors"
        )
    return names[argument]


def _final(names: dict[fx.Node, str], node: fx.Node) -> list[str]:
    returned = node.args[0]
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return [_name(names, value, node) for value in values]
