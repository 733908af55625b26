"""GraphStage: stages of a model that is no sequence, cut by torch.distributed.pipelining."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from spectrain_ext.batch import Value

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe, SplitPoint


class GraphStage(nn.Module):
    """One part of a traced model, with the values that only pass through it.

    Between stages goes a tensor, or a tuple of every tensor that some later stage needs: what one
    stage makes and a later but not the next one takes (a skip connection) is handed on unchanged.

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


def split(
    model: nn.Module, example_input: Value, split_points: Mapping[str, SplitPoint] | Sequence[str]
) -> list[nn.Module]:
    """Trace a model and cut it before (or after) the named submodules.

    Args:
        model: any module that torch.export can trace. Its parameters become the stages'.
        example_input: its arguments, a tensor or a tuple of tensors, of the size of a microbatch:
            sizes may become constants of the graph, and so does training or evaluation.
        split_points: names of submodules to cut before, or name -> SplitPoint.

    Returns:
        One stage more than split points, as ``from_pipe`` makes them. The model is left as it was.

    Raises:
        ValueError: a name that is no submodule; what ``from_pipe`` raises.
        RuntimeError: torch.export cannot trace the model.
    """
    # Not above: it doubles the time that importing this package takes.
    from torch.distributed.pipelining import SplitPoint, pipeline

    points = (
        dict(split_points)
        if isinstance(split_points, Mapping)
        else dict.fromkeys(split_points, SplitPoint.BEGINNING)
    )
    modules = dict(model.named_modules())
    for name in points:
        if name not in modules or not name:
            raise ValueError(f"split_points: the model has no submodule {name!r}")
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    with _forwards_kept([modules[name] for name in points]):
        pipe = pipeline(model, arguments, split_spec=points)
    return from_pipe(pipe)


@contextmanager
def _forwards_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Undo that ``pipeline`` replaces the ``forward`` of the modules it cuts at."""
    before = [vars(module).get("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            vars(module).pop("_orig_forward", None)
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def from_pipe(pipe: Pipe) -> list[nn.Module]:
    """Return the stages of what ``torch.distributed.pipelining.pipeline()`` returned.

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
