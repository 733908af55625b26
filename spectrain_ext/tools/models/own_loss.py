"""Extracts a Hugging Face model's own loss function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spectrain_ext.modules import set_mode, untouched
from spectrain_ext.partitioning import NO_LOSS as NO_LOSS
from spectrain_ext.rng import forked_rng

from .outline import Columns, copy_sharing, evaluated, hooked, quoted
from .stand_ins import StandIns, close, running

#: The label of positions without a loss.
_IGNORED = -100


@dataclass(frozen=True, eq=False, repr=False)
class OwnLoss:
    """``loss_fn(output, batch)``, the ``loss`` that the model returns when it gets labels.

    If that is a mean over labels other than -100, the result is a pair (sum, count), so that the
    mean is exact over microbatches with different numbers of labels.
    """

    _function: Callable[..., Tensor]
    # The model's arguments for the function; an _Argument names the source of a tensor.
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    labels: tuple[str, ...]
    _predicted: slice | None = None  # labels in the sum; None: the loss is a mean over samples
    _balance: float = 0.0  # the weight of the output's aux_loss

    def _with_labels(self, batch: Any) -> Any:
        if isinstance(batch, Tensor) and len(self.labels) == 1:
            batch = {self.labels[0]: batch}
        if not isinstance(batch, Mapping) or any(name not in batch for name in self.labels):
            has = quoted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(f"batch: the loss needs {quoted(self.labels)}, got {has}")
        return batch

    def count(self, batch: Any) -> Tensor:
        """Return the number of labels in a batch that the loss is a mean over, as a 0-d tensor."""
        if self._predicted is None:
            raise TypeError("count: the model's loss is no mean over its labels")
        labels = self._with_labels(batch)[self.labels[0]]
        count: Tensor = (labels[..., self._predicted] != _IGNORED).sum()
        return count

    def __call__(self, output: Any, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss; TypeError unless the batch is the labels or a mapping with them."""
        batch = self._with_labels(batch)
        sources = {"output": output, "batch": batch}

        def value_of(value: Any) -> Any:
            return sources[value.source][value.key] if isinstance(value, _Argument) else value

        args = [value_of(value) for value in self._args]
        kwargs = {k: value_of(v) for k, v in self._kwargs.items()}
        count = None
        if self._predicted is not None:
            kwargs["num_items_in_batch"] = 1  # transformers then divides the sum by 1
            count = self.count(batch)
        loss = self._function(*args, **kwargs)
        if self._balance:
            loss = loss + self._balance * output["aux_loss"] * (1 if count is None else count)
        return loss if count is None else (loss, count)


class _Argument(NamedTuple):
    source: str
    key: str


def own_loss(
    model: Any, columns: Columns, example: object, output: Any, stand_ins: StandIns | None = None
) -> OwnLoss | str:
    """Record how a model computes its loss; return it, or why it cannot be used."""
    if not isinstance(output, Mapping):
        return f"a {type(model).__name__} is set to return no dictionary; give a loss_fn"
    labels = _labels(model.config, columns.labels, example, output)
    if not labels:
        return f"a {type(model).__name__} takes no labels that could be made up; give it a loss_fn"
    batch = {**columns.of(example), **labels}
    learned = partial(_learned, model, batch, tuple(labels), columns.fixed, stand_ins)
    config = vars(model.config)
    before = dict(config)
    loss: OwnLoss | str = ""
    try:
        with evaluated(model):
            loss = learned()
            if "aux_loss" in output and isinstance(loss, OwnLoss):
                loss = replace(loss, _balance=float(model.router_aux_loss_coef))
                with running(model, stand_ins):
                    whole = model(**{**batch, **columns.fixed, "output_router_logits": True})
                    total, count = loss(whole, batch)
                if stand_ins is None and not close(total / count, whole["loss"]):
                    return f"a {type(model).__name__} adds its aux_loss otherwise; give a loss_fn"
            if isinstance(loss, OwnLoss):
                # In training mode it may add a term. One sample may be too few to run that.
                with untouched(model), forked_rng([model]), suppress(Exception):
                    set_mode(model, True)
                    loss = why if isinstance(why := learned(), str) else loss
    except Exception as error:
        return f"a {type(model).__name__} computes no loss of the example: {error}"
    finally:
        config.clear()  # some models record the kind of their first labels there
        config.update(before)
    return loss


