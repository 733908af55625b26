"""Binding: an optimizer's weights and state kept in buffers that a pipeline owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor

from spectrain_ext.operators.laws import Horizons

from .ledger import Ledger
from .resolve import resolved
from .rows import Rows
from .rule import Group, Kinds
from .state import fits, named

Views = Mapping[Tensor, Tensor]
#: Rows by the kinds of groups, and by whose weights and which stale ones they have.
Known = dict[tuple[Kinds, int, int], list[Rows]]


class Binding:
    """Which tensors hold each parameter's true weights and its state, as ``bind`` was given them.

    Args:
        groups: the optimizer's.
        master: the weights; None: the parameters.
        given: a mapping of tensors for each of the keys, or for the only one.
        keys: of the state.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        master: Views | None,
        given: Views | Mapping[str, Views],
        keys: Sequence[str],
    ) -> None:
        self.given = given
        self.weights = {
            p: p if master is None else _given("master", where, p, master)
            for where, p in named(groups)
        }
        self.known: Known = {}
        #: all rows that there are: these, and those of sinks
        self.all_known = [self.known]
        self.stale: Views | None = None  # what a correction reads
        self.buffers = self.buffers_for(groups, keys)
        # by the address of what was given, which is kept: nothing else can come to lie there
        self._all_weights = {id(master): (master, self.weights)}

    def buffers_for(
        self, groups: Sequence[Group], keys: Sequence[str]
    ) -> dict[Tensor, tuple[Tensor, ...]]:
        """The given buffers of every parameter; ValueError where there are none, or unsuitable."""
        buffers = {}
        by_key = _by_key(self.given, keys)
        for where, p in named(groups):
            found: list[Tensor] = []
            for key in keys:
                found.append(_given(key, where, p, by_key[key]))
                if not fits(self.weights[p], found[-1]) or found[-1].dtype != found[0].dtype:
                    raise ValueError(
                        f"{key} of {where} must have the shape, strides, device and dtype of its "
                        f"weights ({_words(self.weights[p])}), got {_words(found[-1])}"
                    )
            buffers[p] = tuple(found)
        return buffers

    def rows(self, ledger: Ledger, kinds: Kinds, sink: PredictionSink | None = None) -> list[Rows]:
        """Return the rows of every parameter, with the outs of a sink.

        They are resolved on first use and not before: until then the owner may still move the
        parameters into a buffer (``p.data = view``). RuntimeError for one that has moved since.
        """
        known, outs = (self.known, None) if sink is None else (sink.known, sink.outs)
        key = kinds, id(self.weights), id(self.stale)
        if key not in known:
            every = range(len(ledger.params))
            known[key] = resolved(
                ledger, every, kinds, weights=self.weights, outs=outs, stale=self.stale
            )
        for rows in known[key]:
            if not rows.storage_unchanged():
                raise RuntimeError(
                    f"a parameter of group {rows.cohorts[0].group} no longer has the storage it "
                    "was bound with (.to() or load_state_dict(assign=True) since bind)"
                )
            rows.arrange()
        return known[key]

    def update_in(self, groups: Sequence[Group], views: Views) -> None:
        """Have the weights in these tensors from now on; what had them is remembered."""
        found = self._all_weights.get(id(views))
        if found is None:
            weights = {p: _given("weights", where, p, views) for where, p in named(groups)}
            found = self._all_weights[id(views)] = views, weights
        self.weights = found[1]


def _by_key(given: Views | Mapping[str, Views], keys: Sequence[str]) -> Mapping[str, Views]:
    by_key = cast("Mapping[str, Views]", given)
    if all(key in by_key for key in keys):
        return by_key
    if len(keys) == 1 and not any(isinstance(key, str) for key in given):
        return {keys[0]: cast("Views", given)}
    raise ValueError(f"bind: buffers must have a mapping of tensors for {' and '.join(keys)}")


class PredictionSink:
    """Where predictions of an optimizer's weights go: one tensor per parameter, resolved once.

    Made by :meth:`PredictingOptimizer.prediction_sink`, valid until the optimizer is unbound.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        binding: Binding,
        outs: Views,
        write: Callable[[PredictionSink, Horizons], None],
    ) -> None:
        for where, p in named(groups):
            out, weight = _given("outs", where, p, outs), binding.weights[p]
            if out.shape != weight.shape or out.stride() != weight.stride():
                raise ValueError(f"outs of {where} must be {_words(weight)}, got {_words(out)}")
        self._write = write
        self.binding = binding
        self.outs = outs
        self.known: Known = {}
        binding.all_known.append(self.known)

    def write(self, steps: Horizons) -> None:
        """Write the prediction of every parameter, with each group's current learning rate.

        ``steps`` counts updates (>= 0; 0 copies the weights' bits), or is a law of
        ``spectrain_ext.laws`` that needs no gradient; or a tuple of these, one for each group.
        Nothing is allocated and autograd's version counters stay as they are. ValueError: bad
        ``steps``, or a prediction of a group whose momentum is 0. RuntimeError: the optimizer is
        not bound as it was.
        """
        self._write(self, steps)


def _given(name: str, where: str, p: Tensor, tensors: Views) -> Tensor:
    if p not in tensors:
        raise ValueError(f"{name} has no tensor for {where}")
    found = tensors[p]
    if found.shape != p.shape or found.device != p.device:
        raise ValueError(f"{name} of {where} must be {_words(p)}, got {_words(found)}")
    return found


def _words(tensor: Tensor) -> str:
    return (
        f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
        f"on {tensor.device}"
    )
