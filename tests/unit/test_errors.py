"""The exception tree: one root, the built-in classes that callers may expect, and the drawing of it."""

import re

import pytest

from zeropage import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_all_names_every_class_in_order():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert errors.__all__ == sorted(defined)


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_a_zeropage_error_with_a_sentence(error):
    assert issubclass(error, errors.ZeropageError)
    assert error.__doc__ and error.__doc__.endswith(".") and "\n" not in error.__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.TransportUnavailableError, errors.ConfigError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.PeerTimeoutError, TimeoutError),
        (errors.PeerTimeoutError, errors.PeerLostError),
        (errors.UnsupportedOperationError, NotImplementedError),
        (errors.UnsupportedOperationError, errors.PageError),
        (errors.NonFiniteError, ArithmeticError),
    ],
)
def test_an_error_can_be_caught_as_the_kind_of_failure_it_is(error, builtin):
    with pytest.raises(builtin, match="why"):
        raise error("why")


def test_the_drawing_shows_the_tree():
    parents: list[str] = []
    for bars, name in re.findall(r"^    ((?: [x|] )*?(?: x )?)([A-Z]\w+Error)", errors.__doc__, re.MULTILINE):
        depth = len(bars) // 3
        drawn = getattr(errors, name)
        if depth:
            assert getattr(errors, parents[depth - 1]) in drawn.__bases__
        parents[depth:] = [name]
    assert all(name in errors.__doc__ for name in errors.__all__)