def _learned(
    model: Any,
    batch: Mapping[str, Tensor],
    labels: tuple[str, ...],
    fixed: Mapping[str, Any],
    stand_ins: StandIns | None,
) -> OwnLoss | str:
    """Return a model's loss in its present mode, if its loss_function alone computes it."""
    kind = type(model).__name__
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor, int]] = []
    real: Callable[..., Tensor] = model.loss_function

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        loss = real(*args, **kwargs)
        calls.append((args, kwargs, loss, loss._version))
        return loss

    copied = copy_sharing(model, {})
    vars(copied)["_loss_function"] = watched
    with running(copied, stand_ins):
        output = copied(**batch, **fixed)
    if not calls and stand_ins is None:
        standard = _standard(copied, batch, output, labels, fixed)
        if standard is not None:
            return _counted(standard, output, batch)
    if len(calls) != 1:
        return f"a {kind} computes its loss otherwise than by its loss_function; give a loss_fn"
    args, kwargs, returned, version = calls[0]
    is_alone = output["loss"] is returned and returned._version == version
    sources = {
        id(tensor): _Argument(source, key)
        for source, holder in (("batch", batch), ("output", output))
        for key, tensor in holder.items()
        if isinstance(tensor, Tensor)
    }

    def argument_of(value: Any) -> Any:
        return sources.get(id(value)) if isinstance(value, Tensor) else value

    arguments = tuple(map(argument_of, args)), {k: argument_of(v) for k, v in kwargs.items()}
    loss = OwnLoss(real, *arguments, labels)
    try:
        with running(copied, stand_ins):
            recomputed = loss(output, batch)
        assert isinstance(recomputed, Tensor)
        is_alone &= stand_ins is not None or torch.equal(recomputed, returned)
    except Exception as error:
        return f"a {kind}'s loss needs more than its output and labels: {error}"
    if not is_alone:
        return f"a {kind}'s loss is not its loss_function's alone; give a loss_fn"
    if stand_ins is not None:  # there are no values, so make some up
        output = {key: _with_values(value) for key, value in output.items()}
        batch = {key: _with_values(value) for key, value in batch.items()}
    return _counted(loss, output, batch)


def _standard(
    model: Any,
    batch: Mapping[str, Tensor],
    output: Mapping[str, Any],
    labels: tuple[str, ...],
    fixed: Mapping[str, Any],
) -> OwnLoss | None:
    """Return the loss of transformers that gives the same number as the model's own code."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    logits = [name for name in output if name.endswith("logits")]
    width, first = output[logits[0]].shape[-1], batch[labels[0]]
    # More samples, with other labels, show weights of classes; then what ignored labels do.
    doubled = {n: torch.cat([t, t]) if len(t) == len(first) else t for n, t in batch.items()}
    for name in labels:
        t = batch[name]
        doubled[name] = torch.cat([t, 1 - t if t.is_floating_point() else (t + 1) % width])
    trials = [doubled]
    if first.dim() > 1 and not first.is_floating_point():
        trials.append({**batch, labels[0]: _some_ignored(first)})
    results = [(model(**trial, **fixed), trial) for trial in trials]
    arguments: dict[str, Any] = {name: _Argument("output", name) for name in logits}
    arguments.update((name, _Argument("batch", name)) for name in labels)
    # Each function takes some of these and ignores the others.
    arguments.update(pooled_logits=arguments.get("logits"), vocab_size=width, config=model.config)
    function = LOSS_MAPPING.get(model.loss_type)
    for candidate in filter(None, (function, LOSS_MAPPING["ForMaskedLM"])):
        loss = OwnLoss(candidate, (), arguments, labels)
        with suppress(TypeError, ValueError, IndexError, RuntimeError):
            if all(
                close(torch.as_tensor(loss(result, trial)).to(result["loss"]), result["loss"])
                for result, trial in results
            ):
                return loss
    return None


def _counted(loss: OwnLoss, output: Any, batch: Mapping[str, Any]) -> OwnLoss:
    """Return the loss as a sum and a count if it is a mean over labels."""
    # Is it a mean over all labels, or over all but the first (next-token prediction)?
    for predicted in (slice(None), slice(1, None)):
        summed = replace(loss, _predicted=predicted)
        if _is_quotient(loss, summed, output, batch):
            return summed
    return loss


def _with_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape)
    return torch.arange(value.numel()).view(value.shape) % 2


def _is_quotient(loss: OwnLoss, summed: OwnLoss, output: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the loss is sum / count, also when some labels are ignored."""
    if len(summed.labels) > 1 or batch[summed.labels[0]].is_floating_point():
        return False
    batch = {**batch, summed.labels[0]: _some_ignored(batch[summed.labels[0]])}
    try:
        mean = loss(output, batch)
        total, count = summed(output, batch)
        assert isinstance(mean, Tensor)
        return total.shape == mean.shape and close(total / count, mean)
    except (TypeError, ValueError, IndexError, RuntimeError):
        return False


