"""Safetensors headers, the plan of an export, and the runs of a box: what is pure in `zeropage.weights`."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropage.checkpoint.parts import runs, split
from zeropage.errors import CheckpointError
from zeropage.layout import Box
from zeropage.weights.header import DTYPES, encode, read_header
from zeropage.weights.plan import plan_files, size_of
from zeropage.weights.source import find_source

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int8), "c": torch.empty(0, 5)}


def _file(path: Path, header: object, values: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return path


def _about(begin: int, end: int, shape: list[int] | None = None, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    found = read_header(path)
    raw = path.read_bytes()
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        entry = found[name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (value.dtype, tuple(value.shape), value.nbytes)
        assert raw[entry.start : entry.start + entry.nbytes] == value.numpy().tobytes()


def test_the_library_reads_every_dtype_that_is_written(tmp_path: Path) -> None:
    described = {f"ü{name}": (dtype, (3,)) for name, dtype in DTYPES.items()}
    head, entries = encode(described)
    length = len(head) + sum(entry.nbytes for entry in entries.values())
    path = tmp_path / "x.safetensors"
    path.write_bytes(head.ljust(length, b"\0"))
    assert read_header(path) == entries
    found = safetensors.torch.load_file(path)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in found.items()} == described


WRONG: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{what", b"", "is damaged"),
    "a list": (b"[1]", b"", "not an object"),
    "a name twice": (b'{"a":1,"a":2}', b"", "twice"),
    "no text": (b"\xff\xfe\xff", b"", "damaged"),
    "no description": ({"a": 7}, b"", "'a' is damaged"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "'a' is damaged"),
    "negative size": ({"a": _about(0, 8, [-2])}, bytes(8), "'a' is damaged"),
    "size true": ({"a": _about(0, 4, [True])}, bytes(4), "'a' is damaged"),
    "dtype not known": ({"a": _about(0, 8, dtype="F4")}, bytes(8), "dtype 'F4'"),
    "offsets too wide": ({"a": _about(0, 12)}, bytes(12), "takes 8 bytes, and its offsets span 12"),
    "backwards": ({"a": _about(8, 0)}, bytes(8), "span -8"),
    "a hole": ({"a": _about(0, 8), "b": _about(12, 20)}, bytes(20), "'b' begins at byte 12 .* not at 8"),
    "overlap": ({"a": _about(0, 8), "b": _about(4, 12)}, bytes(12), "'b' begins at byte 4 .* not at 8"),
    "cut off": ({"a": _about(0, 8)}, bytes(7), "cut off"),
    "too long": ({"a": _about(0, 8)}, bytes(9), "has .* bytes and its header describes"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_file_is_said(wrong: str, tmp_path: Path) -> None:
    header, values, words = WRONG[wrong]
    path = _file(tmp_path / "x.safetensors", header, values)
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{words}"):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 0), struct.pack("<Q", 3) + b"{}"]
)
def test_heads_that_are_too_short_or_too_long(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "only files beside the index"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "only files beside the index"),
        ({"weight_map": {"a": ".."}}, "only files beside the index"),
        ({"weight_map": {"a": ""}}, "only files beside the index"),
        ({"weight_map": {"a": 5}}, "only files beside the index"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors cannot be read"),
        ({"weight_map": {"z": "x.safetensors"}}, "says that 'z' is in x.safetensors"),
        ({"weight_map": [1]}, "damaged"),
        ({}, "damaged"),
        (None, "damaged"),
    ],
)
def test_indices_that_are_wrong(index: object, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    for place in (tmp_path, folder):
        safetensors.torch.save_file(TENSORS, place / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        find_source(folder)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        find_source(tmp_path)
    safetensors.torch.save_file(TENSORS, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"it has other\.safetensors: name the file itself"):
        find_source(tmp_path)
    assert find_source(tmp_path / "other.safetensors").places.keys() == TENSORS.keys()
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_source(tmp_path / "nowhere")


@st.composite
def _box(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    low = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - first)) for n, first in zip(shape, low, strict=True)]
    return shape, Box(tuple(low), tuple(size))


@given(_box(), st.integers(1, 50))
def test_runs_are_the_elements_of_a_box_in_order(shape_and_box: tuple[tuple[int, ...], Box], most: int) -> None:
    shape, box = shape_and_box
    numbers = torch.arange(math.prod(shape)).view(shape)
    inside = numbers[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))].flatten().tolist()
    assert [first + i for first, numel in runs(shape, box) for i in range(numel)] == inside
    parts = list(split(box, most))
    assert all(0 < part.numel <= most for part in parts)
    assert [first + i for part in parts for first, numel in runs(shape, part) for i in range(numel)] == inside


def test_an_empty_box_has_no_parts() -> None:
    assert list(split(Box((3,), (0,)), 5)) == []


@given(
    st.dictionaries(
        st.text(min_size=1), st.tuples(st.sampled_from(list(DTYPES.values())), st.integers(0, 40)), max_size=9
    ),
    st.integers(1, 200),
    st.randoms(),
)
def test_a_plan_holds_everything_once_and_does_not_depend_on_order(tensors, limit: int, random) -> None:
    described = {name: (dtype, (numel,)) for name, (dtype, numel) in tensors.items()}
    plan = plan_files(described, limit)
    shuffled = list(described)
    random.shuffle(shuffled)
    assert plan_files({name: described[name] for name in shuffled}, limit) == plan
    assert sorted(name for file in plan.files for name in file.entries) == sorted(described)
    for file in plan.files:
        assert len(file.entries) <= 1 or file.nbytes - len(file.head) <= limit
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries.values())
    assert (plan.index is None) == (len(plan.files) == 1)


def test_sizes() -> None:
    found = [size_of(text) for text in ("5GB", "1.5 kb", "2MiB", "7", 8, "9B", "1TB")]
    assert found == [5 * 10**9, 1500, 2 << 20, 7, 8, 9, 10**12]
