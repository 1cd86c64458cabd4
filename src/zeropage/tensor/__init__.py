"""The tensor face of a page: `PagedTensor`, and what every operator does when it meets one.

Only this package knows operators.
"""

from zeropage.tensor.base import Paged
from zeropage.tensor.deepspeed_view import ZeroParamStatus, ZeroParamType
from zeropage.tensor.identity import Life, check_parameter, differentiable, new_page_of, page_in_place
from zeropage.tensor.paged import PagedTensor, over

__all__ = [
    "Life",
    "Paged",
    "PagedTensor",
    "ZeroParamStatus",
    "ZeroParamType",
    "check_parameter",
    "differentiable",
    "new_page_of",
    "over",
    "page_in_place",
]
