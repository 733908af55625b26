"""Builds the workloads of ``--data`` and ``--model``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor, nn

from spectrain_ext.method import Method
from spectrain_ext.optim import hidden_matrices

from .data.batches import Batches, count_batches
from .data.cifar import load_cifar10
from .data.digits import load_digits
from .data.split import Split
from .data.text import load_text
from .models import gpt, inception_v4, residual_lstm, residual_mlp, resnet, snn, speedrun, vgg
from .models.building import cut_evenly
from .optimizers import make_any_optimizer, make_scheduler
from .own import own
from .settings import TrainSettings
from .workload import Maker, Workload, mean_loss


def maker_of(settings: TrainSettings, cache: Path) -> Maker:
    """Return a function that makes the workloads of the settings; reads the data set once."""
    if settings.workload is not None:
        return own
    return partial(builtin, load_data(settings, cache))


def builtin(
    data: Split, settings: TrainSettings, method: Method, stages: int, seed: int
) -> Workload:
    """Return the workload of the settings on a data set."""
    modules = build_stages(settings, stages, seed, data)
    # between the embedding and the head
    hidden: set[Tensor] = {
        p for module in modules[1:-1] for p in module.parameters() if p.dim() == 2
    }
    if settings.model == "speedrun":  # its first and last stage also have blocks
        hidden = hidden_matrices(nn.Sequential(*modules))
    per_epoch = count_batches(len(data.train_inputs), settings.batch_size, 1)
    return Workload(
        name=data.name,
        model=modules,
        optimizer=partial(make_any_optimizer, settings, method, hidden),
        scheduler=make_scheduler(settings, settings.updates or settings.epochs * per_epoch),
        loss=mean_loss,
        train=Batches(data, batch_size=settings.batch_size, seed=seed, augmented=settings.augment),
        test=data.tests(),
        judged="perplexity" if data.kind == "text" else "accuracy",
        about={
            "data_name": data.name,
            "data_sha256": data.fingerprint,
            "train_samples": len(data.train_inputs),
            "test_samples": len(data.test_inputs),
        },
    )


def load_data(settings: TrainSettings, cache: Path) -> Split:
    """Read the data set; decoded images are cached in ``cache``."""
    if settings.data == "digits":
        data = load_digits()
    else:
        assert settings.data_dir is not None
        if settings.data == "text":
            data = load_text(settings.data_dir, context=settings.context)
        else:
            data = load_cifar10(settings.data_dir, cache=cache)
    return data.first(settings.train_samples, settings.test_samples)


def build_stages(settings: TrainSettings, stages: int, seed: int, data: Split) -> list[nn.Module]:
    """Return the model cut into ``stages``; its weights do not depend on the cut."""
    depth = settings.depth
    if settings.model == "residual-mlp" and depth is None:
        # one block per stage beyond eight, for every method
        depth = max(6, settings.stages - 2)
    return build_model(
        settings.model,
        stages,
        width=settings.width,
        depth=depth,
        context=settings.context,
        features=data.features,
        classes=data.classes,
        images=data.kind == "images",
        rank=settings.rank,
        seed=seed,
    )


def build_model(
    model: str,
    stages: int,
    *,
    width: int,
    depth: int | None,
    context: int,
    features: int,
    classes: int,
    images: bool,
    rank: int | None = None,
    seed: int = 0,
) -> list[nn.Module]:
    """Return a model of ``presets.MODELS``, cut into ``stages``."""
    if model == "residual-mlp":
        blocks = 6 if depth is None else depth
        layers = residual_mlp(
            blocks + 2, features=features, width=width, depth=blocks, classes=classes, seed=seed
        )
        if images:
            layers[0] = nn.Sequential(nn.Flatten(), layers[0])
        return cut_evenly(layers, stages)
    if model == "vgg16":
        return vgg(stages, depth=depth or 16, width=width, classes=classes, pool=1, seed=seed)
    if model == "resnet":
        return resnet(
            stages, depth=depth or 18, width=width, classes=classes, small_images=True, seed=seed
        )
    if model == "inception-v4":
        return inception_v4(stages, width=width, classes=classes, seed=seed)
    if model == "snn":
        return snn(
            stages, features=features, width=width, depth=depth or 7, classes=classes, seed=seed
        )
    if model == "speedrun":
        return speedrun(
            stages, vocabulary=classes, width=width, depth=depth or 8, rank=rank, seed=seed
        )
    if model == "lstm":
        return residual_lstm(stages, vocabulary=classes, width=width, depth=depth or 6, seed=seed)
    return gpt(
        stages, vocabulary=classes, context=context, width=width, depth=depth or 6, seed=seed
    )