def _some_ignored(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels.view(-1)[1::3] = _IGNORED
    return labels


def _labels(
    config: Any, names: tuple[str, ...], example: object, output: Mapping[str, Any]
) -> dict[str, Tensor]:
    if isinstance(example, Mapping) and any(name in example for name in names):
        return {name: example[name] for name in names if name in example}
    if {"start_positions", "end_positions"} <= set(names):
        count = len(output["start_logits"])
        zeros = output["start_logits"].new_zeros(count, dtype=torch.int64)
        return {"start_positions": zeros, "end_positions": zeros.clone()}
    logits = output.get("logits")
    if "labels" not in names or logits is None:
        return {}
    kind = getattr(config, "problem_type", None)
    like_logits = kind in ("regression", "multi_label_classification")
    if logits.dim() == 2 and (like_logits or (kind is None and config.num_labels == 1)):
        return {"labels": torch.zeros_like(logits)}
    sizes = logits.shape[:-1]
    numbers = torch.arange(sizes.numel(), device=logits.device).view(sizes)
    return {"labels": numbers % logits.shape[-1]}


# The loss that balances a mixture's experts: transformers' load_balancing_loss_func, from sums


def routers_of(
    model: nn.Module, inputs: Mapping[str, Tensor], fixed: Mapping[str, Any]
) -> dict[str, int]:
    """Return the modules that make ``router_logits``, and which of their results these are."""
    names = {module: name for name, module in model.named_modules()}
    sources: dict[int, tuple[str, int]] = {}

    def end(module: nn.Module, _: object, output: Any) -> None:
        results = enumerate(output if isinstance(output, tuple) else (output,))
        sources.update((id(result), (names[module], index)) for index, result in results)

    with evaluated(model), hooked(names, lambda *_: None, end):
        output = model(**inputs, **fixed)
    routers = dict(sources.get(id(t), ("", 0)) for t in output.get("router_logits") or ())
    if not all(routers) or output.get("aux_loss") is None:
        raise ValueError(
            f"model: its config asks for output_router_logits, of which a {type(model).__name__} "
            "makes no aux_loss that its stages could; set model.config.output_router_logits = False"
        )
    return routers


def routed_sums(logits: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
    """Sum over tokens how often an expert is among the top k, and its probability: (2, experts)."""
    probabilities = torch.softmax(logits, -1)
    chosen = probabilities.topk(top_k, -1).indices
    counts = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
    both = torch.stack([counts, probabilities]).float()
    return both.sum(1) if mask is None else mask.flatten().to(both) @ both


def balance_loss(sums: Tensor, top_k: int) -> Tensor:
    """Return experts * sum of an expert's share of tokens * its mean probability, a 0-d tensor.

    That is equations 4 to 6 of Switch Transformer (arXiv 2101.03961), over all layers at once.
    """
    counts, probabilities = sums / (sums[0].sum() / top_k)
    loss: Tensor = len(counts) * counts @ probabilities
    return loss
