"""Modules for random programs; every block keeps the shape of its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, STEPS = 6, 4, 3  # shapes (samples, WIDTH) and (STEPS, samples, WIDTH)
CHANNELS, SIDE = 4, 4  # shape (samples, CHANNELS, SIDE, SIDE)


class Function(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x):
        return x * self.scale


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return x + self.nothing.sum()


class Moving(nn.Module):
    """A buffer that forwards change and read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean().to(self.mean.dtype), 0.2)
        return x * (1 + self.mean.clone().tanh())


class Positive(nn.Module):
    def forward(self, w):
        return nn.functional.softplus(w) - 0.6

    def right_inverse(self, w):
        return (w + 0.6).clamp(min=0.1).expm1().log()


def halved(module, given, taken):
    return tuple(None if gradient is None else gradient * 0.5 for gradient in given)


class Hooked(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        layer.register_forward_hook(lambda module, args, output: output * 0.9)
        layer.register_full_backward_hook(halved)

    def forward(self, x):
        return self.layer(x) * 1.1  # the hook's result must not be changed in place


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Positive())
    return layer


def transposed(layer):
    """Return the layer with a transposed memory layout of its weight."""
    layer.weight = nn.Parameter(layer.weight.detach().transpose(0, 1).contiguous().transpose(0, 1))
    return layer


def again(x, layer):
    return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)


def plain(domain):
    if domain == "image":
        return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    return nn.Linear(WIDTH, WIDTH)


ANYWHERE = {
    "plain": plain,
    "tanh": lambda d: nn.Tanh(),
    "gelu": lambda d: nn.GELU(),
    "relu_": lambda d: nn.ReLU(inplace=True),
    "prelu": lambda d: nn.PReLU(),
    "dropout": lambda d: nn.Dropout(0.3),
    "scale": lambda d: Scale(),
    "nothing": lambda d: Nothing(),
    "moving": lambda d: Moving(),
    "residual": lambda d: Function(lambda x, layer: x + layer(x), plain(d)),
    "twice": lambda d: Function(lambda x, layer: layer(layer(x).tanh()), plain(d)),
    "aside": lambda d: Function(lambda x, layer: x, plain(d)),  # gets no gradient
    "checkpointed": lambda d: Function(again, plain(d)),
    "checkpointed dropout": lambda d: Function(again, nn.Sequential(plain(d), nn.Dropout(0.2))),
    "hooked": lambda d: Hooked(plain(d)),
    "transposed": lambda d: transposed(plain(d)),
    "parametrized": lambda d: parametrized(plain(d)),
    "spectral": lambda d: parametrizations.spectral_norm(plain(d)),
    "weight norm": lambda d: parametrizations.weight_norm(plain(d)),
}
BLOCKS = {
    "flat": {
        **ANYWHERE,
        "thin": lambda d: nn.Linear(WIDTH, WIDTH, bias=False),
        "orthogonal": lambda d: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        "layer norm": lambda d: nn.LayerNorm(WIDTH),
        "group norm": lambda d: nn.GroupNorm(2, WIDTH),
        "batch norm": lambda d: nn.BatchNorm1d(WIDTH),
        "batch mean": lambda d: nn.BatchNorm1d(WIDTH, momentum=None),
    },
    "image": {
        **ANYWHERE,
        "depthwise": lambda d: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
        "group norm": lambda d: nn.GroupNorm(2, CHANNELS),
        "batch norm": lambda d: nn.BatchNorm2d(CHANNELS),
        "instance norm": lambda d: nn.InstanceNorm2d(CHANNELS, affine=True),
        "pooled": lambda d: nn.AvgPool2d(3, stride=1, padding=1),
    },
    "time": {
        **ANYWHERE,
        "lstm": lambda d: Function(lambda x, layer: layer(x)[0], nn.LSTM(WIDTH, WIDTH)),
        "gru": lambda d: Function(lambda x, layer: layer(x)[0], nn.GRU(WIDTH, WIDTH)),
        "attention": lambda d: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),
        "attention dropout": lambda d: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1),
        "layer norm": lambda d: nn.LayerNorm(WIDTH),
    },
}
RANDOM = {"dropout", "checkpointed dropout", "attention dropout"}
BATCHED = {"batch norm", "batch mean"}  # depend on the whole microbatch
MOVED = {"moving", "spectral"}  # read buffers that a forward changes
WITHOUT_WEIGHTS = {"tanh", "gelu", "relu_", "dropout", "moving", "pooled"}
# Gradients that are 0 except for rounding: of a bias before a norm that subtracts the mean.
ZERO_GRADIENTS = {*BATCHED, "instance norm", "attention", "attention dropout"}
WIDE_ONLY = {"orthogonal"}  # not in bfloat16


# The model's inputs, the values between stages, and the outputs


class Entry(nn.Module):
    """Takes a batch (x, gate) in any form, or x alone."""

    def __init__(self, tokens):
        super().__init__()
        self.table = nn.Embedding(CLASSES + 3, WIDTH) if tokens else None

    def forward(self, value):
        if isinstance(value, Tensor):
            x, gate = value, 1
        else:
            x, gate = (value["x"], value["gate"]) if isinstance(value, dict) else value
        return (x if self.table is None else self.table(x)) * gate


def packed(form, x):
    """Return several tensors: a trained one, numbers, and one that no stage reads."""
    all_four = (x, x.tanh() * 0.5, x.detach() > 0, x * 2)
    return all_four if form == "tuple" else dict(zip("xymz", all_four, strict=True))


def unpacked(value):
    x, y, m, _ = value.values() if isinstance(value, dict) else value
    return torch.where(m, x + y, x)


class Head(nn.Module):
    """Class scores; ``last``: of the last time step."""

    def __init__(self, domain, last):
        super().__init__()
        self.flatten = domain == "image"
        self.last = last
        size = CHANNELS * SIDE * SIDE if self.flatten else WIDTH
        self.linear = nn.Linear(size, CLASSES)

    def forward(self, x):
        x = x.flatten(1) if self.flatten else x
        return self.linear(x[-1] if self.last else x)


class Scores(nn.Module):
    """A head with an embedding's weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x @ self.weight.t())[..., :CLASSES]


@dataclass
class Output:
    logits: Tensor


def output_as(form, x):
    if form == "object":
        return Output(x)
    return (x, x.detach()) if form == "tuple" else {"logits": x}


class Loss:
    """``(output, target) -> loss``; the target may be the whole batch."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, output, target):
        if not isinstance(output, Tensor):
            output = getattr(output, "logits", None) if isinstance(output, Output) else output
            if not isinstance(output, Tensor):
                output = output["logits"] if isinstance(output, dict) else output[0]
        wide = output if output.dtype == torch.float64 else output.float()
        if isinstance(target, dict):
            target = target["y"]
        if isinstance(target, tuple):
            return ((wide - target[0]) ** 2 * target[1]).mean()
        return LOSSES[self.kind](wide, target)


LOSSES = {
    "mse": nn.functional.mse_loss,
    "huber": nn.functional.smooth_l1_loss,
    "cross entropy": lambda o, y: nn.functional.cross_entropy(o, y, label_smoothing=0.1),
}


class OwnRandom(nn.Module):
    """A stage with its own random state, like a pipeline's stages."""

    def __init__(self, stage, state):
        super().__init__()
        self.stage, self.state = stage, state

    def forward(self, value):
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            return self.stage(value)
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)
