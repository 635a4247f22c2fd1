"""Safetensors files read by range: equal to the safetensors library on good files, a sentence on bad ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from zeor.checkpoint.files import tensorfile
from zeor.checkpoint.files.tensorfile import Reader, read_header
from zeor.checkpoint.weights.hf_folder import find_tensors

TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).view(5, 7) / 3,
    "half": torch.arange(12, dtype=torch.float32).to(torch.bfloat16).view(3, 2, 2),
    "wide": torch.arange(5, dtype=torch.float64) / 7,
    "counts": torch.arange(6, dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(3.5, dtype=torch.float16),
    "nothing": torch.empty(0, 4),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "eight": torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def read(path: Path, name: str, start: int, numel: int) -> torch.Tensor:
    entry = read_header(path)[name]
    with Reader() as reader:
        pieces = [(done, piece.clone()) for done, piece in reader.pieces(entry, start, numel)]
        assert reader.read_nbytes == numel * entry.dtype.itemsize, "no byte more than asked for"
    assert [done for done, _ in pieces] == [sum(p.numel() for _, p in pieces[:i]) for i in range(len(pieces))]
    return torch.cat([piece for _, piece in pieces]) if pieces else torch.empty(0, dtype=entry.dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_and_shape_as_the_library_wrote_it(file):
    entries = read_header(file)
    assert sorted(entries) == sorted(TENSORS)
    with Reader() as reader:
        for name, wanted in TENSORS.items():
            found = reader.whole(entries[name])
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
            assert as_bytes(found) == as_bytes(wanted), name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([n for n, t in TENSORS.items() if t.numel()]), data=st.data())
def test_any_range_in_pieces_of_any_size(file, monkeypatch, name, data):
    total = TENSORS[name].numel()
    start = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - start))
    monkeypatch.setattr(tensorfile, "_PIECE_NBYTES", data.draw(st.integers(1, 64)))
    wanted = TENSORS[name].reshape(-1)[start : start + numel]
    assert as_bytes(read(file, name, start, numel)) == as_bytes(wanted)


# ---- bad files


def raw(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int = 0, end: int = 8, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


BAD = {
    "empty header": (b"", b"", None, "not a JSON object"),
    "not json": (b"{oops", b"", None, "not a JSON object"),
    "not utf-8": (b'{"\xff": 1}', b"", None, "not a JSON object"),
    "a list": (b"[1]", b"", None, "not a JSON object"),
    "deep": (b"[" * 100_000, b"", None, "not a JSON object"),
    "length beyond the file": (b"{}", b"", 1 << 40, "cut short or malformed"),
    "length of all ones": (b"{}", b"", (1 << 64) - 1, "cut short or malformed"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"x" * 8, None, "entry of 'a' lacks"),
    "negative": ({"a": entry(-8, 0)}, b"", None, "entry of 'a' lacks"),
    "a shape of words": ({"a": entry(shape=["two"])}, b"x" * 8, None, "entry of 'a' lacks"),
    "a shape of truths": ({"a": entry(shape=[True])}, b"x" * 8, None, "entry of 'a' lacks"),
    "unknown dtype": ({"a": entry(dtype="F3")}, b"x" * 8, None, "holds 'a' as 'F3'"),
    "dtype of a kind that cannot be": ({"a": entry(dtype=["F32"])}, b"x" * 8, None, "lacks a dtype"),  # type: ignore[arg-type]
    "shape and bytes differ": ({"a": entry(shape=(3,))}, b"x" * 8, None, "cannot take 8 bytes"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, None, "'b' overlaps its neighbour"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 20)}, b"x" * 20, None, "'b' overlaps its neighbour or leaves a gap"),
    "truncated": ({"a": entry()}, b"x" * 7, None, "is truncated"),
    "too long": ({"a": entry()}, b"x" * 9, None, "longer than its header says"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_file_is_named(tmp_path, case):
    header, data, length, text = BAD[case]
    path = raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(ValueError, match=text) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_refused(file, tmp_path_factory, cut):
    whole = file.read_bytes()
    short = tmp_path_factory.mktemp("cut") / "short.safetensors"
    short.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(ValueError, match=r"short\.safetensors"):
        read_header(short)


def test_a_file_that_shrinks_while_it_is_read(file):
    found = read_header(file)["bytes"]
    with open(file, "r+b") as handle:
        handle.truncate(found.begin + 3)
    with Reader() as reader, pytest.raises(ValueError, match="became shorter while it was read"):
        reader.whole(found)


# ---- folders


def index(folder: Path, files: Any, name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        find_tensors(path)
    return str(caught.value)


def test_a_folder_a_file_and_an_index_hold_the_same(tmp_path, file):
    assert find_tensors(file) == find_tensors(tmp_path)
    split = tmp_path / "split"
    (split / "sub").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, split / "one.safetensors")
    save_file({"b": torch.zeros(3)}, split / "sub" / "two.safetensors")
    path = index(split, {"a": "one.safetensors", "b": "sub/two.safetensors"})
    assert list(find_tensors(split)) == ["a", "b"] and find_tensors(path) == find_tensors(split)
    (tmp_path / "other").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "other" / "adapter_model.safetensors")
    assert list(find_tensors(tmp_path / "other")) == ["a"], "a folder with one file needs no name"


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "", "a\0b", ".."])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    path = index(tmp_path, {"a": name})
    assert refused(tmp_path) == f"{path} names the file {name!r}, which leads out of its folder; that is refused."


def test_what_is_wrong_with_an_index_is_said(tmp_path):
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    one = f"{tmp_path}/one.safetensors"
    assert refused(tmp_path) == f"{one} does not exist, though model.safetensors.index.json names it."
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    assert refused(tmp_path).startswith(f"{tmp_path}/one.safetensors does not hold 'b', though")
    for text in ("{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "\x00"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert "is malformed: it must be a JSON object whose 'weight_map' gives a file per tensor" in refused(tmp_path)


def test_a_folder_without_safetensors_says_what_it_holds(tmp_path):
    assert "does not exist; give a folder" in refused(tmp_path / "nowhere")
    assert f"{tmp_path} holds no safetensors file" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "holds only pytorch_model.bin, a pickle, which zeor does not load" in refused(tmp_path)
    assert "is not a safetensors file; zeor loads no pickle" in refused(tmp_path / "pytorch_model.bin")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    assert "several files (x.safetensors, y.safetensors); name the one to load" in refused(tmp_path)
