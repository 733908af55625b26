"""Methods for random programs, and what they need."""

from __future__ import annotations

from dataclasses import replace

from oracle.methods import METHODS as DEFINITIONS
from oracle.methods import hybrid as defined

import spectrain_ext as st

# Methods

FLUSHING = ("sync", "gpipe", "1f1b", "zb-h1", "interleaved")
HYBRIDS = (
    ("pipedream", "sync"),
    ("1f1b", "vanilla"),
    ("spectrain", "gpipe"),
    ("lwp-w", "second-order"),
    ("auto", "1f1b"),
    ("vanilla", "lwp-w"),
)
# Their requirements on the package's optimizers; the others take any optimizer.
MOMENTUM = {
    *("spectrain", "spectrain-local", "spectrain-stash", "spectrain-smoothed", "second-order"),
    *("pipeoptim", "xpipe", "msnag", "msnag-stash", "lwp-v", "xgrad", "sc-lwp", "braking"),
    "gap-aware",
}
OURS = {*MOMENTUM, "sc", "dc-asgd"}
SGD_ONLY = {"spectrain-smoothed", "sc", "sc-lwp", "braking"}
WIDE_STEPS = {"dc-asgd", "gap-aware"}  # read stale weights, in 32 bits or more
CORRECTING = (*WIDE_STEPS, "braking")  # by passes, which take torch's SGD too
PREVIOUS = {"pipedream-2bw", "error-feedback"}  # a delay of at most one update
SECOND_ORDER = {"second-order", "auto", "zb-h1-async", "interleaved-async"}
OTHERWISE = {"auto", "zb-h1-async", "interleaved-async"}  # use another law without a momentum
OWN_WINDOWS = {*FLUSHING, "xgrad", "wpipe", "interleaved-async"}


def method_of(name):
    if name == "spectrain difference":
        return st.spectrain(law="difference")
    return name


def otherwise(definition):
    """Return the definition with the difference law for the prediction of stage 0."""
    return replace(definition, law="difference")


def definition_of(name, momentum):
    if "+" in name:
        first, then, after = name.replace("@", "+").split("+")
        found = defined(first, then, int(after))
        if first in OTHERWISE and not momentum:
            found = replace(otherwise(found), then=found.then)
        return found
    if name == "spectrain difference":
        return replace(DEFINITIONS["spectrain"], law="difference")
    found = DEFINITIONS[name]
    return otherwise(found) if name in OTHERWISE and not momentum else found
