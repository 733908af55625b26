"""Draws random programs from a seed: a model, an optimizer, a method and matching options.

Combinations that the package rejects by design are not drawn, so that any other error fails a test.
``str(program)`` is one line; the same seed gives the same program everywhere.
"""

from __future__ import annotations

import random
import warnings
from functools import cache, partial
from itertools import combinations

import pytest
import torch
from helpers import random_modules as modules
from helpers.random_optimizers import FOREIGN, LINEAR, ROUNDING, SAME, SCHEDULERS, RandomOptimizer
from helpers.random_settings import (
    DEFINITIONS,
    FLUSHING,
    HYBRIDS,
    OWN_WINDOWS,
    PREVIOUS,
    WIDE_STEPS,
    method_of,
)
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

from .passes import with_passes

COUNT = 400


def seeds(few):
    """Return the seeds: all in a nightly run, the first ``few`` otherwise."""
    return [pytest.param(n, marks=[] if n < few else pytest.mark.nightly) for n in range(COUNT)]


def covering_seeds(against, without=()):
    """Return the seeds: all in a nightly run, otherwise few with every feature of other kinds."""
    features = {
        seed: {feature for feature in found if feature[0] not in without}
        for seed, found in drawn(against)[0].items()
    }
    wanted, few = set().union(*features.values()), []
    while wanted:
        few.append(max(features, key=lambda n: len(features[n] & wanted)))
        wanted -= features[few[-1]]
    return [pytest.param(n, marks=[] if n in few else pytest.mark.nightly) for n in features]


# Kinds of features of which every pair is drawn, except for those that no program can have.
PAIRED = (
    *("between stages", "output", "input", "batch", "target", "loss", "recompute", "offload"),
    *("tied", "cut by the package", "clipping", "groups", "frozen", "window", "head", "phases"),
)
IMPOSSIBLE = {
    frozenset(pair)
    for pair in (
        (("batch", "mapping"), ("input", "tensor")),
        (("batch", "mapping"), ("input", "tuple")),
        (("batch", "mapping"), ("target", "tuple")),
        (("loss", "huber"), ("target", "tuple")),
        (("loss", "cross entropy"), ("target", "tuple")),
        (("offload", "activations"), ("recompute", True)),
        (("clipping", "global"), ("phases", True)),  # one of which does not flush
        # a norm of all stages needs a flush, which leaves no window to choose
        *((("clipping", "global"), ("window", w)) for w in ("classic", "wide", int, list)),
    )
}


@cache
def drawn(against):
    """Return the features of each seed's program, and required features and pairs without one.

    The seeds are the first ones, and later ones with what these lack.
    """
    features = {seed: Program(seed, against).features for seed in range(COUNT)}
    every = set().union(*features.values())
    required = {("block", (domain, name)) for domain, row in modules.BLOCKS.items() for name in row}
    if against == "torch":
        required |= {("halves of", name) for _, (_, name) in required}
    required |= {("scheduler", name) for name in SCHEDULERS}
    required |= {("optimizer", name) for name in (*SAME, *FOREIGN) if name not in ROUNDING}
    paired = [feature for feature in every if feature[0] in PAIRED]
    lacking = {frozenset(pair) for pair in combinations(paired, 2) if pair[0][0] != pair[1][0]}
    lacking -= IMPOSSIBLE
    lacking |= {frozenset([feature]) for feature in required}
    for seed in range(20 * COUNT):
        found = features.get(seed) or Program(seed, against).features
        having = lacking & {frozenset(some) for n in (1, 2) for some in combinations(found, n)}
        lacking -= having
        if having:
            features[seed] = found
        if not lacking:
            break
    return features, lacking


# Not drawn because torch (2.13, on a CPU) gets it wrong with channels_last: a group norm's backward
# crashes if no layer before it learns, and an instance norm's differs if the next layer's gradient
# is channels_last.


