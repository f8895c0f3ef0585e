"""Our reader and writer against the safetensors package, and every damaged file refused by what is wrong."""

import json

import numpy as np
import pytest
import torch
from checkpoints import DTYPES, assert_same, noise, raw, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardalg import InvalidMapError, UnsupportedError
from shardalg.interop._safetensors import (
    HEADER_BOUND,
    create,
    header_bytes,
    lay_out,
    mapped,
    read_header,
    write_at,
)


def write_ours(path, its, metadata=None):
    shapes = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in its.items()]
    file = lay_out(path, shapes, metadata)
    create(file)
    for e in file.entries:
        write_at(file.path, e.begin, its[e.name])
    return file


def read_ours(path):
    return {e.name: mapped(str(path), e) for e in read_header(path).entries}


def test_reads_what_the_package_writes(tmp_path):
    save_file(tensors(), tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert_same(read_ours(tmp_path / "x.safetensors"), tensors())
    assert read_header(tmp_path / "x.safetensors").metadata == (("format", "pt"),)


def test_the_package_reads_what_we_write(tmp_path):
    file = write_ours(tmp_path / "x.safetensors", tensors(), {"format": "pt"})
    assert_same(load_file(file.path), tensors())
    assert read_header(file.path) == file


def test_both_write_the_same_bytes(tmp_path):
    its = {n: t for n, t in tensors().items() if n.startswith("layer")}
    save_file(its, tmp_path / "theirs.safetensors")
    write_ours(tmp_path / "ours.safetensors", its)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(max_examples=12)
@given(st.dictionaries(st.text(min_size=1), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=4))
def test_any_names_shapes_and_dtypes(tmp_path_factory, described):
    described.pop("__metadata__", None)
    its = {n: noise(shape, d, k) for k, (n, (d, shape)) in enumerate(described.items())}
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    write_ours(path, its)
    assert_same(read_ours(path), its)


def test_a_file_that_exists_is_not_written_over(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_ours(tmp_path / "x", tensors())
    assert (tmp_path / "x").read_text() == "mine"


def test_writing_to_a_mapped_tensor_leaves_the_file(tmp_path):
    write_ours(tmp_path / "x", {"a": torch.zeros(4)})
    read_ours(tmp_path / "x")["a"].fill_(1)
    assert read_ours(tmp_path / "x")["a"].sum() == 0


def test_tensors_that_are_not_aligned_are_read(tmp_path):
    x = torch.arange(4.0).reshape(2, 2)
    header = {
        "b": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [3, 19]},
    }
    damaged(tmp_path / "x", header, bytes(3) + raw(x).numpy().tobytes())
    found = read_ours(tmp_path / "x")["x"]
    assert found.data_ptr() % 4 and torch.equal(found, x) and torch.equal(found[:, 1].clone(), x[:, 1])


def test_a_slice_of_a_tensor_larger_than_memory_is_read(tmp_path):
    """Mapped, not read: the file has 256 GiB, all holes but one row."""
    file = lay_out(tmp_path / "x", [("w", "float32", (1 << 22, 1 << 14))])
    row = np.arange(1 << 14, dtype=np.float32)
    with open(file.path, "wb") as out:
        out.write(header_bytes(file))
        out.truncate(file.size)
    write_at(file.path, file.entries[0].begin + (7 << 16), torch.from_numpy(row))
    found = mapped(file.path, read_header(file.path).entries[0])
    assert torch.equal(found[7], torch.from_numpy(row))


# --- damage -------------------------------------------------------------------------------


def damaged(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ONCE = b'"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
TWICE = b"{" + ONCE + b"," + ONCE + b"}"

DAMAGE = {
    "a hole before a tensor": ({"w": entry(offsets=(4, 12))}, bytes(12), "leaves a hole"),
    "overlapping tensors": ({"v": entry(), "w": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
    "a name twice": (TWICE, bytes(1), "names 'w' twice"),
    "bytes at the end": ({"w": entry()}, bytes(9), "longer than its header says"),
    "cut in the data": ({"w": entry()}, bytes(7), "truncated: the last tensor ends at byte .*, the file at"),
    "sizes that do not add up": ({"w": entry(shape=(3,))}, bytes(8), "needs 12 bytes, .* hold 8"),
    "an unknown dtype": ({"w": entry(dtype="F23")}, bytes(8), "unknown dtype 'F23'; known are"),
    "a negative size": ({"w": entry(shape=(-2,))}, bytes(8), "negative extent"),
    "an absurd size": ({"w": entry(shape=(2**40, 2**40))}, bytes(8), r"more than 2\*\*62"),
    "a size that is no number": ({"w": entry(shape=(True,))}, bytes(8), "must be an integer, got True"),
    "a shape that is no list": ({"w": entry() | {"shape": 2}}, bytes(8), "not a list of sizes"),
    "a negative offset": ({"w": entry(offsets=(-8, 0))}, bytes(8), "not two counts of bytes"),
    "an unknown field": ({"w": entry() | {"strides": [1]}}, bytes(8), "must have exactly"),
    "a missing field": ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), "must have exactly"),
    "text that is no JSON": (b"{'w'", b"", "is not JSON"),
    "text that is no UTF-8": (b"\xff\xfe", b"", "is not JSON"),
    "JSON that is no object": ([1], b"", "JSON list, not an object"),
    "a size of 5000 digits": (
        b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
        bytes(4),
        "is not JSON",
    ),
    "offsets of 4300 digits": (
        b'{"w": {"dtype": "F32", "shape": [0], "data_offsets": ['
        + b"9" * 4300
        + b", "
        + b"9" * 4300
        + b"]}}",
        b"",
        "not two counts of bytes",
    ),
    "nesting without end": (b"[" * 100_000, b"", "is not JSON"),
    "metadata that is no text": ({"__metadata__": {"step": 1}}, b"", "map words to words"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused(tmp_path, what):
    header, data, words = DAMAGE[what]
    path = damaged(tmp_path / "x", header, data)
    with pytest.raises(InvalidMapError, match=words) as refusal:
        read_header(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    "size, words", [(0, "starts with 8 bytes, this one has 0"), (5, "has 5"), (40, "truncated")]
)
def test_a_truncated_file_is_refused(tmp_path, size, words):
    save_file({"w": torch.arange(3)}, tmp_path / "whole")
    (tmp_path / "x").write_bytes((tmp_path / "whole").read_bytes()[:size])
    with pytest.raises(InvalidMapError, match=words):
        read_header(tmp_path / "x")


def test_every_truncation_is_refused(tmp_path):
    save_file({"w": torch.arange(3), "v": torch.ones(2)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    read_header(tmp_path / "whole")
    for size in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:size])
        with pytest.raises(InvalidMapError):
            read_header(tmp_path / "x")


def test_an_absurd_header_is_refused_before_it_is_read(tmp_path):
    path = damaged(tmp_path / "x", b"{}", length=HEADER_BOUND + 1)
    with pytest.raises(
        InvalidMapError, match=f"claims {HEADER_BOUND + 1} bytes, more than the {HEADER_BOUND}"
    ):
        read_header(path)


def test_elements_of_half_a_byte_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="F4"):
        read_header(damaged(tmp_path / "x", {"w": entry("F4", (2,), (0, 1))}, bytes(1)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidMapError, match="no such file"):
        read_header(tmp_path / "nowhere")
