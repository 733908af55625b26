"""Pipeline: the front that people use; checks what it is given and puts the parts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .batch import Value
from .executor import Executor, Result
from .method import Method, find_method
from .optim import SGD
from .weights import StageWeights

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


class Pipeline(nn.Module):
    """Trains a model that is cut into stages, with several minibatches in flight, in one process.

    Args:
        stages: the parts of the model in order, at least one. A stage takes what the previous one
            returned: a tensor or a tuple of tensors (as one argument, as in ``nn.Sequential``).
        optimizer: makes a stage's optimizer from the list of its trainable parameters. It must be
            one of ``spectrain_ext.optim`` and hold exactly these parameters, in any groups. A stage
            without trainable parameters gets none.
        loss_fn: ``(output, target) -> loss``, a 0-d tensor.
        method: a name out of ``methods()``, or a ``Method``.
        devices: one device per stage, to which the stages are moved; one CUDA device may be named
            several times. None: where the stages' parameters are.
        scheduler: makes a learning-rate scheduler from a stage's optimizer; stepped once after each
            of its updates.
        microbatches: parts that a minibatch is split into along dimension 0. Gradients and the loss
            are weighted by the parts' sizes, so that a loss that is a mean gives what
            ``microbatches=1`` gives.

    Raises:
        TypeError: a member of ``stages`` that is no module, or an optimizer that is not one of
            ``spectrain_ext.optim``.
        ValueError: an argument that does not fit; the message names it, and what was expected.
        RuntimeError: a CUDA device where none can be used.

    While a pipeline exists the parameters are views of flat buffers, which kernels overwrite
    without autograd noticing: change parameters in place (``load_state_dict`` does), never by
    ``.to()``, and call ``release()`` at the end. Tensors that a stage receives live in ring buffers
    that later minibatches overwrite: a module that wants to keep one clones it.

    ``state_dict`` and ``load_state_dict`` use the keys of ``nn.Sequential(*stages)``; optimizers
    have their own pair.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], SGD],
        loss_fn: Callable[..., Tensor],
        method: str | Method = "spectrain",
        devices: Sequence[torch.device | str | int] | None = None,
        scheduler: Callable[[SGD], LRScheduler] | None = None,
        microbatches: int = 1,
    ) -> None:
        super().__init__()
        # Everything is checked before anything is moved.
        modules = _checked_stages(stages)
        chosen = find_method(method)
        places = (
            _devices_of(modules) if devices is None else _checked_devices(devices, len(modules))
        )
        _check_microbatches(microbatches)
        _check_loss_fn(loss_fn)
        for name, made in (("optimizer", optimizer), ("scheduler", scheduler)):
            if not callable(made) and not (name == "scheduler" and made is None):
                raise TypeError(f"{name}: expected a callable, got {type(made).__name__}")
        n = len(modules)
        optimizers = [_make_optimizer(optimizer, module, k) for k, module in enumerate(modules)]
        for k, opt in enumerate(optimizers):
            if opt is not None and _predicts(chosen, k, n):
                _check_can_predict(opt, k, chosen)

        weights: list[StageWeights | None] = []
        for k, (module, place, opt) in enumerate(zip(modules, places, optimizers, strict=True)):
            if devices is not None:
                module.to(place)
            if opt is None:
                weights.append(None)
                continue
            weights.append(
                StageWeights(
                    module,
                    opt,
                    None if scheduler is None else scheduler(opt),
                    window=chosen.window(k, n),
                    forward_horizon=chosen.forward_horizon(k, n),
                    backward=chosen.backward,
                    backward_horizon=chosen.backward_horizon(k, n),
                )
            )
        for k, module in enumerate(modules):
            self.add_module(str(k), module)
        self.method = chosen
        self.devices = tuple(places)
        self._weights = weights
        # In a tuple, lest a loss function that is a module becomes a part of the model.
        self._executor = Executor(modules, places, weights, loss_fn, chosen, microbatches)
        self.register_state_dict_post_hook(_put_true_weights)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_refuse_load_in_run)  # type: ignore[no-untyped-call]

    # Training.

    def run(self, batches: Iterable[object]) -> Iterator[Result]:
        """Train on every batch, one update per batch and stage, without flushing in between.

        Args:
            batches: pairs (input, target), each a tensor or a tuple of tensors, on any device. A
                batch is taken only when stage 0 is ready for it, and is trained on in full. On the
                GPU and in pageable memory it may be overwritten as soon as the next one is asked
                for; in pinned memory it must be left alone.

        Yields:
            A ``Result`` per minibatch, in order, as soon as its loss has been issued; backwards and
            updates of it and of later minibatches follow. Leaving the loop (or ``close()`` of the
            iterator) finishes the minibatches in flight; so does the end of ``batches``.
            Minibatches count from 0 in every run.

        Raises:
            StageError: an exception inside a stage, the loss or an optimizer, from its cause.
            TypeError, ValueError: a batch that is no pair, or cannot be split into microbatches.
            RuntimeError: a run has not ended yet, a parameter left the flat buffer, autocast is on.

        After any exception what was in flight is dropped, the true weights are in the modules (some
        stages may have made more updates than others), and the pipeline can run again.
        """
        self._refuse_in_run("run")
        return self._run(iter(batches))

    def _run(self, batches: Iterator[object]) -> Iterator[Result]:
        self._refuse_in_run("run")
        for kind in {device.type for device in self.devices}:
            if torch.is_autocast_enabled(kind):
                raise RuntimeError(
                    "run: autocast is on; its casts of the weights would outlive them. Enter "
                    "autocast inside the stages, or use bfloat16 stages"
                )
        for weights in self._weights:
            if weights is not None and not weights.bound:
                weights.bind()
        yield from self._executor.run(batches)

    def forward(self, value: Any) -> Any:
        """The output of the true weights; tensors are moved from stage to stage.

        Raises:
            RuntimeError: a run has not ended yet.
        """
        self._refuse_in_run("calling the pipeline")
        for module, device in zip(self.children(), self.devices, strict=True):
            value = module(_moved(value, device))
        return value

    def _refuse_in_run(self, what: str) -> None:
        if self._executor.running:
            raise RuntimeError(
                f"{what}: a run of this pipeline has not ended, and the modules may hold predicted "
                "weights; exhaust the iterator that run() returned, or close() it"
            )

    # What it holds.

    @property
    def optimizers(self) -> list[SGD]:
        """The optimizers in the order of stages; a stage without trainable parameters has none."""
        return [weights.optimizer for weights in self._weights if weights is not None]

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The learning-rate schedulers in the order of stages, empty if there are none."""
        found = (weights.scheduler for weights in self._weights if weights is not None)
        return [scheduler for scheduler in found if scheduler is not None]

    @property
    def weight_version_bytes(self) -> int:
        """Bytes of all weight versions of all stages: working, master and kept ones."""
        return sum(weights.nbytes for weights in self._weights if weights is not None)

    def release(self) -> None:
        """Give the modules and optimizers ordinary storage of their own, and free the flat buffers.

        A later ``run`` makes new buffers.

        Raises:
            RuntimeError: a run has not ended yet.
        """
        self._refuse_in_run("release")
        for weights in self._weights:
            if weights is not None and weights.bound:
                weights.unbind()


def _put_true_weights(
    pipe: Pipeline, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """While a run is suspended, let a state_dict have copies, and of the true weights."""
    if not pipe._executor.running:
        return
    with pipe._executor.read_by_caller():
        true: dict[str, Tensor] = {}
        for k, weights in enumerate(pipe._weights):
            if weights is not None:
                where = weights.true_weights()
                for name, p in weights.module.named_parameters(remove_duplicate=False):
                    true[f"{prefix}{k}.{name}"] = where.get(p, p)
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, Tensor):
                found = true.get(key, value).detach()
                state[key] = found.clone(memory_format=torch.preserve_format)


def _refuse_load_in_run(pipe: Pipeline, *_: object) -> None:
    pipe._refuse_in_run("load_state_dict")


# Checks of the constructor's arguments.


def _checked_stages(stages: Iterable[nn.Module]) -> list[nn.Module]:
    try:
        modules = list(stages)
    except TypeError:
        raise TypeError(
            f"stages: expected a sequence of modules, got {type(stages).__name__}"
        ) from None
    if not modules:
        raise ValueError("stages: expected at least one module, got an empty list")
    owners: dict[object, tuple[int, str]] = {}
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"stages[{k}]: expected an nn.Module, got {type(module).__name__}")
        parts: dict[object, str] = {
            part: f"module {name!r}" for name, part in module.named_modules()
        }
        parts.update((p, f"parameter {name!r}") for name, p in module.named_parameters())
        for part, what in parts.items():
            if part in owners:
                other, its_name = owners[part]
                raise ValueError(
                    f"stages[{k}]: its {what} is {its_name} of stages[{other}] as well"
                )
        owners.update((part, (k, what)) for part, what in parts.items())
        for name, p in module.named_parameters():
            if is_lazy(p):
                raise ValueError(
                    f"stages[{k}]: parameter {name!r} is not initialized; run a forward of the "
                    "module first"
                )
    return modules


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _devices_of(modules: Sequence[nn.Module]) -> list[torch.device]:
    """Where the modules are; one without tensors goes with the one before it, or else after it."""
    found: list[torch.device | None] = []
    for k, module in enumerate(modules):
        device = None
        for name, tensor in _tensors_of(module):
            if device is None:
                device, first = tensor.device, name
            elif tensor.device != device:
                raise ValueError(
                    f"stages[{k}]: {first!r} is on {device} and {name!r} on {tensor.device}; a "
                    "stage must be on one device"
                )
        if device is not None and device.type not in ("cpu", "cuda"):
            raise ValueError(f"stages[{k}]: expected it on the CPU or on CUDA, it is on {device}")
        found.append(device)
    known = next((device for device in found if device is not None), torch.device("cpu"))
    devices = []
    for device in found:
        known = known if device is None else device
        devices.append(known)
    return devices


def _checked_devices(
    devices: Sequence[torch.device | str | int], stages: int
) -> list[torch.device]:
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f"devices: expected a sequence of {stages} devices, got {devices!r}")
    if len(devices) != stages:
        raise ValueError(f"devices: expected one per stage ({stages}), got {len(devices)}")
    checked = []
    for k, given in enumerate(devices):
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"devices[{k}]: {given!r} is not a device: {error}") from None
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"devices[{k}]: expected the CPU or a CUDA device, got {device}")
        if device.type == "cuda":
            device = _checked_cuda(device, k)
        checked.append(device)
    return checked


def _checked_cuda(device: torch.device, k: int) -> torch.device:
    if not torch.cuda.is_available():
        why = (
            "torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no usable GPU or driver"
        )
        raise RuntimeError(
            f"devices[{k}]: {device} was asked for, but there is no CUDA device here ({why})"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(
            f"devices[{k}]: {device} was asked for, but there are only "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", index)


def _check_microbatches(microbatches: object) -> None:
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise TypeError(f"microbatches: expected an int, got {type(microbatches).__name__}")
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")


def _check_loss_fn(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a callable, got {type(loss_fn).__name__}")
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise ValueError(
            "loss_fn: it has trainable parameters, which nobody would train; put them in the last "
            "stage"
        )


def _make_optimizer(
    factory: Callable[[list[nn.Parameter]], SGD], module: nn.Module, k: int
) -> SGD | None:
    params = [p for p in module.parameters() if p.requires_grad]
    if not params:
        return None
    made: object = factory(params)
    if not isinstance(made, SGD):
        kind = f"{type(made).__module__}.{type(made).__qualname__}"
        raise TypeError(
            f"optimizer: for stages[{k}] it made a {kind}; the pipeline needs one of "
            "spectrain_ext.optim, which can predict: "
            "optimizer=lambda params: spectrain_ext.optim.SGD(params, lr=..., momentum=...)"
        )
    held = [p for group in made.param_groups for p in group["params"]]
    if len(held) != len(params) or set(held) != set(params):
        raise ValueError(
            f"optimizer: for stages[{k}] it holds {len(held)} parameters, expected exactly the "
            f"stage's {len(params)} trainable ones; freeze others with requires_grad_(False)"
        )
    return made


def _predicts(method: Method, k: int, n: int) -> bool:
    return method.forward_horizon(k, n) > 0 or (
        method.backward == "predict" and method.backward_horizon(k, n) > 0
    )


def _check_can_predict(optimizer: SGD, k: int, method: Method) -> None:
    try:
        optimizer.check_can_predict()
    except ValueError as error:
        raise ValueError(f"optimizer: stages[{k}] under method {method.name!r}: {error}") from None


def _moved(value: Value, device: torch.device) -> Value:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return tuple(tensor.to(device) for tensor in value)
    return value
