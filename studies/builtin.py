"""Builds the workloads of ``--data`` and ``--model``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from spectrain_ext.method import Method
from spectrain_ext.optim import hidden_matrices

from .data.sources import load_cifar10, load_digits, load_text
from .data.split import Batches, Split, Tests, Windows
from .models.mlp import residual_mlp, snn
from .models.text import gpt, residual_lstm, speedrun
from .models.vision import inception_v4, resnet, vgg
from .optimizers import make_any_optimizer, make_scheduler
from .settings import TrainSettings
from .workload import Epoch, Maker, Workload, mean_loss, own

#: nanoGPT tests 240 random sequences; this is every fourth of all 1,742, at each of 20 tests.
_TESTED = 4


def maker_of(settings: TrainSettings, cache: Path) -> Maker:
    """Return a function that makes the workloads of the settings; reads the data set once."""
    if settings.workload is not None:
        return own
    return partial(builtin, load_data(settings, cache))


def builtin(
    data: Split, settings: TrainSettings, method: Method, stages: int, seed: int
) -> Workload:
    modules = build_stages(settings, stages, seed, data.features, data.classes)
    # between the embedding and the head
    hidden: set[Tensor] = {
        p for module in modules[1:-1] for p in module.parameters() if p.dim() == 2
    }
    if settings.model == "speedrun":  # its first and last stage also have blocks
        hidden = hidden_matrices(nn.Sequential(*modules))
    train: Epoch = Batches(
        data, batch_size=settings.batch_size, seed=seed, augmented=settings.augment
    )
    test = Tests(data)
    if settings.model == "nanogpt":
        train = Windows(data, batch_size=settings.batch_size, seed=seed)
        test = Tests(data, every=_TESTED)
    return Workload(
        name=data.name,
        model=modules,
        optimizer=partial(make_any_optimizer, settings, method, hidden),
        scheduler=make_scheduler(settings, settings.updates or settings.epochs * len(train)),
        loss=mean_loss,
        train=train,
        test=test,
        judged="perplexity" if data.kind == "text" else "accuracy",
        about={
            "data_name": data.name,
            "data_sha256": data.fingerprint,
            "train_samples": len(data.train_inputs),
            "test_samples": -(-len(data.test_inputs) // test.every),
        },
    )


def load_data(settings: TrainSettings, cache: Path) -> Split:
    """Read the data set; decoded images are cached in ``cache``."""
    if settings.data_dir is None:
        data = load_digits()
    elif settings.data == "text":
        data = load_text(settings.data_dir, context=settings.context)
    else:
        data = load_cifar10(settings.data_dir, cache=cache)
    return data.first(settings.train_samples, settings.test_samples)


def build_stages(
    settings: TrainSettings, stages: int, seed: int, features: int, classes: int
) -> list[nn.Module]:
    """Return the model cut into ``stages``; its weights do not depend on the cut.

    ``features`` are the numbers per sample, ``classes`` those of the targets, or of characters.
    """
    model, depth = settings.model, settings.depth
    if model == "residual-mlp" and depth is None:
        # one block per stage beyond eight, for every method
        depth = max(6, settings.stages - 2)
    makers: dict[str, Callable[..., list[nn.Module]]] = {
        "residual-mlp": partial(residual_mlp, features=features, classes=classes),
        "vgg16": partial(vgg, classes=classes),
        "resnet": partial(resnet, classes=classes),
        "inception-v4": partial(inception_v4, classes=classes),
        "snn": partial(snn, features=features, classes=classes),
        "gpt": partial(gpt, vocabulary=classes, context=settings.context),
        "nanogpt": partial(
            gpt, vocabulary=classes, context=settings.context, bias=False, tied=True
        ),
        "lstm": partial(residual_lstm, vocabulary=classes),
        "speedrun": partial(speedrun, vocabulary=classes, rank=settings.rank),
    }
    own_depth = {} if depth is None else {"depth": depth}
    return makers[model](stages, width=settings.width, seed=seed, **own_depth)
