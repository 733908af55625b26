"""Parameter lists of real models, generated from the numbers of their architectures."""

from __future__ import annotations

from collections.abc import Callable

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 (He et al. 2015) for 1,000 classes: convolutions, batch norms, one linear layer."""
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, size: int) -> None:
        shapes.extend([(outputs, inputs, size, size), (outputs,), (outputs,)])

    convolution(64, 3, 7)
    channels = 64
    for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            convolution(width, channels, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:  # the shortcut changes the number of channels
                convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def vgg16() -> list[Shape]:
    """VGG16 (Simonyan and Zisserman 2014), configuration D, for 224 pixels and 1,000 classes."""
    shapes: list[Shape] = []
    channels = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            shapes += [(width, channels, 3, 3), (width,)]
            channels = width
    for inputs, outputs in ((channels * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        shapes += [(outputs, inputs), (outputs,)]
    return shapes


def gpt2() -> list[Shape]:
    """GPT-2 124M (Radford et al. 2019): 12 layers of 768, embeddings tied to the output."""
    width, layers, words, positions = 768, 12, 50257, 1024
    norm: list[Shape] = [(width,), (width,)]
    shapes: list[Shape] = [(words, width), (positions, width)]
    for _ in range(layers):
        shapes += [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return shapes + norm


def llama_1b() -> list[Shape]:
    """A Llama-style model of 1.2 billion: 16 layers of 2048, grouped queries, tied embeddings."""
    width, layers, words, hidden, keys = 2048, 16, 128256, 8192, 512
    shapes: list[Shape] = [(words, width)]
    for _ in range(layers):
        shapes += [(width, width), (keys, width), (keys, width), (width, width)]
        shapes += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [*shapes, (width,)]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "ResNet-50": resnet50,
    "VGG16": vgg16,
    "GPT-2 124M": gpt2,
    "Llama-style 1B": llama_1b,
}
