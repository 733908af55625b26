"""SGD: torch.optim.SGD with one fused pass per step, and predictions of the weights to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spectrain_ext._lists import bump_versions
from spectrain_ext.optim.binding import Binding, PredictionSink, checked_outs
from spectrain_ext.optim.hyper import Hyper, read_hyper, read_steps
from spectrain_ext.optim.momentum import KEY, check_dtypes, converted, loaded_dtype
from spectrain_ext.optim.resolve import Resolver, buffer_of
from spectrain_ext.optim.rows import Rows

StateDict = dict[str, Any]


class SGD(torch.optim.SGD):
    """Stochastic gradient descent with momentum that can predict the weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are ``torch.optim.SGD``'s; checkpoints
    load in both directions. A step is one launch per group and device. The arithmetic is float32
    for weights of at most 32 bits (16-bit weights and momentum are rounded once per step, where
    torch's unfused step rounds after every operation) and float64 for float64.

    Args:
        params: parameters, named parameters or parameter groups: float32, float64, float16 or
            bfloat16, strided, on any devices.
        lr: learning rate, a number or a CPU tensor with one element (>= 0).
        momentum: momentum factor mu (>= 0).
        dampening: dampening of the gradient in the momentum, not applied to a buffer's first step.
        weight_decay: L2 penalty (>= 0).
        nesterov: Nesterov momentum; needs momentum and no dampening.
        maximize: ascend instead of descend.
        foreach: accepted for compatibility, without effect.
        differentiable: must be False.
        fused: accepted for compatibility, without effect.
        momentum_dtype: dtype of the momentum buffers; None means the parameter's. 16-bit parameters
            may have ``torch.float32`` momentum.

    Raises:
        ValueError: ``differentiable=True``, a number out of range or NaN, a duplicate parameter.
        TypeError: a parameter or ``momentum_dtype`` that the kernels do not know.

    The prediction (SpecTrain, arXiv 1809.02839, equation 4) of the weights ``steps`` updates ahead
    is ``W - lr*steps*v``, with v the momentum buffer. A parameter that has no momentum buffer yet
    is predicted to stay as it is.
    """

    # GradScaler would leave overflow checks to a step that claims this.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        if differentiable:
            raise ValueError(
                "differentiable=True is not supported: the step writes behind autograd's back"
            )
        self._momentum_dtype = momentum_dtype
        self._forget_resolved()
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._step_supports_amp_scaling = False

    def _forget_resolved(self) -> None:
        self._resolver = Resolver(self._momentum_dtype)
        self._predicted: list[Rows] | None = None
        self._binding: Binding | None = None
        self._next_write: tuple[PredictionSink, float] | None = None

    # Parameter groups and state, as torch.optim.Optimizer keeps them.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does; an invalid one raises and is not added.

        RuntimeError while the weights are predicted or the optimizer is bound.
        """
        self._refuse_while_predicted("add_param_group")
        if self._binding is not None:
            raise RuntimeError("add_param_group: unbind() the optimizer first")
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            self._check_group(index)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, index: int) -> None:
        group = self.param_groups[index]
        read_hyper(index, group)
        seen: dict[Tensor, int] = {}
        for i, p in enumerate(group["params"]):
            where = f"parameter {i} of group {index}"
            if p in seen:
                raise ValueError(f"{where} is parameter {seen[p]} of that group once more")
            seen[p] = i
            check_dtypes(where, p.dtype, self._momentum_dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Return what deepcopy and pickle keep; RuntimeError while the weights are predicted."""
        self._refuse_while_predicted("copying or pickling the optimizer")
        kept: dict[str, Any] = super().__getstate__()
        if self._binding is not None:
            kept["state"] = type(self.state)(
                dict, ((p, self._independent(entry)) for p, entry in self.state.items())
            )
        kept["_momentum_dtype"] = self._momentum_dtype
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what ``__getstate__`` or ``load_state_dict`` hands in."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_momentum_dtype", None)
        if "_resolver" not in self.__dict__:
            self._forget_resolved()

    def state_dict(self) -> StateDict:
        """Return the state as torch.optim.SGD's, with the same keys.

        A bound optimizer gives independent momentum tensors: a saved view would take the whole
        buffer it is a view of into the file.
        """
        result: StateDict = super().state_dict()
        if self._binding is not None:
            result["state"] = {k: self._independent(v) for k, v in result["state"].items()}
        return result

    @staticmethod
    def _independent(entry: dict[str, Any]) -> dict[str, Any]:
        buffer = entry.get(KEY)
        return entry if buffer is None else {**entry, KEY: buffer.detach().clone()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state_dict of this class or of torch.optim.SGD.

        The momentum is copied. It gets ``momentum_dtype`` if that was given; else a float32 buffer
        of a 16-bit parameter stays float32, and any other has the parameter's dtype. A bound
        optimizer stays bound, and the momentum takes the dtype of the bound buffers. What does not
        fit raises (ValueError, TypeError) and changes nothing; RuntimeError while the weights are
        predicted.
        """
        self._refuse_while_predicted("load_state_dict")
        buffers: dict[Tensor, Tensor] = {}

        # torch casts every floating-point state to its parameter's dtype. So the momentum is taken
        # out before torch sees it (hooks of the caller's run first) and put back right after.
        def take(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
            state = dict(loaded["state"])
            for where, p, key in self._matched(loaded["param_groups"]):
                entry = state.get(key)
                if not isinstance(entry, Mapping) or entry.get(KEY) is None:
                    continue
                dtype = loaded_dtype(
                    p.dtype, getattr(entry[KEY], "dtype", p.dtype), self._momentum_dtype
                )
                buffers[p] = converted(where, p, entry[KEY], dtype)
                state[key] = {k: v for k, v in entry.items() if k != KEY}
            return {**loaded, "state": state}

        def put(_: torch.optim.Optimizer) -> None:
            for p, buffer in buffers.items():
                self.state[p][KEY] = buffer
            if self._binding is not None:
                self._binding.adopt(self.state)

        handles = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _matched(self, saved_groups: list[dict[str, Any]]) -> list[tuple[str, Tensor, Any]]:
        """Pair saved keys with parameters, checking the saved numbers; [] if torch will refuse."""
        if [len(g["params"]) for g in saved_groups] != [
            len(g["params"]) for g in self.param_groups
        ]:
            return []
        for index, saved in enumerate(saved_groups):
            read_hyper(index, {**self.defaults, **saved})
        return [
            (f"parameter {i} of group {index}", p, key)
            for index, (group, saved) in enumerate(
                zip(self.param_groups, saved_groups, strict=True)
            )
            for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=True))
        ]

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype that a parameter's momentum buffer has, or will have."""
        buffer = buffer_of(self.state, param)
        saved = param.dtype if buffer is None else buffer.dtype
        return loaded_dtype(param.dtype, saved, self._momentum_dtype)

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returned, if given.

        Everything is checked before anything is written. Raises RuntimeError while the weights are
        predicted or for a sparse gradient, ValueError or TypeError for a number out of range or a
        gradient that does not match its parameter.
        """
        self._refuse_while_predicted("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._refuse_while_predicted("step")

        hypers = self._hypers()
        if self._binding is not None:
            todo = self._bound_rows()
        else:
            todo = [
                rows
                for index, (group, hyper) in enumerate(zip(self.param_groups, hypers, strict=True))
                for rows in self._resolver.for_step(index, group, self.state, hyper.momentum != 0.0)
            ]
        steps = None if self._next_write is None else self._next_write[1]
        if steps:
            self.check_can_predict()
        actives = [rows.read_gradients() for rows in todo]

        for rows, active in zip(todo, actives, strict=True):
            hyper = hypers[rows.group]
            rows.step(hyper, active, steps)
            rows.forget_gradients()
            if hyper.momentum != 0.0:
                self._resolver.keep_new_buffers(rows, active, self.state)
            if self._binding is None:
                bump_versions(
                    tuple(rows.params) if all(active) else tuple(compress(rows.params, active))
                )
        self._next_write = None
        return loss

    def _hypers(self) -> list[Hyper]:
        return [read_hyper(index, group) for index, group in enumerate(self.param_groups)]

    # Prediction in place.

    def check_can_predict(self) -> None:
        """Raise ValueError naming the first group whose momentum is 0: it cannot be predicted."""
        for index, group in enumerate(self.param_groups):
            if group["params"] and group["momentum"] == 0:
                raise ValueError(
                    f"parameter group {index} has momentum 0: a prediction needs a momentum buffer"
                )

    def predict_(self, steps: float) -> None:
        """Replace every weight by its prediction ``steps`` updates ahead, until :meth:`restore_`.

        ``W <- W - lr*steps*v`` with each group's current learning rate; ``steps >= 0`` counts
        updates and may be a fraction. The true weights are kept in one more buffer per parameter,
        in the same pass over memory. Parameters without a momentum buffer stay as they are.

        Raises RuntimeError if the weights are predicted already or the optimizer is bound,
        ValueError for bad ``steps`` or a group whose momentum is 0.
        """
        steps = read_steps(steps)
        self._refuse_while_predicted("predict_")
        if self._binding is not None:
            raise RuntimeError("predict_: the optimizer is bound, its owner predicts")
        self.check_can_predict()
        hypers = self._hypers()
        todo = [
            rows
            for index, group in enumerate(self.param_groups)
            for rows in self._resolver.for_prediction(index, group, self.state)
        ]
        for rows in todo:
            rows.plan.stash_predict_(lr=hypers[rows.group].lr, steps=steps)
            bump_versions(tuple(rows.params))
        self._predicted = todo

    def restore_(self) -> None:
        """Put back, to the bit, the weights that :meth:`predict_` replaced; else RuntimeError."""
        if self._predicted is None:
            raise RuntimeError("restore_: the weights are not predicted, call predict_ first")
        for rows in self._predicted:
            rows.restore()
            bump_versions(tuple(rows.params))
        self._predicted = None

    @contextmanager
    def predicted(self, steps: float) -> Iterator[None]:
        """Predict for the length of a ``with`` block, see :meth:`predict_`.

        Run the forward *and* its backward inside: both change the weights' version counters, so a
        backward outside of the block raises.
        """
        self.predict_(steps)
        try:
            yield
        finally:
            self.restore_()

    def _refuse_while_predicted(self, what: str) -> None:
        if self._predicted is not None:
            raise RuntimeError(f"{what}: the weights are predicted, call restore_() first")

    # For a pipeline: weights and momentum live in its buffers.

    def bind(
        self, master: Mapping[Tensor, Tensor] | None, momentum: Mapping[Tensor, Tensor]
    ) -> None:
        """Keep weights and momentum in tensors that the caller owns, until :meth:`unbind`.

        From now on :meth:`step` reads each parameter's ``grad``, updates ``master[p]`` (``None``: p
        itself) and keeps the momentum in ``momentum[p]``. Both have p's shape and device, and one
        layout: usually views of flat buffers. Momentum that exists is copied in; where there is
        none ``momentum[p]`` is filled with zeros, so that a prediction before the first step is the
        weights themselves. A bound optimizer does not touch autograd's version counters: who binds
        it vouches for the order of forwards, backwards and steps.

        Raises RuntimeError if bound already or while the weights are predicted, ValueError for a
        missing or unsuitable tensor; nothing has changed then.
        """
        self._refuse_while_predicted("bind")
        if self._binding is not None:
            raise RuntimeError("bind: the optimizer is bound already, unbind() it first")
        binding = Binding(self.param_groups, master, momentum)
        binding.check_state(self.param_groups, self.state)
        self._forget_resolved()
        self._binding = binding
        binding.adopt(self.state)

    def unbind(self) -> None:
        """Give the momentum ordinary storage again; RuntimeError if the optimizer is not bound.

        ``master`` and the parameters are left as they are: copying the one to the others is up to
        the owner.
        """
        self._bound("unbind")
        for entry in self.state.values():
            if isinstance(entry, dict) and isinstance(entry.get(KEY), Tensor):
                entry[KEY] = entry[KEY].detach().clone()
        self._forget_resolved()

    def prediction_sink(self, outs: Mapping[Tensor, Tensor]) -> PredictionSink:
        """Resolve where predictions go: ``outs[p]`` has the layout and device of p's weights.

        RuntimeError if the optimizer is not bound, ValueError for a missing or unsuitable tensor.
        """
        binding = self._bound("prediction_sink")
        checked_outs(self.param_groups, binding.weights, outs)
        return PredictionSink(self, binding, binding.resolve(self.param_groups, outs))

    def write_with_next_step(self, sink: PredictionSink | None, steps: float = 0.0) -> None:
        """Let the next :meth:`step` write what ``sink.write(steps)`` right after it would write.

        Where every parameter has a gradient that costs no further pass over memory. The step that
        does it consumes the order; ``None`` withdraws it.
        """
        if sink is None:
            self._next_write = None
            return
        binding = self._bound("write_with_next_step")
        if sink.binding is not binding:
            raise RuntimeError("write_with_next_step: the sink belongs to another binding")
        steps = read_steps(steps)
        if steps:
            self.check_can_predict()
        self._next_write = (sink, steps)

    def _bound(self, what: str) -> Binding:
        if self._binding is None:
            raise RuntimeError(f"{what}: the optimizer is not bound, call bind() first")
        return self._binding

    def _bound_rows(self, sink: PredictionSink | None = None) -> list[Rows]:
        """Return the bound rows (those of a sink), with the state adopted if it was replaced."""
        binding = self._bound("step")
        if sink is None and self._next_write is not None:
            sink = self._next_write[0]
        todo = binding.rows(self.param_groups) if sink is None else sink.rows
        for rows in todo:
            if not rows.storage_unchanged():
                raise RuntimeError(
                    f"a parameter of group {rows.group} no longer has the storage it was bound "
                    "with (.to() or load_state_dict(assign=True) since bind)"
                )
        generation = self._resolver.generation(self.state)
        if not all([rows.state_unchanged(self.state, generation) for rows in todo]):
            binding.check_state(self.param_groups, self.state)
            binding.adopt(self.state)
            generation = self._resolver.count_change()
            for rows in todo:
                rows.state_unchanged(self.state, generation)
        return todo

    def _write(self, sink: PredictionSink, steps: float) -> None:
        if sink.binding is not self._bound("write"):
            raise RuntimeError("write: the sink belongs to another binding")
        steps = read_steps(steps)
        if steps:
            self.check_can_predict()
        hypers = self._hypers()
        for rows in self._bound_rows(sink):
            rows.plan.predict(lr=hypers[rows.group].lr, steps=steps, out=0)
