"""The readahead predictor: what it learns, how fast, and that it never invents a page."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from zeropage.trace import REACH, Trace

pages = st.integers(0, 9)
orders = st.lists(pages, min_size=2, max_size=24).filter(lambda order: len(set(order)) > 1)


def touch_all(trace, order):
    for page in order:
        trace.touch(page)


def upcoming(sequence, present, count):
    """The next distinct pages of `sequence`, without the present one."""
    others = dict.fromkeys(page for page in sequence if page != present)
    return list(itertools.islice(others, count))


def test_nothing_is_predicted_of_the_unknown():
    trace = Trace()
    assert trace.predict(3) == []
    touch_all(trace, [1, 2, 3])
    assert trace.predict(3) == []


def test_a_repeated_order_is_known_from_its_first_touch_on():
    trace = Trace()
    touch_all(trace, [1, 2, 3, 4, 1])
    assert trace.predict(3) == [2, 3, 4]
    assert trace.predict(2) == [2, 3]
    assert trace.predict(0) == []


def test_repeats_of_the_present_page_are_one_touch():
    trace = Trace()
    touch_all(trace, [1, 1, 1, 2, 2, 1, 1])
    assert len(trace) == 3
    assert trace.predict(5) == [2]


@given(orders, st.integers(1, 3))
def test_a_periodic_order_is_predicted_perfectly_after_two_periods(order, count):
    trace = Trace()
    touch_all(trace, order * 2)
    for position, page in enumerate(order):
        trace.touch(page)
        ahead = (order * 3)[position + 1 : position + 1 + min(len(order), REACH * count)]
        assert trace.predict(count) == upcoming(ahead, page, count)


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(1, 4))
@example([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 7, 6], 2)
def test_two_orders_that_alternate_are_learnt(train, evaluate, count):
    trace = Trace()
    touch_all(trace, (train + evaluate) * 2)
    both = train + evaluate
    for position, page in enumerate(both):
        trace.touch(page)
        assert trace.predict(count) == upcoming((both * 3)[position + 1 : position + 1 + 16], page, count)


def test_alternation_is_learnt_through_a_common_beginning_longer_than_a_search_looks_back():
    common = list(range(200))
    train, evaluate = [*common, 1000], [*common, 2000]
    trace = Trace()
    for order in (train, evaluate) * 2:
        for page in order:
            trace.touch(page)
            trace.predict(2)
    touch_all(trace, common)
    assert trace.predict(1) == [1000]


def test_a_surprise_costs_one_guess_only():
    trace = Trace()
    step = list(range(20))
    touch_all(trace, step * 3)
    touch_all(trace, [0, 1, 2, 10])
    assert trace.predict(2) == [11, 12]
    touch_all(trace, [99])
    assert trace.predict(2) == []
    touch_all(trace, [5])
    assert trace.predict(2) == [6, 7]


@given(st.lists(st.tuples(pages, st.integers(0, 5)), max_size=200), st.integers(1, 40))
def test_only_pages_seen_before_are_predicted_each_once_whatever_is_forgotten(touches, capacity):
    trace, seen = Trace(capacity), set()
    for page, count in touches:
        trace.touch(page)
        seen.add(page)
        predicted = trace.predict(count)
        assert set(predicted) <= seen - {page}
        assert len(predicted) == len(set(predicted)) <= count
        assert len(trace) < 2 * capacity or capacity == 1


@given(orders)
def test_forgetting_old_touches_keeps_the_prediction(order):
    trace = Trace(capacity=100)
    touch_all(trace, order * 60)
    touch_all(trace, order[:1])
    assert trace.predict(3) == upcoming(order[1:] + order[:1], order[0], 3)


def test_clear_forgets_everything():
    trace = Trace()
    touch_all(trace, [1, 2, 1])
    trace.clear()
    assert len(trace) == 0
    trace.touch(1)
    assert trace.predict(2) == []
