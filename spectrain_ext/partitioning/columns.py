"""Selects the columns of a mapping batch that a model's forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

Inputs = dict[str, Tensor]

_FIRST = ("attention_mask", "position_ids", "token_type_ids")
_NEVER = ("inputs_embeds", "past_key_values", "cache_position", "cache_params")
_OPTIONS = ("output_", "return_", "use_", "logits_to_keep")
_LABELS = ("label", "labels", "label_ids")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """How to pass tensors to a forward: by position if there are no names."""

    names: tuple[str, ...] = ()
    whole: bool = False  # pass a dict as the only argument
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further arguments

    def __call__(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.names:
            return tuple(values), {}
        named = dict(zip(self.names, values, strict=True))
        return ((named,), {}) if self.whole else ((), named)

    def run(self, model: nn.Module, value: Any) -> Any:
        args, kwargs = self(value if isinstance(value, tuple) else (value,))
        return model(*args, **kwargs, **self.fixed)


BY_POSITION = Call()


@dataclass(frozen=True)
class Columns:
    """The use of each column of a batch; columns not named here are dropped."""

    takes: tuple[str, ...]  # that the forward accepts, the main one first
    needed: tuple[str, ...]  # that the forward requires
    labels: tuple[str, ...] = ()  # parameters of the forward that only its loss uses
    refused: tuple[str, ...] = ()  # parameters of the forward that stages do not accept
    more: tuple[str, ...] = ()  # that the caller keeps for the loss
    whole: bool = False  # whether the forward takes a dict

    @property
    def call(self) -> Call:
        return Call(self.takes, self.whole)

    def kept(self, batch: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the columns to keep, as transformers' ``Trainer`` does; raises as ``of``."""
        self.of(batch, where)
        names = (*self.takes, *self.labels, *_LABELS, *self.more)
        return {n: value for n, value in batch.items() if n in names and value is not None}

    def of(self, batch: object, where: str = "batch") -> Inputs:
        """Return the forward's columns of a batch; TypeError if they do not fit."""
        if isinstance(batch, Tensor):
            batch = {self.takes[0]: batch}
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{where}: expected a mapping of the model's arguments, or {self.takes[0]!r} "
                f"alone, got a {type(batch).__name__}"
            )
        given = {name: value for name, value in batch.items() if value is not None}
        if any(name not in given for name in self.needed):
            rest = [name for name in self.takes if name not in self.needed]
            maybe = f", and maybe {_quoted(rest)}" if rest else ""
            labels = f", and for the loss {_quoted(self.labels)}" if self.labels else ""
            raise TypeError(
                f"{where}: expected {_quoted(self.needed)}{maybe}{labels}; got {_quoted(batch)}"
            )
        for name in self.refused:
            if name in given and name not in self.more:
                raise TypeError(
                    f"{where}: the model's forward takes {name!r}, and its stages do not, which "
                    f"were cut with {_quoted(self.takes)}; leave it out, or cut the model with an "
                    "example_input that has it"
                )
        return {name: given[name] for name in self.takes if name in given}

    def narrowed(self, example: object) -> Columns:
        """Restrict to an example's columns: a traced model takes and needs exactly these."""
        given = tuple(self.of(example))
        left = tuple(name for name in self.takes if name not in given)
        return replace(self, takes=given, needed=given, refused=(*self.refused, *left))


def columns_of(model: nn.Module, more: tuple[str, ...] = ()) -> Columns:
    """Return the columns for the forward of a Hugging Face model."""
    parameters = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    named = [n for n, p in parameters.items() if p.kind not in _VARIADIC and n != main]
    refused = tuple(n for n in named if n in _NEVER or n.startswith(_OPTIONS))
    labels = tuple(n for n in named if _is_label(n) and n not in refused)
    rest = [n for n in named if n not in (*labels, *refused)]
    rest.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    return Columns((main, *rest), (main,), labels, refused, more)


def columns_in(
    model: nn.Module, example: Mapping[str, object], more: tuple[str, ...] = ()
) -> Columns:
    """Return the columns for any module's forward, given a batch like the example.

    They are keyword arguments if the forward can be called with those that it names (or with all if
    it accepts ``**``); otherwise the batch is one dict argument.
    """
    parameters = inspect.signature(model.forward).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in _VARIADIC}
    positional = [n for n, p in named.items() if p.kind is not p.KEYWORD_ONLY]
    keywords = [n for n, p in named.items() if p.kind is not p.POSITIONAL_ONLY]
    needed = [n for n, p in named.items() if p.default is p.empty]
    tensors = tuple(name for name, value in example.items() if isinstance(value, Tensor))
    wanted = [name for name in keywords if example.get(name) is not None]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = (*wanted, *(n for n in tensors if any_name and n not in named))
    if given and set(needed) <= set(given):
        for name in given:
            if name not in tensors:
                raise TypeError(
                    f"example_input[{name!r}]: expected a tensor, got a "
                    f"{type(example[name]).__name__}"
                )
        labels = tuple(name for name in keywords if _is_label(name) and name not in given)
        rest = tuple(name for name in keywords if name not in (*given, *labels))
        return Columns(given, given, labels, rest, more)
    if tensors and not wanted and positional and set(needed) <= {positional[0]}:
        return Columns(tensors, tensors, more=more, whole=True)
    raise TypeError(
        f"example_input: the model's forward needs {_quoted(needed) or 'other arguments'}, got "
        f"{_quoted(example)}"
    )


def _is_label(name: str) -> bool:
    return "label" in name or name in ("start_positions", "end_positions")


def _quoted(names: object) -> str:
    assert isinstance(names, (Mapping, Sequence))
    return ", ".join(map(repr, names))
