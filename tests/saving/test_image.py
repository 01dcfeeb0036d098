"""Images of many boxes, which are copied all at once, equal those that are copied one by one."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from limpet.buffers import Buffer
from limpet.layout.shard_layout import LeafBox
from limpet.saving import image as images
from limpet.saving.image import make_image, split_into_pieces
from limpet.types import Box

SIZES = (0, 1, 2, 7, 8, 64, 127, 128, 129, 600)


def random_tensor(r: random.Random) -> Any:
    """A contiguous or strided tensor, parameter, or array of up to 1,200 bytes."""
    size = r.choice(SIZES)
    data = torch.randint(-(2**15), 2**15, (size, 2), dtype=torch.int16)
    kind = r.randrange(8)
    if kind == 0:
        return data[:, 0]  # strided
    if kind == 1:
        return data[:, 1].numpy()
    if kind == 2:
        return data.numpy()[:, 0].copy()
    if kind == 3:
        return torch.nn.Parameter(data.to(torch.float32).flatten()[:size])
    return data.flatten()[:size].clone()


def copy_of(image: images.Image) -> bytes:
    """Return the whole image, copied piece by piece into buffers of random content."""
    parts = []
    for piece in split_into_pieces(len(image.header), image.length):
        buffer = Buffer(piece.stop - piece.start + 1000)
        buffer.view[:] = bytes([0xA5]) * len(buffer.view)
        image.copy_piece(piece, buffer)
        end = piece.stop - piece.start
        parts.append(bytes(buffer.view[:end]))
        assert bytes(buffer.view[end:]) == bytes([0xA5]) * 1000
    return b"".join(parts)


def bytes_of(source: Any) -> bytes:
    return np.ascontiguousarray(torch.as_tensor(source).detach().numpy()).tobytes()


@pytest.mark.parametrize("only_torch", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_many_small_boxes_are_copied_exactly(
    monkeypatch: pytest.MonkeyPatch, seed: int, only_torch: bool
) -> None:
    r = random.Random(seed)
    sources = [random_tensor(r) for _ in range(3000)]
    if only_torch:
        sources = [s for s in sources if isinstance(s, torch.Tensor)]
    boxes = []
    for i, source in enumerate(sources):
        dtype, shape = str(source.dtype).removeprefix("torch."), tuple(source.shape)
        boxes.append(LeafBox(f"leaf{i}", dtype, shape, Box.whole(shape)))
    monkeypatch.setattr(images, "BLOCK_SIZE", 40_000)  # so that pieces end within boxes
    image = make_image(sources, boxes)
    found = copy_of(image)
    assert found[: len(image.header)] == image.header
    for source, start, end in zip(image.sources, image.box_starts, image.box_ends, strict=True):
        assert found[start:end] == bytes_of(source)
    monkeypatch.setattr(images, "_MANY_BOXES", 1 << 60)
    assert copy_of(image) == found


def test_the_python_calls_of_a_copy_do_not_grow_with_small_boxes() -> None:
    def count_calls(count: int) -> int:
        sources = [torch.full((8,), float(i)) for i in range(count)]
        boxes = [LeafBox(f"{i}", "float32", (8,), Box.whole((8,))) for i in range(count)]
        image, calls = make_image(sources, boxes), 0
        buffer = Buffer(image.length)

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(profile)
        try:
            image.copy_range(len(image.header), image.length, buffer, 0)
        finally:
            sys.setprofile(None)
        return calls

    count_calls(100)  # the first call creates the view of the memory
    assert count_calls(100) == count_calls(500) < 50
