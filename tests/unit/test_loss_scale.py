"""The loss scale's arithmetic: growth, tolerance, halving, the floor, and what a checkpoint keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropage.errors import CheckpointError
from zeropage.loss_scale import LARGEST, DynamicLossScale


def feed(scale, verdicts):
    for found_nonfinite in verdicts:
        scale.update(found_nonfinite)


def test_a_window_of_clean_steps_doubles_the_scale():
    scale = DynamicLossScale(scale=8, window=3)
    feed(scale, [False] * 2)
    assert scale.scale == 8
    feed(scale, [False])
    assert scale.scale == 16


def test_an_overflow_starts_the_window_again():
    scale = DynamicLossScale(scale=8, window=3)
    feed(scale, [False, False, True, False, False])
    assert scale.scale == 8
    feed(scale, [False])
    assert scale.scale == 16


def test_hysteresis_is_the_overflow_from_which_on_the_scale_is_halved():
    scale = DynamicLossScale(scale=64, window=100, hysteresis=3)
    feed(scale, [True, False, True])
    assert scale.scale == 64
    feed(scale, [True])
    assert scale.scale == 32
    feed(scale, [False, True])
    assert scale.scale == 16


def test_a_full_clean_window_restores_the_tolerance():
    scale = DynamicLossScale(scale=64, window=2, hysteresis=2)
    feed(scale, [True, False, False])
    assert scale.scale == 128
    feed(scale, [True])
    assert scale.scale == 128
    feed(scale, [True])
    assert scale.scale == 64


def test_the_scale_never_falls_below_the_minimum_and_says_when_it_is_exhausted():
    scale = DynamicLossScale(scale=4, hysteresis=1, min=2.0)
    feed(scale, [True])
    assert (scale.scale, scale.exhausted) == (2, False)
    feed(scale, [True])
    assert (scale.scale, scale.exhausted) == (2, True)
    feed(scale, [False])
    assert not scale.exhausted


def test_a_static_scale_never_moves():
    scale = DynamicLossScale(scale=128, window=1, hysteresis=1, dynamic=False)
    feed(scale, [True, True, False, False])
    assert (scale.scale, scale.exhausted) == (128, False)
    scale.load_state_dict({"scale": 2.0, "clean_steps": 0, "tolerance": 0})
    assert scale.scale == 128


def test_the_scale_stays_within_float32():
    scale = DynamicLossScale(scale=LARGEST / 2, window=1)
    feed(scale, [False] * 10)
    assert scale.scale == LARGEST


@given(
    st.lists(st.booleans(), max_size=60),
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_a_resumed_scale_goes_on_as_if_uninterrupted(before, after, window, hysteresis):
    settings = {"scale": 256.0, "window": window, "hysteresis": hysteresis, "min": 0.5}
    uninterrupted, resumed = DynamicLossScale(**settings), DynamicLossScale(**settings)
    feed(uninterrupted, before)
    resumed.load_state_dict(uninterrupted.state_dict())
    feed(uninterrupted, after)
    feed(resumed, after)
    assert resumed.state_dict() == uninterrupted.state_dict()
    assert uninterrupted.scale >= 0.5


def test_an_incomplete_state_is_refused():
    with pytest.raises(CheckpointError, match="clean_steps, tolerance"):
        DynamicLossScale().load_state_dict({"scale": 2.0})
