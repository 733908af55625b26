"""Finds how to call a model, its list of blocks, and what surrounds it, by hooks on a forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.modules import modes_kept, set_mode

SPLIT_HINT = "name submodules to cut before (split_points), or give a list of blocks"

Inputs = dict[str, Tensor]

_NEVER = ("inputs_embeds", "past_key_values", "cache_position", "cache_params")
_OPTIONS = ("output_", "return_", "use_", "logits_to_keep")
_LABELS = ("label", "labels", "label_ids")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Columns:
    """The use of each column of a batch by a model's forward; others are dropped."""

    takes: tuple[str, ...] = ()  # that the forward accepts, the main one first
    needed: tuple[str, ...] = ()  # that the forward requires
    labels: tuple[str, ...] = ()  # parameters of the forward that only its loss uses
    refused: tuple[str, ...] = ()  # parameters of the forward that stages do not accept
    more: tuple[str, ...] = ()  # that the caller keeps for the loss
    whole: bool = False  # whether the forward takes a dict
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further arguments of every call

    def arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return how to pass the columns' values to the forward, without the fixed arguments."""
        if not self.takes:
            return tuple(values), {}
        named = dict(zip(self.takes, values, strict=True))
        return ((named,), {}) if self.whole else ((), named)

    def run(self, model: nn.Module, value: Any) -> Any:
        args, kwargs = self.arguments(value if isinstance(value, tuple) else (value,))
        return model(*args, **kwargs, **self.fixed)

    def kept(self, batch: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the columns to keep, as transformers' ``Trainer`` does; checks as ``of``."""
        self.of(batch, where)
        names = (*self.takes, *self.labels, *_LABELS, *self.more)
        return {n: value for n, value in batch.items() if n in names and value is not None}

    def of(self, batch: object, where: str = "batch") -> Inputs:
        """Return the forward's columns of a batch; TypeError if they do not fit."""
        if isinstance(batch, Tensor):
            batch = {self.takes[0]: batch}
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{where}: expected a mapping of the model's arguments, or {self.takes[0]!r} "
                f"alone, got a {type(batch).__name__}"
            )
        present = {name: value for name, value in batch.items() if value is not None}
        if any(name not in present for name in self.needed):
            rest = [name for name in self.takes if name not in self.needed]
            expected = quoted(self.needed) + (f", and maybe {quoted(rest)}" if rest else "")
            expected += f", and for the loss {quoted(self.labels)}" if self.labels else ""
            raise TypeError(f"{where}: expected {expected}; got {quoted(batch)}")
        for name in self.refused:
            if name in present and name not in self.more:
                raise TypeError(
                    f"{where}: the model's forward takes {name!r}, and its stages do not, which "
                    f"were cut with {quoted(self.takes)}; leave it out, or cut the model with an "
                    "example_input that has it"
                )
        return {name: present[name] for name in self.takes if name in present}

    def narrowed(self, example: object) -> Columns:
        """Restrict to an example's columns: a traced model takes and needs exactly these."""
        present = tuple(self.of(example))
        absent = tuple(name for name in self.takes if name not in present)
        return replace(self, takes=present, needed=present, refused=(*self.refused, *absent))


#: Of a model whose batch is a tensor or a tuple of tensors.
BY_POSITION = Columns()


def columns_of(model: nn.Module, more: tuple[str, ...] = ()) -> Columns:
    """Return the columns for the forward of a Hugging Face model."""
    parameters = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    named = [n for n, p in parameters.items() if p.kind not in _VARIADIC and n != main]
    refused = tuple(n for n in named if n in _NEVER or n.startswith(_OPTIONS))
    labels = tuple(n for n in named if _is_label(n) and n not in refused)
    rest = [n for n in named if n not in (*labels, *refused)]
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", lambda: config)()
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    caches = "use_cache" in parameters or (any_name and hasattr(of_text, "use_cache"))
    fixed = {"use_cache": False} if caches else {}
    return Columns((main, *rest), (main,), labels, refused, more, fixed=fixed)


