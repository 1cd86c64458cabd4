"""What the requests of a round have in common."""

from __future__ import annotations

import pytest

from zeropage.transport.requests import Kind, Part, Request, wanted_by_all

A, B, C = (1, 11), (2, 22), (3, 33)
ONCE: Part = (0, 0.5, 0)


def _gather(*pages: tuple[int, int]) -> Request:
    return Request(Kind.GATHER, pages=pages)


def _add(*wishes: tuple[tuple[int, int], Part]) -> Request:
    return Request(Kind.ADD, pages=tuple(page for page, _ in wishes), parts=tuple(part for _, part in wishes))


def test_pages_that_all_ask_for_in_any_order() -> None:
    assert wanted_by_all([_gather(A, B), _gather(C, B, A)]) == {(A, None), (B, None)}


def test_one_that_asks_and_one_that_adds_have_nothing_in_common() -> None:
    assert wanted_by_all([_gather(A), _add((A, ONCE))]) == set()


@pytest.mark.parametrize("other", [(1, 0.5, 0), (0, 0.25, 0), (0, 0.5, 1)], ids=["epoch", "scale", "dtype"])
def test_parts_are_added_alike_or_apart(other: Part) -> None:
    assert wanted_by_all([_add((A, ONCE), (B, ONCE)), _add((A, other), (B, ONCE))]) == {(B, ONCE)}


def test_a_page_named_twice_stays_with_messages() -> None:
    assert wanted_by_all([_add((A, ONCE), (A, ONCE)), _add((A, ONCE))]) == set()
