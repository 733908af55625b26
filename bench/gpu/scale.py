"""Defines the sizes on the GPU, and in a rehearsal on the CPU, which runs every line too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Scale:
    """Sizes; exponents are of two."""

    device: str
    large: tuple[int, ...]  # elements for the operators
    many: tuple[tuple[int, int], ...]  # numbers of tensors, and the exponent of their elements
    models: tuple[str, ...]
    case_s: float
    sample_s: float
    stress: tuple[int, int, int]  # minibatches, width, samples
    traced: tuple[int, int, int]
    seeds: int
    few: int | None  # limit on methods and operations
    delay_s: float
    rounds: int
    compiles: bool
    processes: tuple[int, ...]  # ranks of a run, the most important first
    training: tuple[int, int, int]  # minibatches, width, samples of a microbatch; in 8 stages
    stand_ins: int = 0  # substitutes for GPUs, where there are none

    @property
    def on_gpu(self) -> bool:
        """Whether there are devices to wait for."""
        return self.device != "cpu"

    @property
    def gpus(self) -> int:
        """Number of GPUs, or of their substitutes."""
        import torch  # not needed for planning and installing

        return torch.cuda.device_count() if self.on_gpu else self.stand_ins

    def devices(self, count: int) -> list[str]:
        """Return ``count`` devices, cycling through the existing ones."""
        if not self.on_gpu:
            return [self.device] * count
        return [f"{self.device}:{k % self.gpus}" for k in range(count)]

    def wait(self) -> None:
        """Wait for all work on the devices."""
        if self.on_gpu:
            import torch

            # Synchronizing an unused device would create a context, which costs memory.
            for index in range(self.gpus):
                if index == torch.cuda.current_device() or torch.cuda.memory_reserved(index):
                    torch.cuda.synchronize(index)


FULL = Scale(
    device="cuda",
    large=(26, 28),
    many=((300, 26), (3000, 22), (300, 18)),
    models=("ResNet-50", "GPT-2 124M"),
    case_s=0.4,
    sample_s=2e-3,
    stress=(24, 2048, 512),
    traced=(16, 4096, 2048),
    seeds=8,
    few=None,
    delay_s=2e-3,
    rounds=15,
    compiles=True,
    processes=(2, 8, 4),
    training=(6, 4096, 512),
)
REHEARSAL = Scale(
    device="cpu",
    large=(8,),
    many=((3, 9),),
    models=(),
    case_s=0.0,
    sample_s=0.0,
    stress=(3, 8, 4),
    traced=(3, 8, 4),
    seeds=1,
    few=2,
    delay_s=1e-4,
    rounds=2,
    compiles=False,
    processes=(2,),
    training=(2, 8, 4),
    stand_ins=8,
)