def columns_in(
    model: nn.Module, example: Mapping[str, object], more: tuple[str, ...] = ()
) -> Columns:
    """Return the columns for any forward: keywords if those of the example fit, or one dict."""
    parameters = inspect.signature(model.forward).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in _VARIADIC}
    positional = [n for n, p in named.items() if p.kind is not p.KEYWORD_ONLY]
    keywords = [n for n, p in named.items() if p.kind is not p.POSITIONAL_ONLY]
    needed = [n for n, p in named.items() if p.default is p.empty]
    tensors = tuple(name for name, value in example.items() if isinstance(value, Tensor))
    wanted = [name for name in keywords if example.get(name) is not None]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = (*wanted, *(n for n in tensors if any_name and n not in named))
    if takes and set(needed) <= set(takes):
        for name in takes:
            if name not in tensors:
                kind = type(example[name]).__name__
                raise TypeError(f"example_input[{name!r}]: expected a tensor, got a {kind}")
        labels = tuple(name for name in keywords if _is_label(name) and name not in takes)
        rest = tuple(name for name in keywords if name not in (*takes, *labels))
        return Columns(takes, takes, labels, rest, more)
    if tensors and not wanted and positional and set(needed) <= {positional[0]}:
        return Columns(tensors, tensors, more=more, whole=True)
    raise TypeError(
        f"example_input: the model's forward needs {quoted(needed) or 'other arguments'}, got "
        f"{quoted(example)}"
    )


def _is_label(name: str) -> bool:
    return "label" in name or name in ("start_positions", "end_positions")


def quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


# Models with a list of blocks


@dataclass(frozen=True)
class SideModule:
    """A module outside the list of blocks, and when it is called relative to them."""

    before: bool
    between: bool
    after: bool
    # Shape of its output, if it has parameters and is called before the blocks; ~i stands for the
    # hidden state's i-th size.
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Outline:
    path: str  # of the list of blocks
    members: tuple[int, ...]  # per block the length of the tuple it returns; 0: a tensor
    side_modules: Mapping[str, SideModule]  # outside the list
    columns: Columns  # that the forward takes
    # What only the first stage has: parameters beside the list, and modules with parameters that
    # come before it and return no tensor, such as an image's encoder.
    only_first: tuple[str, ...] = ()
    images: frozenset[str] = frozenset()  # columns that only the first stage gets
    routers: Mapping[str, int] = field(default_factory=dict)  # see own_loss.routers_of
    prefix: str = ""  # of the model's names inside a PeftModel

    @property
    def blocks(self) -> int:
        """Number of blocks to cut between: the list's, one before it and one after it."""
        return len(self.members) + 2

    @property
    def travels(self) -> list[str]:
        """Columns that every stage gets."""
        return [name for name in self.columns.takes if name not in self.images]


def is_pretrained(model: object) -> bool:
    """Whether it is a ``transformers`` model; does not import ``transformers``."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


def has_two_lists(model: nn.Module) -> bool:
    """Whether it is an encoder with a decoder, two lists of blocks."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def adapted(model: nn.Module) -> tuple[nn.Module, str]:
    """Return a ``PeftModel``'s base model and the prefix of its names, or the model itself."""
    classes = type(model).__mro__
    if not any(c.__name__ == "PeftModel" and c.__module__.startswith("peft.") for c in classes):
        return model, ""
    peft_model: Any = model
    config = peft_model.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"model: {type(config).__name__} puts virtual tokens before every sequence, outside of "
            "the model that is cut; adapters inside of its modules, such as LoRA, DoRA and IA3, "
            "can be cut with it"
        )
    base: nn.Module = peft_model.get_base_model()
    name = next(name for name, module in model.named_modules() if module is base)
    return base, f"{name}."


