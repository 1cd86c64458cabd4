"""Tensors as files: what `write_blob` writes is what `torch.load(weights_only=True)` reads, wherever it lies."""

from __future__ import annotations

import io

import pytest
import torch

from zeropage.checkpoint import blob
from zeropage.checkpoint.blob import pieces, write_blob

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip
SHAPES = [(), (0, 3), (7,), (3, 5), (2, 1, 4)]


class _Stream:
    """Only written to, never asked where it stands."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _written(*tensors: torch.Tensor) -> list[bytes]:
    stream, found = _Stream(), []
    for tensor in tensors:
        start = len(stream.data)
        write_blob(stream, tensor)
        found.append(bytes(stream.data[start:]))
    return found


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_reads_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    for data in _written(tensor, tensor):  # the second one does not begin where the stream does
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert (found.dtype, found.shape) == (dtype, tensor.shape) and _bits(found) == _bits(tensor)


def test_views_are_written_alone() -> None:
    whole = torch.arange(10_000.0).reshape(100, 100)
    for view in (whole[3:5], whole.t()[1:3], whole[:, ::50], whole[7, 9]):
        (data,) = _written(view)
        assert len(data) < 4 * view.numel() + 1500
        assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), view)


def test_the_same_tensor_gives_the_same_bytes() -> None:
    one, other = _written(torch.ones(5), torch.ones(5))
    assert one == other


def test_large_tensors_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob, "PIECE", 100)
    tensor = torch.arange(77.0)
    assert [len(piece) for piece in pieces(tensor)] == [100, 100, 100, 8]
    assert torch.equal(torch.load(io.BytesIO(_written(tensor)[0]), weights_only=True), tensor)
