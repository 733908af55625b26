"""Simulates throughput on 4 to 1,024 devices from measured layer times, and explains it.

    python bench/simulate_throughput.py --measure FOLDER  # layer times of one core: 3 minutes
    python bench/simulate_throughput.py FOLDER            # simulated.json and ratios.json

The first command needs a quiet machine; the second only computes. ``ASSUMED`` lists the assumptions
about devices, which the files repeat.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import root  # noqa: F401  # finds studies
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import spectrain_ext as st
from spectrain_ext.files import finite
from spectrain_ext.method import find_method
from spectrain_ext.partitioning import Profile, cut
from spectrain_ext.partitioning.profile import BlockProfile
from spectrain_ext.planning import (
    LINKS,
    Layers,
    find_link,
    measure_layers,
    read_layers,
    write_layers,
)
from spectrain_ext.planning.costs import Costs, Setting, Way
from spectrain_ext.planning.search import Search
from studies.models import gpt, resnet, vgg


class Device(NamedTuple):
    """Assumed properties of a device; all but the efficiency are from a data sheet.

    Attributes:
        peak: operations per second in the training format.
        efficiency: the share of the peak that layers reach, a guess.
        bandwidth: memory bandwidth in bytes per second.
        memory: bytes.
        source: the data sheet.
    """

    peak: float
    efficiency: float
    bandwidth: float
    memory: float
    source: str

    @property
    def flops(self) -> float:
        return self.peak * self.efficiency


#: The paper's machine had four of the first, on PCIe 3.
ASSUMED = {
    "P40": Device(12e12, 0.5, 346e9, 24e9, "NVIDIA Tesla P40 data sheet, float32"),
    "H100": Device(494e12, 0.4, 3.35e12, 80e9, "NVIDIA H100 SXM data sheet, TF32 without sparsity"),
}
DEVICES = tuple(2**n for n in range(2, 11))
SIMULATED_LINKS = ("pcie3", "nvlink", "100gbe")
_TRAINING = 3  # operations of a forward and backward, relative to a forward


class Model(NamedTuple):
    """A model with measured layers.

    Attributes:
        blocks: makes its blocks.
        batch: makes a batch of a number of samples.
        samples: samples of the measured microbatch.
        each: samples of a minibatch per device.
    """

    blocks: Callable[[], list[nn.Module]]
    batch: Callable[[int], Tensor]
    samples: int
    each: int


def images(samples: int, size: int = 224) -> Tensor:
    return torch.randn(samples, 3, size, size)


def tokens(vocabulary: int, context: int) -> Callable[[int], Tensor]:
    return lambda samples: torch.zeros(samples, context, dtype=torch.int64)


MODELS = {
    "vgg16": Model(lambda: vgg(16, classes=1000), images, 2, 32),
    "resnet50": Model(lambda: resnet(18, depth=50, classes=1000), images, 4, 32),
    "resnet152": Model(lambda: resnet(52, depth=152, classes=1000), images, 2, 32),
    "gpt2": Model(
        lambda: gpt(14, vocabulary=50257, context=512, width=768, depth=12),
        tokens(50257, 512),
        2,
        4,
    ),
}


# Layer times


def measure(folder: Path, names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        model = MODELS[name]
        with seeded():
            layers = measure_layers(model.blocks(), model.batch(model.samples), repeats=3)
        write_layers(folder / f"layers-{name}.json", layers)
        seconds = sum(block.seconds for block in layers.at(1).blocks)
        print(f"{name}: {seconds:.2f} s a sample", flush=True)


@contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def on_device(name: str, layers: Layers, device: Device) -> tuple[Layers, float]:
    """Return the layers on an assumed device, and its speed relative to the measured one."""
    flops = sum(block.flops for block in counted_blocks(name)) * _TRAINING
    here = layers.samples[1] * flops / sum(block.seconds for block in layers.profiles[1].blocks)
    speed = device.flops / here
    return replace(layers.faster(speed), byte_seconds=1 / device.bandwidth), speed


# Simulated throughput


def contenders() -> Iterator[tuple[str, str, Callable[[Costs], float]]]:
    """Yield the name, method and counted variants of each contender."""
    yield "data parallelism", "sync", lambda costs: 1.0
    yield "GPipe", "gpipe", lambda costs: 1.0
    yield "1F1B", "1f1b", lambda costs: 1.0
    yield "PipeDream", "pipedream", lambda costs: 1.0
    yield "SpecTrain", "spectrain", lambda costs: 1.0
    yield "auto, one update late", "auto", lambda costs: 1.0 if costs.delay <= 1 else float("inf")


def simulated(folder: Path, devices: Sequence[int]) -> dict[str, Any]:
    rows, speeds = [], {}
    for (name, model), (device, assumed) in product(MODELS.items(), ASSUMED.items()):
        path = folder / f"layers-{name}.json"
        if not path.exists():
            continue
        layers, speeds[f"{name}, {device}"] = on_device(name, read_layers(path), assumed)
        for link, count in product(SIMULATED_LINKS, devices):
            setting = Setting(layers, find_link(link), model.each * count)
            methods = [find_method(method) for _, method, _ in contenders()]
            search = Search(setting, count, methods, assumed.memory)
            for contender, method, price in contenders():
                costs = search.best(find_method(method), price)
                rows.append(
                    {
                        **{"model": name, "device": device, "link": link, "devices": count},
                        "contender": contender,
                        **({} if costs is None else _said(costs, setting.batch)),
                    }
                )
        print(name, device, flush=True)
    return {**assumptions(), "speeds": speeds, "rows": rows}


def assumptions() -> dict[str, Any]:
    return {
        "assumed": {name: device._asdict() for name, device in ASSUMED.items()},
        "links": {name: asdict(LINKS[name]) for name in SIMULATED_LINKS},
    }


def _said(costs: Costs, batch: int) -> dict[str, Any]:
    way = costs.way
    counts = way.replicas
    return {
        "throughput": float(f"{batch / costs.period:.5g}"),
        "stages": len(way.ends),
        "replicas": counts[0] if len(set(counts)) == 1 else list(counts),
        "microbatches": way.microbatches,
        "window": way.window,
        "delay": costs.delay,
        "memory": max(costs.memory),
    }


# Parameters and activations, counted without running anything: on the meta device


class Block(NamedTuple):
    """Totals of one block for one sample."""

    parameters: int
    outputs: int
    flops: int


class Counted(NamedTuple):
    """A model of the table.

    Attributes:
        title: displayed name.
        make: makes it on the current device, with its blocks in order and a sample.
        batch: samples of a minibatch over four devices.
        sample: kind of a sample.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Sequence[nn.Module], Tensor]]
    batch: int
    sample: str