def run_pretrained(
    model: nn.Module, example: object, more: tuple[str, ...], made_up: bool = False
) -> tuple[Columns, Any]:
    """Run a Hugging Face model on an example; return the columns that it takes, and its output."""
    columns = columns_of(model, more)
    inputs = columns.of(example, "example_input")
    try:
        with evaluated(model):
            return columns, model(**inputs, **columns.fixed)
    except Exception as error:
        failure = f"{type(model).__name__} fails on"
        why = f"{type(error).__name__}: {error}"
        if made_up:
            raise ValueError(
                f"model: {failure} token ids made up for its config; give an example_input ({why})"
            ) from error
        if "decoder_input_ids" in set(columns.takes).difference(inputs):
            why += "; give decoder_input_ids too: its stages do not make them from labels"
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in inputs.items())
        raise ValueError(f"example_input: {failure} {shapes}: {why}") from error


def find_outline(
    model: nn.Module, example: object, more: tuple[str, ...], made_up: bool
) -> tuple[Outline, Any]:
    """Run a model with hooks on its modules; return its outline and its output."""
    config = getattr(model, "config", None)
    for option in ("output_hidden_states", "output_attentions"):
        if getattr(config, option, False):
            raise ValueError(
                f"model: its config asks for {option}, which no stage has of all blocks; set "
                f"model.config.{option} = False"
            )
    if getattr(config, "rescale_every", 0):
        raise ValueError(
            f"model: {type(model).__name__} divides its weights in evaluation, of which a pipeline "
            "keeps several versions; set model.config.rescale_every = 0"
        )
    watch = _Watch(model)
    with hooked(model.modules(), watch.begin, watch.end):
        columns, output = run_pretrained(model, example, more, made_up)
    path, members = watch.blocks()
    sides = watch.side_modules(path)
    images: frozenset[str] = frozenset()
    if watch.only_first:
        floating = (n for n, t in columns.of(example).items() if t.is_floating_point())
        images = frozenset(name for name in floating if "mask" not in name)
    return Outline(path, members, sides, columns, tuple(watch.only_first), images), output


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients, and restore the modes afterwards."""
    with modes_kept(model), torch.no_grad():
        set_mode(model, False)
        yield


@contextmanager
def hooked(
    modules: Iterable[nn.Module], begin: Callable[..., None], end: Callable[..., None]
) -> Iterator[None]:
    """Call functions before the modules' forwards, with their keyword arguments too, and after."""
    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def copy_sharing(
    module: nn.Module, replaced: Mapping[str, nn.Module], prefix: str = ""
) -> nn.Module:
    """Return a copy of a module that shares all parts except those replaced, by name."""
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update(vars(module))
    children = dict(module._modules)
    for name, child in children.items():
        path = prefix + name
        if path in replaced:
            children[name] = replaced[path]
        elif child is not None and any(key.startswith(path + ".") for key in replaced):
            children[name] = copy_sharing(child, replaced, path + ".")
    vars(copied)["_modules"] = children
    vars(copied)["_compiled_call_impl"] = None  # it calls the module itself
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    for own in ("_buffers", *hooks):
        vars(copied)[own] = copy.copy(vars(module)[own])
    return copied


