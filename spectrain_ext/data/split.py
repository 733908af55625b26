"""A data set cut into a part to train on and a part to test with."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Inputs are float32 ``(samples, features)``, targets int64 class numbers ``(samples,)``."""

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int

    @property
    def features(self) -> int:
        """Number of values in one input."""
        return self.train_inputs.shape[1]