def _listed(blocks: list[nn.Module], sample: Tensor) -> Any:
    return nn.Sequential(*blocks), blocks, sample


def _inception() -> Any:
    from pytorchcv.models.inceptionv4 import inceptionv4  # type: ignore[import-not-found]

    model = inceptionv4()
    blocks = [unit for stage in model.features for unit in _units(stage)]
    return model, blocks, images(1, 299)


def _units(stage: nn.Module) -> list[nn.Module]:
    whole = not isinstance(stage, nn.Sequential) or type(stage) is not nn.Sequential
    return [stage] if whole else list(stage)


def _pretrained(kind: str, layers: str, sample: Callable[[], Tensor], **config: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    heads = {"Bert": "BertForMaskedLM", "ViT": "ViTForImageClassification"}
    names = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", **heads}
    model = getattr(transformers, names[kind])(made)
    return model, list(model.get_submodule(layers)), sample()


def _ids(context: int) -> Callable[[], Tensor]:
    return lambda: torch.zeros(1, context, dtype=torch.int64)


def _snn() -> Any:
    layers = [nn.Linear(3072 if i == 0 else 2048, 2048) for i in range(32)]
    blocks: list[nn.Module] = [nn.Sequential(layer, nn.SELU()) for layer in layers]
    return _listed([*blocks, nn.Linear(2048, 10)], torch.randn(1, 3072))


def _llama() -> Any:
    return _pretrained(
        *("Llama", "model.layers", _ids(4096)),
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    )


TABLE = {
    "snn": Counted("self-normalizing MLP (32 of 2,048)", _snn, 128, "3,072 numbers"),
    "vgg16": Counted("VGG16", lambda: _listed(vgg(16, classes=1000), images(1)), 128, "224 pixels"),
    "resnet50": Counted(
        "ResNet-50",
        lambda: _listed(resnet(18, depth=50, classes=1000), images(1)),
        *(128, "224 pixels"),
    ),
    "resnet152": Counted(
        "ResNet-152",
        lambda: _listed(resnet(52, depth=152, classes=1000), images(1)),
        *(128, "224 pixels"),
    ),
    "inceptionv4": Counted("Inception-v4", _inception, 128, "299 pixels"),
    "transformer": Counted(
        "transformer (6 of 512)",
        lambda: _listed(gpt(8, vocabulary=32000, context=128, width=512, depth=6), _ids(128)()),
        *(128, "128 tokens"),
    ),
    "gpt2": Counted(
        "GPT-2 small", lambda: _pretrained("GPT2", "transformer.h", _ids(1024)), 16, "1,024 tokens"
    ),
    "gpt2-xl": Counted(
        "GPT-2 XL",
        lambda: _pretrained(
            "GPT2", "transformer.h", _ids(1024), n_embd=1600, n_layer=48, n_head=25
        ),
        *(16, "1,024 tokens"),
    ),
    "bert-large": Counted(
        "BERT-large",
        lambda: _pretrained(
            *("Bert", "bert.encoder.layer", _ids(512)),
            **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
            **{"intermediate_size": 4096},
        ),
        *(32, "512 tokens"),
    ),
    "vit-large": Counted(
        "ViT-L/16",
        lambda: _pretrained(
            *("ViT", _vit_layers(), lambda: images(1)),
            **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
            **{"intermediate_size": 4096, "num_labels": 1000},
        ),
        *(128, "224 pixels"),
    ),
    "llama3-8b": Counted("Llama-3-8B", _llama, 8, "4,096 tokens"),
}


def _vit_layers() -> str:
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=1))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return names[0]