class _Watch:
    """Records when a model's modules are called, and which list members feed the next."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kind = type(model).__name__
        self._calls: dict[nn.Module, list[tuple[int, int]]] = {}  # begins and ends, by _turn
        self._open: dict[nn.Module, list[int]] = {}
        self._returned: dict[nn.Module, Any] = {}
        self._follows: dict[nn.Module, nn.Module] = {}  # module -> the one whose output it took
        self._turn = 0
        self.only_first: list[str] = []
        self._made: tuple[Tensor, nn.Module] | None = None  # last output of a list's member
        self._lists = {
            name: list(members_of(module))
            for name, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
        }
        self._listed = {member for members in self._lists.values() for member in members}

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._turn += 1
        self._open.setdefault(module, []).append(self._turn)
        if module in self._listed and self._made and self._made[0] is hidden_of(args, kwargs):
            self._follows[module] = self._made[1]

    def end(self, module: nn.Module, args: object, output: Any) -> None:
        self._turn += 1
        self._calls.setdefault(module, []).append((self._open[module].pop(), self._turn))
        several = isinstance(output, (tuple, list))
        tensor = output[0] if several and output else output
        kind = len(output) if several else 0
        known = isinstance(tensor, Tensor)
        self._returned[module] = (kind, tensor.shape, tensor.dtype) if known else None
        if module in self._listed and known:
            self._made = tensor, module

    def blocks(self) -> tuple[str, tuple[int, ...]]:
        """Return the decoder's list with the most parameters whose members form a chain."""
        decoder = getattr(self._model, "get_decoder", lambda: None)()
        inside = set(decoder.modules()) if isinstance(decoder, nn.Module) else set()
        sizes: dict[str, tuple[bool, int]] = {}
        for name, members in self._lists.items():
            once = all(len(self._calls.get(member, ())) == 1 for member in members)
            chain = all(self._follows.get(b) is a for a, b in pairwise(members))
            if once and chain and all(self._returned[member] for member in members):
                size = sum(p.numel() for member in members for p in member.parameters())
                sizes[name] = (members[0] in inside, size)
        if not sizes:
            raise ValueError(
                f"model: {self._kind} has no list of blocks that hand a tensor from one to the "
                f"next; {SPLIT_HINT}"
            )
        path = max(sizes, key=lambda name: sizes[name])
        return path, tuple(self._returned[member][0] for member in self._lists[path])

    def side_modules(self, path: str) -> dict[str, SideModule]:
        """Return the outermost called modules outside a list of blocks."""
        members = self._lists[path]
        begin, end = self._calls[members[0]][0][0], self._calls[members[-1]][0][1]
        hidden = self._returned[members[0]][1][:2]  # batch size and sequence length
        outermost: dict[str, SideModule] = {}

        def look(module: nn.Module, prefix: str) -> None:
            owned = [prefix + name for name in module._parameters]
            if owned and not path.startswith(prefix):
                raise ValueError(
                    f"model: {self._kind}'s parameter {owned[0]!r} is used beside the blocks of "
                    f"{path!r} by code that no stage has alone; {SPLIT_HINT}"
                )
            self.only_first += owned
            for name, child in module.named_children():
                where = prefix + name
                if where == path:
                    continue
                around = path.startswith(where + ".")
                inside = any(self._calls.get(inner) for inner in child.modules())
                if around or (inside and not self._calls.get(child)):
                    look(child, where + ".")
                else:
                    outermost[where] = side_module(where, child)

        def of_hidden(index: int, size: int) -> int:
            if size in hidden[index : index + 1]:
                return ~index
            return ~hidden.index(size) if size in hidden else size

        def side_module(name: str, module: nn.Module) -> SideModule:
            calls = self._calls.get(module, [])
            before = any(ends < begin for _, ends in calls)
            after = any(begins > end for begins, _ in calls)
            between = any(begins > begin and ends < end for begins, ends in calls)
            learns = any(True for _ in module.parameters())
            if learns and between:
                raise ValueError(
                    f"model: {self._kind}'s {name!r} is called between the blocks of {path!r}, "
                    f"and no stage has it alone; {SPLIT_HINT}"
                )
            shape = None
            if learns and before:
                returned = self._returned[module]
                if returned is None or returned[0] or not returned[2].is_floating_point:
                    self.only_first.append(name)
                    return SideModule(before, between, after, None)
                *sizes, width = returned[1]
                shape = (*(of_hidden(i, size) for i, size in enumerate(sizes)), width)
            return SideModule(before, between, after, shape)

        look(self._model, "")
        return outermost


def members_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a list's modules; one that it holds twice comes twice."""
    return (child for child in module._modules.values() if child is not None)


def hidden_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")
