"""Cuts an exported model's graph into one graph per stage, which takes its state as inputs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from spectrain_ext.cutting import Cut
from spectrain_ext.modules import set_mode

from .outline import Columns

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Mode = bool | None  # training; None: the modules' original modes
_SIZES = ("aten.sym_size.int", "aten.sym_numel.default", "aten.sym_stride.int")


@dataclass(frozen=True, slots=True)
class Port:
    name: str
    source: tuple[str, str]  # the module that made it, and the operation
    shape: tuple[int | None, ...]  # None: any size
    dtype: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> Port:
        value = node.meta["val"]
        stack = list(node.meta.get("nn_module_stack", {}).values())
        source = (stack[-1][0] if stack else "", str(node.target))
        return cls(node.name, source, tuple(map(_fixed, value.shape)), value.dtype)

    def __str__(self) -> str:
        sizes = ", ".join("*" if size is None else str(size) for size in self.shape)
        return f"{self.name} ({sizes}) {str(self.dtype).removeprefix('torch.')}"


class Program:
    """One stage's computation in one mode of the model; immutable, and shared by copies."""

    def __init__(
        self,
        module: fx.GraphModule,  # takes the inputs, then the state; holds no tensors
        state: Sequence[Tensor],  # as it was when traced
        example: Sequence[Tensor],  # the traced inputs
        inputs: tuple[Port, ...],
        form: Callable[[tuple[Tensor, ...]], Any],  # rebuilds the output's containers
        # Raises AssertionError for sizes with which the model's Python code would take another
        # branch; None if no branch depends on sizes.
        guards: nn.Module | None,
    ) -> None:
        tensors = state or example
        self.inputs = inputs
        self._form = form
        self._guards = guards
        # Of a single sample, for which the guards fail: which inputs are of samples, and what the
        # model does otherwise (None: nothing).
        self.sampled: Sequence[bool] = ()
        self.single_sample_error: str | None = None
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._by_device = {self._device: module}

    def __deepcopy__(self, memo: object) -> Program:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a stage of a traced model cannot be pickled; keep its state_dict, and cut the model "
            "where it is needed"
        )

    def shape_error(self, tensors: Sequence[Tensor]) -> str | None:
        if len(tensors) != len(self.inputs):
            names = ", ".join(port.name for port in self.inputs)
            return f"expected {len(self.inputs)} tensors ({names}), got {len(tensors)}"
        for port, tensor in zip(self.inputs, tensors, strict=True):
            if len(port.shape) != tensor.dim() or any(
                wanted not in (None, size)
                for wanted, size in zip(port.shape, tensor.shape, strict=True)
            ):
                return (
                    f"expected {port}, got shape {tuple(tensor.shape)}; what the model did with "
                    "the sizes of example_input is fixed: cut it with one of such sizes"
                )
        return None

    def branch_error(self, tensors: Sequence[Tensor]) -> str | None:
        if self._guards is None:
            return None
        if self.sampled and tensors[0].shape[:1] == (1,):
            if self.single_sample_error is not None:
                return (
                    f"a single sample: {self.single_sample_error}; leave such a batch out "
                    "(drop_last=True), or have fewer microbatches"
                )
            pairs = zip(tensors, self.sampled, strict=True)
            several = [t.expand(2, *t.shape[1:]) if many else t for t, many in pairs]
        else:
            several = list(tensors)
        try:
            self._guards(*several)
        except AssertionError as error:
            return (
                f"{error}, got shapes {[tuple(t.shape) for t in tensors]}; the model does "
                "something else there than with example_input: cut it with one of such sizes"
            )
        return None

    def __call__(self, given: Sequence[Tensor], state: Sequence[Tensor]) -> Any:
        why = self.shape_error(given) or self.branch_error(given)
        if why is not None:
            raise ValueError(why)
        tensors = state or given
        module = self._on(tensors[0].device if tensors else self._device)
        return self._form(module(*given, *state))

    def _on(self, device: torch.device) -> fx.GraphModule:
        """Return the graph for the device that the stage has been moved to."""
        if device not in self._by_device:
            home = self._device.type

            def moved(constant: Any) -> Any:
                is_home = isinstance(constant, torch.device) and constant.type == home
                return device if is_home else constant

            module = copy.deepcopy(self._by_device[self._device]).to(device)
            # The graph and its subgraphs, such as those under autocast.
            parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
            for part in parts:
                for node in part.graph.nodes:
                    node.args = map_aggregate(node.args, moved)
                    node.kwargs = map_aggregate(node.kwargs, moved)
                    if str(node.target) == "wrap_with_autocast" and node.args[0] == home:
                        node.args = (device.type, *node.args[1:])
                part.recompile()
            self._by_device[device] = module
        return self._by_device[device]


