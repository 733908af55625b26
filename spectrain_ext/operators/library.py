"""Registers the operators as `torch.ops.spectrain.*`, with schemas and fake kernels for graphs.

Under torch.compile the package's operators become these (see `operator`). Called eagerly they are
slower, because torch's dispatcher visits every tensor. They write the arguments that their schemas
mark, bump those version counters, and record nothing for autograd. The schemas follow from the
operators' signatures. They take lists of tensors and plain numbers:

- `lr` is a number; `lr_tensor`, a tensor of one element, replaces it. A graph is recompiled for a
  new number, but not for a new value in a tensor. So is `step`, with `step_tensor`.
- A law of `spectrain_ext.laws` is a name and numbers: "linear" [s], "geometric" [s],
  "second_order" [delay, lead].
- Outputs are called `outs`, because torch.compile treats the name `out` specially.
- The predictions of a step are `horizons` and `outs`, prediction after prediction. `laws` gives
  each a law, whose numbers are the next ones of `horizons`.
- There is no `zero_grad`, because a schema cannot mark an argument as written in some calls only.
  It becomes a separate operation in a graph.
- The `others` of `distance` are `count` concatenated lists. Its result has a row per list and a
  column per tensor, plus one for the whole list.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from . import laws
from .calls import StepOptions, bump_versions
from .laws import Horizon, Law

Function = TypeVar("Function", bound=Callable[..., Any])

# Laws in schemas: those of laws.py, "second_order" for SecondOrder.

_LAWS: dict[str, type[Any]] = {
    re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower(): law
    for name, law in vars(laws).items()
    if inspect.isclass(law) and Law in law.__bases__
}


def _encoded(steps: Horizon) -> tuple[str, list[Any]]:
    for name, law in _LAWS.items():
        if type(steps) is law:  # a subclass may be another formula
            return name, [getattr(steps, field) for field in _LAWS[name].__match_args__]
    return "linear", [steps]  # a number, or refused by the schema


def _decoded(name: str, numbers: Sequence[float]) -> Horizon:
    if name not in _LAWS:
        raise ValueError(f"law: expected one of {sorted(_LAWS)}, got {name!r}")
    n = len(_LAWS[name].__match_args__)
    if len(numbers) != n:
        raise ValueError(f"steps: expected {n} numbers of law {name!r}, got {len(numbers)}")
    law: Horizon = _LAWS[name](*numbers)
    return law


# Arguments in schemas.

_LISTS = {"Written": "Tensor({}!)[]", "Written | None": "Tensor({}!)[]", "Gradients": "Tensor?[]"}
_NUMBERS = {"float": "float", "float | None": "float?", "int": "SymInt", "bool": "bool"}
_OPTIONS = {
    name: {"Array | None": "Tensor?", "int | None": "SymInt?"}[annotation.__forward_arg__]
    for name, annotation in StepOptions.__annotations__.items()
    if name != "zero_grad"
}


class _Form(NamedTuple):
    """The form in a schema of an argument that is neither a list of tensors nor a number."""

    schema: str
    # From the argument and the number of tensors to the schema's arguments, and back: the latter
    # removes them from the given ones.
    encode: Callable[[Any, int], dict[str, Any]]
    decode: Callable[[dict[str, Any], int], Any]

    def with_defaults(self, defaults: dict[str, Any]) -> str:
        schema = self.schema
        for name, value in defaults.items():
            schema = re.sub(rf"\b{name}\b(=[^,]+)?", f"{name}={value!r}", schema)
        return schema


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)


def _rate(lr: float | Tensor, _: int) -> dict[str, Any]:
    if torch.compiler.is_compiling() and not isinstance(lr, Tensor):
        # A bare number would become a constant of the graph, and a learning-rate schedule would
        # recompile at every step. A product stays an operation.
        lr = torch.ones((), dtype=torch.float64) * lr
    return {"lr": 0.0, "lr_tensor": lr} if isinstance(lr, Tensor) else {"lr": lr}


def _decoded_rate(given: dict[str, Any], _: int) -> Any:
    return _number(given.pop("lr_tensor"), given["lr"])


def _count(step: int | Tensor, _: int) -> dict[str, Any]:
    return {"step": 0, "step_tensor": step} if isinstance(step, Tensor) else {"step": step}


def _decoded_count(given: dict[str, Any], _: int) -> Any:
    return _number(given.pop("step_tensor"), given["step"])


def _number(tensor: Tensor | None, number: float) -> Any:
    """Return the number, or that of a tensor, which a kernel reads on a GPU."""
    return number if tensor is None else tensor if tensor.is_cuda else tensor.item()


def _predictions(predict: Sequence[tuple[Horizon, Any]], _: int) -> dict[str, Any]:
    encoded = [_encoded(steps) for steps, _ in predict]
    return {
        "outs": [t for _, out in predict for t in _list(out)],
        "horizons": [number for _, numbers in encoded for number in numbers],
        "laws": [law for law, _ in encoded],
    }


def _decoded_predictions(given: dict[str, Any], n: int) -> list[tuple[Horizon, Sequence[Tensor]]]:
    outs, horizons, names = (given.pop(name) for name in ("outs", "horizons", "laws"))
    predict: list[tuple[Horizon, Sequence[Tensor]]] = []
    at = 0
    for j, law in enumerate(["linear"] * len(horizons) if names is None else names):
        end = at + len(_LAWS[law].__match_args__) if law in _LAWS else at
        predict.append((_decoded(law, horizons[at:end]), outs[j * n : (j + 1) * n]))
        at = end
    if at != len(horizons) or n * len(predict) != len(outs):
        raise ValueError(
            f"outs: expected {n} tensors for each of the {len(predict)} predictions and "
            f"{at} horizons, got {len(outs)} tensors and {len(horizons)} horizons"
        )
    return predict


def _concatenated(others: Sequence[Any], _: int) -> dict[str, Any]:
    return {"others": [t for other in others for t in _list(other)], "count": len(others)}


def _taken_apart(given: dict[str, Any], n: int) -> list[Sequence[Tensor]]:
    others, count = given["others"], given.pop("count")
    if len(others) != count * n:
        raise ValueError(f"others: expected {count} times {n} tensors, got {len(others)}")
    return [others[j * n : (j + 1) * n] for j in range(count)]


#: By an argument's name, or its type in the operator's signature.
_FORMS = {
    "lr": _Form("float lr, Tensor? lr_tensor=None", _rate, _decoded_rate),
    "step": _Form("SymInt step, Tensor? step_tensor=None", _count, _decoded_count),
    "Horizon": _Form(
        'float[] steps, str law="linear"',
        lambda steps, _: dict(zip(("law", "steps"), _encoded(steps), strict=True)),
        lambda given, _: _decoded(given.pop("law"), given["steps"]),
    ),
    "Sequence[tuple[Horizon, Tensors]]": _Form(
        "Tensor({}!)[] outs, float[] horizons=[], str[]? laws=None",
        _predictions,
        _decoded_predictions,
    ),
    "tuple[float, float]": _Form(
        "float beta1, float beta2",
        lambda betas, _: dict(zip(("beta1", "beta2"), betas, strict=True)),
        lambda given, _: (given.pop("beta1"), given.pop("beta2")),
    ),
    "Sequence[Tensors]": _Form("SymInt count", _concatenated, _taken_apart),
}


class Row:
    """An operator's arguments, as its function declares them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__.removeprefix("_")
        self.parameters = inspect.signature(function).parameters
        every = self.parameters.items()
        self.positional = [name for name, p in every if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.lists = [name for name in self.positional if name != "out"]
        self.optional = {name for name, p in every if p.annotation == "Written | None"}  # lists
        self.keywords = {name: p for name, p in every if p.kind is p.KEYWORD_ONLY}
        self.defaults = {name: p.default for name, p in every if p.default is not p.empty}


class _Operator(Row):
    """An operator, called by the arguments of its schemas and the other way round."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        forms = {n: _FORMS.get(n) or _FORMS.get(p.annotation) for n, p in self.parameters.items()}
        self.forms = {name: form for name, form in forms.items() if form is not None}
        types = [_LISTS.get(self.parameters[name].annotation, "Tensor[]") for name in self.lists]
        lists = list(map(" ".join, zip(types, self.lists, strict=True)))
        keywords = []
        for name, form in self.forms.items():
            default = self.defaults.get(name, ())  # (): none, or of lists, which cannot have one
            keywords.append(form.with_defaults({} if default == () else form.encode(default, 0)))
        for name, p in self.keywords.items():
            if name not in ("out", "stream", *self.forms):
                default = f"={p.default}" if name in self.defaults else ""
                keywords.append(f"{_NUMBERS[p.annotation]} {name}{default}")
        if "options" in self.parameters:
            keywords += [f"{type_} {name}=None" for name, type_ in _OPTIONS.items()]
        result = {"None": "()", "T": "Tensor[]"}.get(function.__annotations__["return"], "Tensor")
        self.schemas = [_schema(self.name, lists, keywords, result)]
        if "out" in self.parameters:
            keywords.append("Tensor({}!)[] outs")
            self.schemas.append(_schema(f"{self.name}.out", lists, keywords, "()"))

    def in_graph(self, given: dict[str, Any]) -> Any:
        """Call the registered operator with the arguments of the package's operator."""
        given = {**self.defaults, **given}
        if given.pop("stream", None) is not None:
            raise ValueError("stream: a compiled function works on the current one, expected None")
        out, zero_grad = given.pop("out", None), given.pop("zero_grad", False)
        first = given[self.lists[0]]
        n = len(_list(first))
        arguments: dict[str, Any] = {}
        for name, value in given.items():
            if name in self.forms:
                arguments.update(self.forms[name].encode(value, n))
            else:
                arguments[name] = _list(value) if name in self.lists else value
        packet = getattr(torch.ops.spectrain, self.name)
        with torch.no_grad():
            if out is not None:
                packet.out(**arguments, outs=_list(out))
                return out
            result = packet.default(**arguments)
            if zero_grad:
                for grad in arguments["grads"]:
                    if grad is not None:
                        grad.zero_()
        return result[0] if isinstance(first, Tensor) and isinstance(result, list) else result

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that calls the eager operator with the schema's arguments."""
        parsed = torch._C.parse_schema(self.schemas[0]).arguments
        defaults = {each.name: each.default_value for each in parsed if each.has_default_value()}

        def kernel(*lists: Any, **given: Any) -> Any:
            n = len(lists[0])
            given = {**defaults, **given}  # torch leaves out what equals its default
            given.update(zip(self.lists, lists, strict=True))
            for name in self.optional:
                given[name] = given[name] or None if n else given[name]
            for name, form in self.forms.items():
                given[name] = form.decode(given, n)
            if "outs" in given:
                function(out=given.pop("outs"), **given)
                return None
            return function(**given)

        return kernel


def _schema(name: str, lists: Sequence[str], keywords: Sequence[str], result: str) -> str:
    arguments = ", ".join([*lists, "*", *keywords] if keywords else lists)
    return f"{name}({arguments}) -> {result}".format(*"abcdef")  # a letter for each written list


def _bumping(overload: Any) -> Callable[..., None]:
    """Return a kernel that bumps version counters while a graph is traced."""
    arguments = overload._schema.arguments
    written = [(i, argument.name) for i, argument in enumerate(arguments) if argument.is_write]
    tracing = torch._C._TorchDispatchModeKey.FUNCTIONAL

    # The real kernels do not run during tracing. With the counters bumped, autograd refuses a graph
    # whose backward needs overwritten values, as it does in eager calls.
    def bump(keys: Any, *args: Any, **kwargs: Any) -> None:
        if torch._C._get_dispatch_mode(tracing) is not None:
            for i, name in written:
                bump_versions(args[i] if i < len(args) else kwargs[name])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return bump


def _new_like(params: Sequence[Tensor], *_: Any, **__: Any) -> list[Tensor]:
    return [torch.empty_like(p, requires_grad=False) for p in params]


def _new_norms(params: Sequence[Tensor], _: Sequence[Tensor], *, count: int) -> Tensor:
    device = params[0].device if params else None
    return torch.empty(count, len(params) + 1, dtype=torch.float64, device=device)


_FAKES: dict[str, Callable[..., Any]] = {
    "()": lambda *_, **__: None,
    "Tensor[]": _new_like,
    "Tensor": _new_norms,
}

_library = torch.library.Library("spectrain", "DEF")  # registrations live as long as it does


def _register(schema: str, kernel: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    # Without this tag, inductor (torch 2.13) copies each argument to fix its strides, and
    # recomputes the copy of a gradient for a second operator, from already changed weights.
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    # As in eager calls, autograd records nothing.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    if schema.endswith("()"):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.spectrain, packet), overload or "default")
        _library.impl(name, _bumping(operator), "ADInplaceOrView", with_keyset=True)
    fake = _FAKES[schema.rpartition(" ")[2]]
    torch.library.register_fake(f"spectrain::{name}", fake, lib=_library)


def operator(function: Function) -> Function:
    """Register an operator under its name, and use the registered one under torch.compile.

    Positional arguments other than `out` are lists of tensors; it writes those of type `Written`.
    """
    row = _Operator(function)
    for schema in row.schemas:
        _register(schema, row.kernel(function))

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if torch.compiler.is_compiling():
            names = row.positional[: len(args)]
            return row.in_graph(dict(zip(names, args, strict=True), **given))
        return function(*args, **given)

    return cast(Function, call)
