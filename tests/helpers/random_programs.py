"""Draws random programs from a seed: a model, an optimizer, a method and matching options.

Combinations that the package rejects by design are not drawn, so that any other error fails a test.
``str(program)`` is one line; the same seed gives the same program everywhere.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from itertools import combinations

import pytest
import torch
from helpers.foreign_optimizers import muon_and_adamw
from helpers.random_modules import (
    BATCHED,
    BLOCKS,
    CHANNELS,
    CLASSES,
    MOVED,
    RANDOM,
    SIDE,
    STEPS,
    WIDE_ONLY,
    WIDTH,
    WITHOUT_WEIGHTS,
    ZERO_GRADIENTS,
    Entry,
    Exit,
    Head,
    Loss,
    Pack,
    Scores,
    Unpack,
)
from helpers.random_settings import (
    DECAYING,
    DEFINITIONS,
    FLUSHING,
    FOREACH,
    FOREIGN,
    FUSED,
    HYBRIDS,
    LINEAR,
    MOMENTUM,
    OURS,
    OWN_WINDOWS,
    PREVIOUS,
    RATE,
    ROUNDING,
    SAME,
    SCHEDULERS,
    SECOND_ORDER,
    SGD_ONLY,
    WIDE_STEPS,
    method_of,
)
from oracle.sgd import AveragingSGD
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

COUNT = 400


def seeds(few):
    """Return the seeds: all in a nightly run, the first ``few`` otherwise."""
    return [pytest.param(n, marks=[] if n < few else pytest.mark.nightly) for n in range(COUNT)]


def covering_seeds(against, without=()):
    """Return the seeds: all in a nightly run, otherwise few with every feature of other kinds."""
    features = {
        n: {feature for feature in Program(n, against).features if feature[0] not in without}
        for n in range(COUNT)
    }
    wanted, few = set().union(*features.values()), []
    while wanted:
        few.append(max(features, key=lambda n: len(features[n] & wanted)))
        wanted -= features[few[-1]]
    return [pytest.param(n, marks=[] if n in few else pytest.mark.nightly) for n in features]


# Kinds of features of which every pair is drawn, except for those that no program can have.
PAIRED = (
    *("between stages", "output", "input", "batch", "target", "loss", "recompute", "offload"),
    *("tied", "cut by the package", "clipping", "groups", "frozen", "window", "head"),
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
        # a norm of all stages needs a flush, which leaves no window to choose
        *((("clipping", "global"), ("window", w)) for w in ("classic", "wide", int, list)),
    )
}


def missing(against):
    """Return the required features and pairs of features that no program has."""
    drawn = [Program(seed, against).features for seed in range(COUNT)]
    every = set().union(*drawn)
    required = {("block", (domain, name)) for domain, row in BLOCKS.items() for name in row}
    required |= {("scheduler", name) for name in SCHEDULERS}
    required |= {("optimizer", name) for name in (*SAME, *FOREIGN) if name not in ROUNDING}
    pairs = {
        frozenset(pair)
        for pair in combinations([one for one in every if one[0] in PAIRED], 2)
        if pair[0][0] != pair[1][0]
    }
    for features in drawn:
        pairs -= {frozenset(pair) for pair in combinations(features, 2)}
    return required - every, pairs - IMPOSSIBLE


# Not drawn because torch (2.13, on a CPU) gets it wrong with channels_last: a group norm's backward
# crashes if its input needs no gradient, and an instance norm's differs if the next layer's
# gradient is channels_last.


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
        self._draw_optimizer()
        self._draw_blocks()
        self._draw_options()
        self._draw_batches()
        # It changes no result.
        self.offload = None if self.recompute else self.pick(None, "activations")

    def __str__(self):
        stages = " | ".join(
            ", ".join(blocks) + f" ({note})" * bool(note)
            for blocks, note in zip(self.blocks, self._notes(), strict=True)
        )
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        numbers = ", ".join(f"{key}={value!r}" for key, value in self.numbers.items())
        tied = f", tied {self.ties}{' with biases' * self.tie_biases}" * bool(self.ties)
        model = (
            f"{self.domain}{' tokens' * self.tokens}, {str(self.dtype).removeprefix('torch.')}, "
            f"ends {self.ends if self.cut else 'by hand'}{tied}, {self.head} head, "
            f"handed on {self.forms}, out {self.out}{', with a hook' * self.hook}"
        )
        return (
            f"program {self.seed} against {self.against}: {self.method}; [{stages}]; "
            f"{self.optimizer}({numbers}{' as a tensor' * self.tensor_rate}; groups: "
            f"{self.groups}), scheduler {self.scheduler}; {options}; {model}; batches "
            f"{self.batch_form}, {self.input_form}, {self.target_form}, {self.loss}, "
            f"sizes {self.sizes}, offload {self.offload}"
        )

    @property
    def features(self):
        """Return what the program has, as (kind, value)."""
        window = self.options.get("window", "usual")
        return {
            *(("block", (self.domain, name)) for name in self.used),
            *(("between stages", form) for form in self.forms),
            *(("frozen", what) for what in self.frozen),
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
            ("optimizer", self.optimizer),
            ("groups", self.groups),
            ("scheduler", self.scheduler),
            *(("option", name) for name in self.numbers),
            ("rate as a tensor", self.tensor_rate),
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
            self.method = self.pick(*named, *["pipedream until a gap"] * self.exactly)
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
        self.has_masters = self.narrow and master is not None

    def _draw_optimizer(self):
        named, sgd = self.named, self.named & SGD_ONLY
        ours = ["st.SGD"] if sgd else [*SAME]
        if "error-feedback" in named:
            ours.remove("st.NAdam")
        self.optimizer = self.pick(*ours)
        if not named & OURS and self.chance(0.6):
            kinds = [*FOREIGN] if self.exactly else [k for k in FOREIGN if k not in ROUNDING]
            self.optimizer = self.pick(*kinds)
            if self.optimizer == "Whitened" and self.narrow and not self.has_masters:
                self.optimizer = "Lion"  # inverses need 32 bits
        kind, numbers = self.optimizer, {"lr": RATE.get(self.optimizer, 0.005)}
        self.foreign = kind not in SAME
        if kind in ("st.SGD", "SGD"):
            numbers |= self._sgd_numbers()
        elif kind in DECAYING and self.chance(0.5):
            numbers["weight_decay"] = 0.05
        if kind in ("Adam", "AdamW") and self.chance(0.4):
            numbers["amsgrad"] = True
        if kind in ("st.Adam", "st.AdamW", "st.NAdam", "Adam", "AdamW", "NAdam", "RAdam"):
            numbers["betas"] = self.pick((0.9, 0.999), (0.8, 0.95))
        if kind in ("st.Adam", "st.NAdam", "NAdam", "RAdam") and self.chance(0.3):
            numbers["decoupled_weight_decay"] = True
        if kind == "RMSprop":
            numbers |= {"momentum": self.pick(0.0, 0.9), "centered": self.chance(0.5)}
        if kind == "Adagrad":
            numbers |= {"lr_decay": self.pick(0.0, 0.1)}
        averaging = numbers.keys() & {"smoothed", "decoupled_weight_decay"}
        if kind in (*SAME, "SGD", "Adam", "AdamW", "NAdam") and not averaging and self.chance(0.1):
            numbers |= {"maximize": True, "lr": numbers["lr"] / 10}  # a loss has no maximum
        how = [{}]
        how += [{"fused": True}] if kind in FUSED else []
        how += [{"foreach": True}, {"foreach": False}] if kind in FOREACH else []
        numbers |= self.pick(*how)
        if kind == "Muon":
            numbers = {}
        # Some kernels and loops need the rate as a plain number.
        self.tensor_rate = (
            self.against != "definition"
            and kind in (*SAME, "SGD", "Adam", "AdamW", "NAdam", "RAdam")
            and not numbers.get("foreach")
            and self.chance(0.15)
        )
        if kind in SAME and self.narrow and not self.has_masters and self.chance(0.5):
            numbers["momentum_dtype"] = torch.float32
        self.numbers = numbers
        self.groups = "one" if kind == "Muon" else self.pick("one", "one", "two", "each")
        still = kind == "st.SGD" and self.exactly and not named & MOMENTUM
        if still and numbers["momentum"] and self.chance(0.15):
            self.groups = "one still"
            numbers["lr"] = RATE[kind]
            for key in ("nesterov", "smoothed"):  # they need a momentum
                numbers.pop(key, None)
        self.has_momentum = not self.foreign and bool(numbers.get("momentum", 0.9))
        self.scheduler = None
        if kind != "Muon" and self.chance(0.5):
            both = self.groups != "one still" and (
                numbers.get("momentum", 0.0)
                if kind in ("st.SGD", "SGD")
                # No definition says which step's betas a prediction's bias corrections have.
                else "betas" in numbers and self.against != "definition"
            )
            self.scheduler = self.pick(*[s for s in SCHEDULERS if both or "of both" not in s])

    def _sgd_numbers(self):
        named = self.named
        numbers = {"momentum": self.pick(0.9, 0.9, 0.8, 0.0)}
        if named & {*MOMENTUM, *SGD_ONLY}:
            numbers["momentum"] = self.pick(0.9, 0.8)
        if self.chance(0.5):
            numbers["weight_decay"] = 0.05
        if not numbers["momentum"]:
            return numbers
        averages = self.optimizer == "st.SGD" and self.chance(0.2)
        if "spectrain-smoothed" in named or averages:
            numbers |= {"smoothed": True, "lr": 0.3}
        elif not named & {"sc", "sc-lwp", "error-feedback"} and self.chance(0.25):
            numbers["nesterov"] = True
        elif "error-feedback" not in named and self.chance(0.25) and not self._of_second_order:
            numbers["dampening"] = 0.3  # the package's law takes its first change as zero
        if self.optimizer == "st.SGD" and "dampening" not in numbers and self.chance(0.2):
            numbers["decoupled_weight_decay"] = True
        return numbers

    @property
    def _of_second_order(self):
        """Whether the comparison is a definition whose first change is the whole momentum."""
        return not self.exactly and self.named & SECOND_ORDER

    def _draw_blocks(self):
        known = {*BLOCKS[self.domain]}
        if not self.exactly and self.optimizer not in LINEAR:
            known -= ZERO_GRADIENTS
        if self.narrow:
            known -= WIDE_ONLY
        if self.foreign and self.optimizer not in ("SGD", "Adam", "AdamW"):
            known -= {"nothing"}
        if self.optimizer == "Whitened":
            known -= {"scale", "prelu"}
        self.recompute = self.chance(0.25)
        if self.recompute and self.against == "definition":
            known -= RANDOM
        if self.recompute:
            self.options["recompute"] = True
        safe = {"plain", "thin", "layer norm", "group norm", "spectral", "weight norm", "pooled"}
        self.blocks, before = [], "plain"
        for _ in range(self.n):
            names = []
            learns = self.chance(0.85)
            for _ in range(self.pick(1, 2, 2, 3, 4)):
                kinds = known if learns else known & WITHOUT_WEIGHTS
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
        useless = WITHOUT_WEIGHTS | {"aside", "nothing"}
        learning = [
            frozen != "all" and not useless.issuperset(names)
            for names, frozen in zip(self.blocks, self.frozen, strict=True)
        ]
        if not any(learning):
            self.frozen = ["no"] * self.n  # the head always trains
        if self.last:
            first = learning.index(True) if True in learning else self.n
            for k, names in enumerate(self.blocks):
                wrong = {"instance norm"} | ({"group norm"} if k <= first else set())
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
        return bool(self.used & (BATCHED | MOVED | RANDOM))

    def _notes(self):
        for k, frozen in enumerate(self.frozen):
            last = "channels last" if k in self.last else ""
            what = "" if frozen == "no" else f"{frozen} frozen"
            yield ", ".join(note for note in (last, what) if note)

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
        if self.used & BATCHED:  # one sample has no statistics
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
        made = [[BLOCKS[self.domain][name](self.domain) for name in row] for row in self.blocks]
        if self.ties:
            (k, b), *others = self.ties
            for j, c in others:
                made[j][c].weight = made[k][b].weight
                if self.tie_biases:
                    made[j][c].bias = made[k][b].bias
        entry = Entry(self.tokens)
        head = Head(self.domain, self.last_steps)
        if self.head == "table":
            head = Scores(entry.table.weight)
        every = []
        for k, row in enumerate(made):
            first = entry if k == 0 else nn.Identity()
            if k and self.forms[k - 1] != "tensor":
                first = Unpack()
            ending = [] if k < self.n - 1 else [head]
            if k < self.n - 1 and self.forms[k] != "tensor":
                ending = [Pack(self.forms[k])]
            if k == self.n - 1 and self.out != "tensor":
                ending.append(Exit(self.out))
            every.append([first, *row, *ending])
        for k, row in enumerate(every):
            for module in row:
                module.to(self.dtype)
                if k in self.last:
                    module.to(memory_format=torch.channels_last)
                for name, p in module.named_parameters():
                    if self.frozen[k] == "all" or (self.frozen[k] == "biases" and "bias" in name):
                        p.requires_grad_(False)
        if self.hook:
            learns = [p for row in every for module in row for p in module.parameters()]
            next(p for p in learns if p.requires_grad).register_hook(lambda g: g * 0.7)
        if self.cut:
            return cut_at(nn.Sequential(*(module for row in every for module in row)), self.ends)
        return [nn.Sequential(*row) for row in every]

    def make_optimizer(self, kind):
        if self.optimizer == "Muon":
            return muon_and_adamw
        numbers = dict(self.numbers)
        if kind in (torch.optim.SGD, AveragingSGD) and not self.foreign:
            numbers.pop("momentum_dtype", None)

        def made(params):
            own = dict(numbers)
            if self.tensor_rate:
                own["lr"] = torch.tensor(own["lr"])
            return kind(self._grouped(list(params)), **own)

        return made

    def _grouped(self, params):
        if self.groups == "one":
            return params
        lr = self.numbers["lr"]

        def rate(factor):
            return torch.tensor(lr * factor) if self.tensor_rate else lr * factor

        if self.groups == "each":
            return [{"params": [p], "lr": rate(1 + 0.1 * p.dim())} for p in params]
        flat, rest = [p for p in params if p.dim() < 2], [p for p in params if p.dim() >= 2]
        other = {"lr": rate(0.5)}
        if self.optimizer in DECAYING:
            other["weight_decay"] = 0.0
        if self.groups == "one still":
            other["momentum"] = 0.0
        groups = [{"params": rest}, {"params": flat, **other}]
        return [group for group in groups if group["params"]]

    @property
    def ours(self):
        return self.make_optimizer(FOREIGN[self.optimizer] if self.foreign else self._pair[0])

    @property
    def theirs(self):
        """Return torch's optimizer with the same numbers."""
        return self.make_optimizer(FOREIGN[self.optimizer] if self.foreign else self._pair[1])

    @property
    def _pair(self):
        ours, theirs = SAME[self.optimizer]
        more = self.numbers.keys() & {"smoothed", "decoupled_weight_decay"}
        if more and self.optimizer == "st.SGD":
            theirs = AveragingSGD
        return ours, theirs

    @property
    def make_scheduler(self):
        return None if self.scheduler is None else SCHEDULERS[self.scheduler]

    @property
    def loss_fn(self):
        return Loss(self.loss)

    def pipeline(self, salt=0, **more):
        with warnings.catch_warnings():
            # some draws have such values
            warnings.filterwarnings("ignore", message=".*rounded away")
            return st.Pipeline(
                self.stages(salt),
                self.ours,
                self.loss_fn,
                method_of(self.method),
                scheduler=self.make_scheduler,
                **{**self.options, "offload": self.offload, **more},
            )

    def batches(self, sizes, salt=0):
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return [self._batch(size, generator) for size in sizes]

    def _batch(self, size, generator):
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        shape = {
            "flat": (size, WIDTH),
            "image": (size, CHANNELS, SIDE, SIDE),
            "time": (STEPS, size, WIDTH),
        }[self.domain]
        x = draw(shape).to(self.dtype)
        if self.domain == "image" and 0 in self.last:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.tokens:
            x = torch.randint(CLASSES + 3, (size,), generator=generator)
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
            return torch.randint(CLASSES, (size,), generator=generator)
        steps = () if self.domain != "time" or self.last_steps else (STEPS,)
        y = draw(*steps, size, CLASSES)
        return y if self.dtype == torch.float64 else y.float()
