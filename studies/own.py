"""Makes the workload of a user's ``module:function``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from spectrain_ext.method import Method

from .errors import OptionError
from .function import function_of, parameters_of, source_of_function
from .models.building import seeded
from .settings import TrainSettings
from .workload import Workload


def own(settings: TrainSettings, method: Method, stages: int, seed: int) -> Workload:
    """Call the function of the settings' ``workload`` with the options it has parameters for.

    It runs with torch's random state seeded by ``seed``; the previous state is restored afterwards.
    """
    name = settings.workload
    assert name is not None
    offered = {
        **{"seed": seed, "stages": stages, "method": method.name},
        **{"epochs": settings.epochs, "lr": settings.lr},
        **dict(settings.given),
    }
    known = parameters_of(name)
    with seeded(seed):
        made = function_of(name)(**{key: offered[key] for key in known if key in offered})
    if not isinstance(made, Workload):
        raise OptionError(
            "workload", f"{name} returned a {type(made).__name__}, expected a studies.Workload"
        )
    if not isinstance(made.model, (Sequence, nn.Sequential, nn.ModuleList)):
        raise OptionError(
            "workload",
            f"{name} returned a model of type {type(made.model).__name__}, expected an "
            "nn.Sequential or a list of layers, to be cut between them",
        )
    return replace(made, about={**made.about, "workload_sha256": source_of_function(name)})
