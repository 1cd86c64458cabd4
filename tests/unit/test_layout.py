"""Slices and boxes, with random sizes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropage.layout import ALIGN, Layout, boxes

sizes = st.integers(0, 5000)
worlds = st.integers(1, 9)


@given(sizes, worlds)
def test_slices_cover_everything_once_in_order(numel: int, world: int) -> None:
    layout = Layout(numel, world)
    bounds = [layout.bounds(rank) for rank in range(world)]
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    assert sum(layout.length(rank) for rank in range(world)) == numel


@given(sizes, worlds)
def test_slices_are_aligned_and_balanced(numel: int, world: int) -> None:
    layout = Layout(numel, world)
    for rank in range(world):
        low, high = layout.bounds(rank)
        assert low % ALIGN == 0 or low == numel
        assert high - low <= math.ceil(numel / world) + ALIGN


def test_a_rank_outside_the_world_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 3 is not one of 3 ranks"):
        Layout(10, 3).bounds(3)


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4)


@given(shapes, st.data())
def test_boxes_hold_the_flat_range_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    whole = torch.arange(numel).reshape(shape)
    found = boxes(shape, low, high)
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))].reshape(-1) for box in found
    ]
    assert torch.cat([*parts, torch.empty(0, dtype=torch.long)]).tolist() == list(range(low, high))
    assert all(box.numel for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)
