"""Loads scikit-learn's bundled digits: 1,797 real images of 8x8 pixels, without a download."""

import torch

from spectrain_ext.extras import require
from studies import REMEDY

from .split import Split

_TRAIN_SAMPLES = 1437
_SPLIT_SEED = 0


def load_digits() -> Split:
    """Return the digits as fixed parts of 1,437 training and 360 test samples.

    Pixels 0..16 become ``x / 16 - 0.3``: about zero mean, range -0.3 to 0.7.
    """
    require("sklearn", "the digits data set comes with scikit-learn", REMEDY)
    from sklearn import datasets

    bunch = datasets.load_digits()
    # through lists: torch may have been built without NumPy support
    inputs = torch.tensor(bunch.data.tolist(), dtype=torch.float32).div_(16).sub_(0.3)
    targets = torch.tensor(bunch.target.tolist(), dtype=torch.int64)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    train, test = order[:_TRAIN_SAMPLES], order[_TRAIN_SAMPLES:]
    return Split(
        *("digits", "features", inputs[train], targets[train], inputs[test], targets[test]),
        classes=10,
    )
