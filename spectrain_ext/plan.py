"""Plan: lists of tensors that are validated and resolved once, then used many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from spectrain_ext._lists import Gradients, Lists, Role, Tensors


class Plan:
    """The operators of this package, resolved once for fixed tensors.

    A plan validates its tensors, keeps them alive, joins neighbours that are contiguous in every
    list, and from then on costs one kernel launch and no walk over the tensors per call.

    It writes to the raw memory and does **not** bump autograd's version counters. That is what it
    is for: a pipeline changes weights between a forward and its backward on purpose, and autograd
    must not refuse that backward. In a loop of your own use the module-level operators, unless you
    know that no graph still needs the values that a plan overwrites.

    A plan is not thread-safe (use one per thread) and cannot be pickled or copied.

    Args:
        params: the weights W; one tensor or a sequence, float16, bfloat16, float32 or float64, all
            on one device, each dense (any order of dimensions, no gaps, no overlap).
        momentum_buffers: v, one per parameter, of the same shape and strides, and of the same
            dtype, or float32 where the parameter has 16 bits.
        grads: gradients, entries may be None. Without it `refresh()` reads `params[i].grad`.
        stashed: where `stash` keeps a version of the weights; like the parameters.
        outs: a sequence of lists like the parameters; predictions are written there.

    Raises:
        TypeError: something is not a dense tensor of a supported dtype.
        ValueError: shapes, strides, dtypes, devices or lengths differ, or memory overlaps.
    """

    def __init__(
        self,
        params: Tensors,
        *,
        momentum_buffers: Tensors | None = None,
        grads: Gradients = None,
        stashed: Tensors | None = None,
        outs: Sequence[Tensors] = (),
    ) -> None:
        lists = Lists(params, "params", writes=True)
        if momentum_buffers is not None:
            lists.add(Role.MOMENTUM, "momentum_buffers", momentum_buffers, writes=True)
        if grads is not None:
            lists.add(Role.GRADS, "grads", grads, writes=False)
        if stashed is not None:
            lists.add(Role.STASHED, "stashed", stashed, writes=True)
        if isinstance(outs, Tensor):
            raise TypeError("outs: expected a sequence of outputs, got one tensor")
        for j, out in enumerate(outs):
            lists.add(Role.OUT, f"outs[{j}]", out, writes=True)
        self._single = lists.single
        self._native = lists.plan()

    def predict_(self, *, lr: float, steps: float, stream: Any = None) -> None:
        """W <- W - lr*steps*v in place (SpecTrain, arXiv 1809.02839); steps == 0 keeps the bits."""
        self._native.predict_(lr, steps, stream)

    def predict(self, *, lr: float, steps: float, out: int = 0, stream: Any = None) -> None:
        """outs[out] <- W - lr*steps*v. steps == 0 copies the bits of W."""
        self._native.predict(lr, steps, out, stream)

    def stash(self, *, stream: Any = None) -> None:
        """Stashed <- W, bit for bit."""
        self._native.stash(stream)

    def restore_(self, *, stream: Any = None) -> None:
        """W <- stashed, bit for bit."""
        self._native.restore_(stream)

    def swap_(self, *, stream: Any = None) -> None:
        """W <-> stashed, bit for bit, in place."""
        self._native.swap_(stream)

    def stash_predict_(self, *, lr: float, steps: float, stream: Any = None) -> None:
        """Stashed <- W and W <- W - lr*steps*v, in one pass."""
        self._native.stash_predict_(lr, steps, stream)

    def sgd_step_(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        first_step: bool | Sequence[bool] = False,
        predict: Sequence[float | None] = (),
        stream: Any = None,
    ) -> None:
        """One step of SGD that also writes predictions; see `spectrain_ext.sgd_step_`.

        Args:
            predict: the horizon of every prediction, outs[j] <- W' - lr*predict[j]*v'; None leaves
                outs[j] alone.
        """
        self._native.sgd_step_(
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize,
            first_step,
            predict,
            stream,
        )

    def refresh(self, grads: Gradients = None) -> None:
        """Read the gradients' addresses again, or take other gradients.

        After `zero_grad(set_to_none=True)` a backward pass leaves new gradients at new addresses:
        call this before `sgd_step_`. Without an argument a gradient that was `params[i].grad` when
        it was given (or when none were given) is read from `params[i].grad` as it is now; any other
        is the tensor that was given.
        """
        if grads is None:
            self._native.refresh()
        else:
            arrays = (grads,) if self._single else tuple(grads)
            self._native.set_gradients(arrays)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan holds addresses and cannot be pickled or copied; make a new one")