class State(nn.Module):
    """Holds parameters and module buffers by the model's names; the code is in the graphs."""

    def train(self, mode: bool = True) -> State:
        raise RuntimeError(
            f"{'train' if mode else 'eval'}: the modules inside a traced stage have no mode of "
            "their own; set it before the model is cut, or set the stage's"
        )


#: A module and the name of its parameter or buffer.
Slot = tuple[nn.Module, str]
#: A stage's computation in a mode, and where its state is.
Graph = tuple[Program, list[Slot]]


class TracedStage(nn.Module):
    """One stage of a traced model; ``partition`` makes it.

    Stages pass on a tensor, or a tuple of every tensor that a later stage needs. A tensor that only
    a later stage uses (a skip connection) passes through unchanged.

    ``train()`` and ``eval()`` select a graph that was traced in that mode; all graphs use the same
    parameters and module buffers. If the model's modules were in mixed modes, the stage keeps them
    until ``train()`` or ``eval()`` is called. Parameters keep the model's names.
    """

    block_names: Sequence[str] = ()  # the modules in it are never called

    def __init__(self, part: State, modes: dict[Mode, Graph | str], training: bool) -> None:
        super().__init__()
        self.part = part
        self._modes = modes  # a text says why there is no graph of a mode
        # The stage's mode that stands for the modules' mixed ones, until train() or eval().
        self._mixed: bool | None = training if None in modes else None
        self.columns: Columns | None = None  # set on a first stage that takes mappings
        self.cut = Cut(prefixes={"part.": ""})
        set_mode(self, training)

    @property
    def takes(self) -> int:
        """Number of input tensors."""
        graphs = [graph for graph in self._modes.values() if not isinstance(graph, str)]
        return len(graphs[0][0].inputs)

    def train(self, mode: bool = True) -> TracedStage:
        """Select the training or evaluation graph; RuntimeError if there is none."""
        if isinstance(why := self._modes[mode], str):
            raise RuntimeError(f"{'train' if mode else 'eval'}: {why}")
        self._mixed = None
        set_mode(self, mode)
        return self

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Any:
        """Return the tensors that later stages need, or the model's output."""
        if self.columns is not None:
            value = tuple(self.columns.of(value).values())
        tensors = value if isinstance(value, tuple) else (value,)
        graph = self._modes[None if self._mixed is self.training else self.training]
        if isinstance(graph, str):
            raise RuntimeError(f"forward: {graph}")
        program, slots = graph
        return program(tensors, [getattr(owner, name) for owner, name in slots])


def programs_of(exported: ExportedProgram) -> list[tuple[Program, dict[str, Tensor]]]:
    """Cut an exported model at its marks; return each stage's program and state."""
    cutter = _Cutter(exported)
    return [cutter.program(k) for k in range(len(cutter.stages))]