def counted_blocks(name: str) -> list[Block]:
    """Return a model's blocks, including what precedes the first and follows the last."""
    if name == "gpt2" and name in MODELS:  # the model with measured layers
        entry = Counted("", lambda: _listed(MODELS[name].blocks(), MODELS[name].batch(1)), 0, "")
        return counted(entry)
    return counted(TABLE[name])


def counted(entry: Counted) -> list[Block]:
    with torch.device("meta"):
        model, blocks, sample = entry.make()
        model.eval()
        ends: list[tuple[int, int]] = []  # operations up to here, and bytes passed on
        with FlopCounterMode(display=False) as counter, torch.no_grad():

            def ended(_: nn.Module, __: object, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                ends.append((counter.get_total_flops(), tensor.nbytes))

            def began(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
                tensor = given[0] if given else named["hidden_states"]
                ends.append((counter.get_total_flops(), tensor.nbytes))

            handles = [block.register_forward_hook(ended) for block in blocks]
            handles.append(blocks[0].register_forward_pre_hook(began, with_kwargs=True))
            model(sample)
            total = counter.get_total_flops()
        for handle in handles:
            handle.remove()
    mine = {p for block in blocks for p in block.parameters()}
    outside = [p for p in model.parameters() if p not in mine]
    embedded = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    before = sum(p.numel() for p in outside if p in embedded)
    after = sum(p.numel() for p in outside) - before
    found = []
    for index, (block, (until, size)) in enumerate(zip(blocks, ends[1:], strict=True)):
        found.append(Block(_size(block), size, until - ends[index][0]))
    if before:
        found.insert(0, Block(before, ends[0][1], ends[0][0]))
    if after or total > ends[-1][0]:
        found.append(Block(after, 4, total - ends[-1][0]))
    return found


def _size(block: nn.Module) -> int:
    return sum(p.numel() for p in block.parameters())


def ratios() -> dict[str, Any]:
    rows = []
    for name, entry in TABLE.items():
        blocks = counted(entry)
        rows.append({"model": name, "title": entry.title, **_ratio(entry, blocks)})
        print(name, rows[-1]["parameters"], flush=True)
    return {**assumptions(), "link": "pcie3", "devices": 4, "rows": rows}


def _ratio(entry: Counted, blocks: Sequence[Block]) -> dict[str, Any]:
    """Return bytes of data parallelism over four devices relative to four balanced stages."""
    ends = cut(_profile_of(blocks, 1.0), 4).ends
    parameters = sum(block.parameters for block in blocks)
    exchanged = 2 * 3 * 4 * parameters // 4
    passed = max(2 * entry.batch * blocks[end - 1].outputs for end in ends[:-1])
    return {
        "parameters": parameters,
        "batch": entry.batch,
        "sample": entry.sample,
        "exchanged_bytes": exchanged,
        "passed_bytes": passed,
        "ratio": exchanged / passed,
        "microbatches": min(8, entry.batch),
        "on": {
            name: _on(entry, blocks, ends, parameters, device) for name, device in ASSUMED.items()
        },
    }


def _profile_of(blocks: Sequence[Block], flops: float) -> Profile:
    return Profile(
        tuple(
            BlockProfile(
                _TRAINING * block.flops / flops,
                *(block.outputs, 4 * block.parameters),
                forward_seconds=block.flops / flops,
            )
            for block in blocks
        )
    )


def _on(
    entry: Counted,
    blocks: Sequence[Block],
    ends: tuple[int, ...],
    parameters: int,
    device: Device,
) -> dict[str, Any]:
    """Return the seconds of a minibatch on one device, and on four in both ways."""
    link, batch = LINKS["pcie3"], entry.batch
    profile = _profile_of(blocks, device.flops)
    setting = Setting(Layers((1, 1), (profile, profile), 1 / device.bandwidth), link, batch)
    whole = Costs(setting, Way(find_method("sync"), (len(blocks),), (4,), 4)).period
    parts = Costs(setting, Way(find_method("auto"), ends, (1,) * 4, min(8, batch))).period
    alone = sum(block.seconds for block in profile.blocks) * batch
    # A central sum over one link: all gradients go to one device and all weights come from it, one
    # after the other and without overlap.
    central = alone / 4 + 2 * 3 * 4 * parameters / link.bandwidth
    return {
        "alone": alone,
        "data_parallel": whole,
        "central": central,
        "auto": parts,
        "speedup": whole / parts,
        "speedup_central": central / parts,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of layer times and results")
    parser.add_argument("--measure", action="store_true", help="measure the layers on this machine")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="models to measure")
    parser.add_argument("--quick", action="store_true", help="up to 16 devices")
    options = parser.parse_args(argv)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.measure:
        measure(folder, options.models)
        return 0
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python bench/simulate_throughput.py bench/results/{folder.name}",
        "torch": torch.__version__,
        "spectrain_ext": st.__version__,
    }
    devices = DEVICES[:3] if options.quick else DEVICES
    for name, make in (("ratios", ratios), ("simulated", lambda: simulated(folder, devices))):
        text = json.dumps(finite({**about, **make()}), indent=1, allow_nan=False)
        (folder / f"{name}.json").write_text(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