class Program:
    """The program of a seed.

    Args:
        seed: the seed.
        against: the comparison: ``"torch"``, the uncut model in a loop; ``"definition"``, the
            oracle of all methods; ``"itself"``, bit for bit.
    """

    def __init__(self, seed, against):
        self.seed, self.against = seed, against
        self.draw = random.Random(f"{against} {seed}")
        self.exactly = against == "itself"
        self.domain = self.pick("flat", "flat", "image", "time")
        self._draw_method()
        self._draw_numbers()
        self.optimizer = RandomOptimizer(self, self.named)
        self.foreign = self.optimizer.foreign
        self._draw_blocks()
        self._draw_options()
        self._draw_batches()
        # It changes no result.
        self.offload = None if self.recompute else self.pick(None, "activations")

    def __str__(self):
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if name != "draw")

    @property
    def features(self):
        """Return what the program has, as (kind, value)."""
        window = self.options.get("window", "usual")
        return {
            *(("block", (self.domain, name)) for name in self.used),
            *(("halves of", name) for name in self.used if "zb-h1" in self.method),
            *(("between stages", form) for form in self.forms),
            *(("frozen", what) for what in self.frozen),
            ("phases", "+" in self.method),
            ("output", self.out),
            ("input", self.input_form),
            ("batch", self.batch_form),
            ("target", self.target_form),
            ("loss", self.loss),
            ("head", self.head),
            ("split_dim", repr(self.options.get("split_dim", 0))),
            ("channels last", bool(self.last)),
            ("hook", self.hook),
            ("cut by the package", self.cut),
            ("tied", bool(self.ties)),
            ("tied biases", bool(self.ties) and self.tie_biases),
            ("clipping", self.options.get("clip_scope", "clip_norm" in self.options)),
            ("recompute", self.recompute),
            ("offload", self.offload),
            ("window", window if isinstance(window, str) else type(window)),
            ("optimizer", self.optimizer.kind),
            ("groups", self.optimizer.groups),
            ("scheduler", self.optimizer.scheduler),
            *(("option", name) for name in self.optimizer.numbers),
            ("rate as a tensor", self.optimizer.tensor_rate),
            ("dtypes", (self.dtype, self.options.get("master_dtype"))),
        }

    def pick(self, *options):
        return self.draw.choice(options)

    def chance(self, share):
        return self.draw.random() < share

    # Draws. Later ones respect earlier ones.

    def _draw_method(self):
        if self.against == "torch":
            self.method = self.pick(*FLUSHING)
        else:
            named = [*DEFINITIONS, "spectrain difference"]
            self.method = self.pick(*named, *["pipedream+sync@9"] * self.exactly)
            if self.chance(0.12):
                first, then = self.pick(*HYBRIDS)
                self.method = f"{first}+{then}@{self.draw.randrange(10)}"
        parts = self.method.replace("@", "+").split("+")
        self.named = {name for name in parts if not name.isdigit()}
        self.n = 1 if self.method == "xgrad" else self.pick(2, 2, 3, 3, 4, 5)
        m = self.pick(1, 2, 3, 4)
        if self.named & PREVIOUS:
            m = max(m, self.n)
        self.options = {"microbatches": m}
        if self.against == "torch" and self.chance(0.3):
            self.options["microbatches"] = "auto"
        if not self.named <= OWN_WINDOWS and self.chance(0.5):
            windows = sorted((self.draw.randrange(1, 6) for _ in range(self.n)), reverse=True)
            window = self.pick("classic", "wide", self.draw.randrange(1, 5), windows)
            if self.named & PREVIOUS:
                window = self.pick("classic", self.draw.randrange(1, m + 2))
            self.options["window"] = window
        self.flushes = self.named <= {*FLUSHING, "xgrad"}

    def _draw_numbers(self):
        self.dtype, master = torch.float64, None
        if self.exactly:
            narrow, wide = torch.bfloat16, torch.float32
            self.dtype, master = self.pick(
                *[(torch.float32, None)] * 2, (torch.float64, None), (wide, wide), (narrow, wide)
            )
            if not self.named & WIDE_STEPS and self.chance(0.15):
                self.dtype, master = narrow, None
        if master is not None:
            self.options["master_dtype"] = master
        self.narrow = self.dtype == torch.bfloat16
        self.wide = master or self.dtype  # of the weights that are updated
        self.has_masters = self.narrow and master is not None

    def _draw_blocks(self):
        known = {*modules.BLOCKS[self.domain]}
        if not self.exactly and self.optimizer.kind not in LINEAR:
            known -= modules.ZERO_GRADIENTS | {"scale"}  # before a norm it has none
        if self.narrow:
            known -= modules.WIDE_ONLY
        if self.foreign and self.optimizer.kind not in ("SGD", "Adam", "AdamW"):
            known -= {"nothing"}
        if self.optimizer.kind == "Whitened":
            known -= {"scale", "prelu"}
        self.recompute = self.chance(0.25)
        if self.recompute and self.against == "definition":
            known -= modules.RANDOM
        if self.recompute:
            self.options["recompute"] = True
        safe = {"plain", "thin", "layer norm", "group norm", "spectral", "weight norm", "pooled"}
        self.blocks, before = [], "plain"
        for _ in range(self.n):
            names = []
            learns = self.chance(0.85)
            for _ in range(self.pick(1, 2, 2, 3, 4)):
                kinds = known if learns else known & modules.WITHOUT_WEIGHTS
                kinds = sorted(kinds if before in safe else kinds - {"relu_"})
                names.append(before := self.pick(*kinds, *["plain"] * (4 * learns)))
            self.blocks.append(names)
        self.forms = [self.pick("tensor", "tensor", "tuple", "dict") for _ in range(self.n - 1)]
        self.out = self.pick("tensor", "tensor", "tuple", "dict", "object")
        self.head = self.pick("linear", "linear", "table") if self.domain == "flat" else "linear"
        self.tokens = self.head == "table" or (self.domain == "flat" and self.chance(0.2))
        self.frozen = [self.pick(*["no"] * 6, "all", "biases") for _ in range(self.n)]
        self.used = {name for names in self.blocks for name in names}
        self.last_steps = self.domain == "time" and self.chance(0.5)
        self.last = [k for k in range(self.n) if self.domain == "image" and self.chance(0.4)]
        useless = modules.WITHOUT_WEIGHTS | {"aside", "nothing"}
        learning = [
            frozen != "all" and not useless.issuperset(names)
            for names, frozen in zip(self.blocks, self.frozen, strict=True)
        ]
        if not any(learning):
            self.frozen = ["no"] * self.n  # the head always trains
        if self.last:
            for names in self.blocks:
                wrong = ("instance norm", "group norm")
                names[:] = ["gelu" if name in wrong else name for name in names]
        places = [(k, b) for k in range(self.n) for b, name in enumerate(self.blocks[k])]
        frozen = [k for k in range(self.n) if self.frozen[k] == "all"]
        alike = [(k, b) for k, b in places if k not in frozen and self.blocks[k][b] == "plain"]
        count = self.pick(0, 2, 2, 3)
        self.ties = sorted(self.draw.sample(alike, count)) if len(alike) >= count else []
        self.tie_biases = self.chance(0.3)
        self.shared = bool(self.ties) or self.head == "table"
        self.cut = self.chance(0.4)
        # The package rejects hooks of parameters that stages share; the oracle copies models
        # without them.
        self.hook = not self.shared and self.against != "definition" and self.chance(0.15)

    @property
    def by_microbatch(self):
        """Whether cutting changes the result of a minibatch."""
        return bool(self.used & (modules.BATCHED | modules.MOVED | modules.RANDOM))

    def _draw_options(self):
        if self.chance(0.5):
            self.options["clip_norm"] = self.pick(0.02, 0.1, 0.5)
            scopes = ["global", "global"] if self.flushes and self.n > 1 else []
            if scope := self.pick(None, "stage", *scopes):
                self.options["clip_scope"] = scope

    def _draw_batches(self):
        self.input_form = self.pick("tensor", "tensor", "tuple", "dict")
        self.batch_form = self.pick("pair", "pair", "list", "mapping")
        if self.batch_form == "mapping":
            self.input_form = "dict"
        kinds = ["mse", "huber", "cross entropy"]
        self.loss = self.pick(*kinds) if self.domain != "time" or self.last_steps else "mse"
        plain = self.loss == "mse" and self.batch_form != "mapping"
        self.target_form = self.pick("tensor", "tuple") if plain else "tensor"
        if self.domain == "time":
            self.options["split_dim"] = self._split_dim()
        least, most = 1, 6
        if self.used & modules.BATCHED:  # one sample has no statistics
            m = self.options["microbatches"]
            least = 2 * (self.n if m == "auto" else m)
            most = least + 3
        self.sizes = [self.draw.randint(least, most) for _ in range(self.pick(5, 6, 7))]

    def _split_dim(self):
        of_target = 0 if self.last_steps else 1
        if self.batch_form == "mapping":
            return {"x": 1, "gate": 1} | ({"y": 1} if of_target else {})
        if of_target and self.chance(0.5):
            return 1
        more = {"tensor": [], "tuple": [(1, 1)], "dict": [{"x": 1, "gate": 1}]}[self.input_form]
        return self.pick(1, *more), of_target

    # Building the program

    @property
    def ends(self):
        """Return where the blocks of each stage end, including the surrounding modules."""
        sizes = [len(blocks) + 1 for blocks in self.blocks]  # including the input module
        for k, form in enumerate(self.forms):
            sizes[k] += form != "tensor"
        sizes[-1] += 1 + (self.out != "tensor")
        return [sum(sizes[: k + 1]) for k in range(self.n)]

    def stages(self, salt=0):
        """Return the stages with weights of the seed and the salt."""
        before = torch.get_rng_state()
        torch.manual_seed(1000 * self.seed + salt)
        try:
            return self._stages()
        finally:
            torch.set_rng_state(before)

    # results of the old norms would otherwise have a graph and could not be copied
    @torch.no_grad()
    def _stages(self):
        made = [
            [modules.BLOCKS[self.domain][name](self.domain) for name in row] for row in self.blocks
        ]
        if self.ties:
            (k, b), *others = self.ties
            for j, c in others:
                made[j][c].weight = made[k][b].weight
                if self.tie_biases:
                    made[j][c].bias = made[k][b].bias
        entry = modules.Entry(self.tokens)
        head = modules.Head(self.domain, self.last_steps)
        if self.head == "table":
            head = modules.Scores(entry.table.weight)
        every = []
        for k, row in enumerate(made):
            first = entry if k == 0 else nn.Identity()
            if k and self.forms[k - 1] != "tensor":
                first = modules.Function(modules.unpacked)
            ending = [] if k < self.n - 1 else [head]
            if k < self.n - 1 and self.forms[k] != "tensor":
                ending = [modules.Function(partial(modules.packed, self.forms[k]))]
            if k == self.n - 1 and self.out != "tensor":
                ending.append(modules.Function(partial(modules.output_as, self.out)))
            every.append([first, *row, *ending])
        for k, row in enumerate(every):
            for module in row:
                module.to(self.dtype)
                if k in self.last:
                    module.to(memory_format=torch.channels_last)
                for name, p in module.named_parameters():
                    if self.frozen[k] == "all" or (self.frozen[k] == "biases" and "bias" in name):
                        p.requires_grad_(False)
        learns = [p for row in every for module in row for p in module.parameters()]
        if not any(p.requires_grad for p in learns):  # a pipeline needs something to train
            for p in learns:
                p.requires_grad_(True)
        if self.hook:
            next(p for p in learns if p.requires_grad).register_hook(lambda g: g * 0.7)
        if self.cut:
            return cut_at(nn.Sequential(*(module for row in every for module in row)), self.ends)
        return [nn.Sequential(*row) for row in every]

    @property
    def loss_fn(self):
        return modules.Loss(self.loss)

    def pipeline(self, salt=0, **more):
        with warnings.catch_warnings():
            # some draws have such values
            warnings.filterwarnings("ignore", message=".*rounded away")
            return st.Pipeline(
                self.stages(salt),
                self.optimizer.ours,
                self.loss_fn,
                method_of(self.method),
                scheduler=self.optimizer.make_scheduler,
                **with_passes({**self.options, "offload": self.offload, **more}),
            )

    def batches(self, sizes, salt=0):
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return [self._batch(size, generator) for size in sizes]

    def _batch(self, size, generator):
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        shape = {
            "flat": (size, modules.WIDTH),
            "image": (size, modules.CHANNELS, modules.SIDE, modules.SIDE),
            "time": (modules.STEPS, size, modules.WIDTH),
        }[self.domain]
        x = draw(shape).to(self.dtype)
        if self.domain == "image" and 0 in self.last:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.tokens:
            x = torch.randint(modules.CLASSES + 3, (size,), generator=generator)
        ones = [1] * (len(shape) - 1)
        ones.insert(1 if self.domain == "time" else 0, size)
        gate = (1 + 0.1 * draw(ones)).to(self.dtype)
        y = self._target(size, generator, draw)
        if self.batch_form == "mapping":
            return {"x": x, "gate": gate, "y": y}
        forms = {"tensor": x, "tuple": (x, gate), "dict": {"x": x, "gate": gate}}
        value = forms[self.input_form]
        if self.target_form == "tuple":
            y = (y, 1 + 0.1 * draw(y.shape).to(y.dtype))
        return [value, y] if self.batch_form == "list" else (value, y)

    def _target(self, size, generator, draw):
        if self.loss == "cross entropy":
            return torch.randint(modules.CLASSES, (size,), generator=generator)
        steps = () if self.domain != "time" or self.last_steps else (modules.STEPS,)
        y = draw(*steps, size, modules.CLASSES)
        return y if self.dtype == torch.float64 else y.float()