class _Cutter:
    """Splits an exported model's graph by the stages that make and need its values."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._module = exported.module()
        self._guards: nn.Module | None = None
        self._returned: list[fx.Node] = []
        self._home: dict[fx.Node, int] = {}  # the stage that makes a value; -1: a model input
        self._last: dict[fx.Node, int] = {}  # the last stage that takes a value from another
        self.stages: list[list[fx.Node]] = [[]]
        for node in self._module.graph.nodes:
            self._place(node)
        if not self.stages[-1] and len(self.stages) > 1:
            self.stages.pop()
        spec = exported.call_spec.out_spec
        assert spec is not None
        flat = not spec.is_leaf() and all(child.is_leaf() for child in spec.children())
        # A tuple or list of tensors becomes a tuple; other outputs are rebuilt as they were.
        listed = flat and spec.type in (tuple, list)
        self._form: Callable[[tuple[Tensor, ...]], Any] = tuple if listed else spec.unflatten
        for k, nodes in enumerate(self.stages):
            for node in nodes:
                self._take(node.all_input_nodes, k)
        self._take(self._returned, len(self.stages) - 1)
        for k in range(len(self.stages)):
            self._take_sizes(k)

    def _place(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._home[node] = -1
        elif node.op == "call_module":  # only the guards
            self._guards = self._module.get_submodule(str(node.target))
        elif node.op == "output":
            returned: Any = node.args[0]
            self._returned = list(returned) if isinstance(returned, (tuple, list)) else [returned]
            for value in self._returned:
                if not isinstance(value, fx.Node) or not _is_tensor(value):
                    raise ValueError(
                        f"split_points: the model returns {value!r}, expected a tensor or a tuple "
                        "of tensors"
                    )
        elif str(node.target) == "pippy._pipe_split.default":
            if self.stages[-1]:
                self.stages.append([])
        elif node.op == "call_function" and not _is_size(node):
            home = len(self.stages) - 1
            # A tuple is unpacked on the stage that made it.
            if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                home = self._home[node.args[0]]
            self._home[node] = home
            self.stages[home].append(node)

    def _take(self, values: Sequence[fx.Node], k: int) -> None:
        """Have values that other stages make arrive at a stage."""
        for node in values:
            if self._home.get(node, k) == k:
                continue
            if not _is_tensor(node):
                raise ValueError(
                    f"split_points: stage {k} takes {node.name}, a "
                    f"{type(node.meta.get('val')).__name__}; stages can pass on nothing but tensors"
                )
            self._last[node] = max(k, self._last.get(node, k))

    def _take_sizes(self, k: int) -> None:
        """Read sizes from a tensor that arrives anyway, or else pass on the tensor they are of."""
        waiting = [n for node in self.stages[k] for n in node.all_input_nodes if _is_size(n)]
        while waiting:
            node = waiting.pop()
            sources = node.all_input_nodes
            waiting += filter(_is_size, sources)
            if not self._carrier(node, k):
                self._take([source for source in sources if not _is_size(source)], k)

    def _carrier(self, size: fx.Node, k: int) -> tuple[fx.Node, int] | None:
        """Return a tensor that arrives at the stage and has this size, and the dimension."""
        if str(size.target) != "aten.sym_size.int":
            return None
        wanted = size.meta["val"]
        for node in self._arriving(k):
            for dim, extent in enumerate(node.meta["val"].shape):
                if not isinstance(extent, int) and extent.node.expr == wanted.node.expr:
                    return node, dim
        return None

    def _arriving(self, k: int) -> list[fx.Node]:
        if k == 0:
            return [node for node, home in self._home.items() if home < 0]
        return sorted(node for node, last in self._last.items() if self._home[node] < k <= last)

    def program(self, k: int) -> tuple[Program, dict[str, Tensor]]:
        is_last = k == len(self.stages) - 1
        arrives = self._arriving(k)
        leaves = self._returned if is_last else self._arriving(k + 1)
        if not leaves:
            raise ValueError(f"split_points: no later stage needs anything of stage {k}")
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in arrives}
        bodies: dict[str, Any] = {}
        state: dict[str, Tensor] = {}
        placeholders: dict[str, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = copy_of(node)
                copies[node].meta = {}
            return copies[node]

        def copy_of(node: fx.Node) -> fx.Node:
            if node.op == "get_attr":
                name = str(node.target)
                held = operator.attrgetter(name)(self._module)
                if isinstance(held, nn.Module):
                    bodies[name] = held
                    return graph.get_attr(name)
                if name not in state:
                    state[name] = held
                    placeholders[name] = graph.placeholder(f"state_{len(placeholders)}")
                return placeholders[name]
            if (carrier := self._carrier(node, k)) is not None:
                source, dim = carrier
                return graph.call_function(torch.ops.aten.sym_size.int, (copies[source], dim))
            return graph.node_copy(node, copied)

        for node in self.stages[k]:
            copied(node)
        graph.output(tuple(map(copied, leaves)))
        graph.lint()
        program = Program(
            fx.GraphModule(bodies, graph),
            list(state.values()),
            [node.meta["val"] for node in arrives],
            tuple(map(Port.of, arrives)),
            self._form if is_last else (operator.itemgetter(0) if len(leaves) == 1 else tuple),
            self._guards if k == 0 else None,
        )
        return program, state


def _fixed(size: int | torch.SymInt) -> int | None:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_size(node: fx.Node) -> bool:
    """Whether it is a number that depends only on sizes."""
    if node.op != "call_function":
        return False
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("val"), numbers) and (
        str(node.target) in _SIZES or all(map(_is_size, node.all_input_nodes))
    )
