"""Pickles made with intent: every name a file may use, with what a crafted file would do to it. Nothing runs, no memory
but the file's is read, and honest files come over in every bit."""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zeor.checkpoint.files.errors import CheckpointError
from zeor.tools.importers import inert, torchfile, unpickle
from zeor.tools.importers.command import import_checkpoint

MULTIARRAY = np._core.multiarray


class Call:
    """Pickles as a call of any function, with any state for what comes out."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None):
        self._parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self._parts


def forged_kind(code: str = "O8", flags: int = 0) -> Call:
    return Call(np.dtype, code, False, True, state=(3, "|", None, None, None, -1, -1, flags))


def array(kind: Any, raw: Any, shape: Any = (1,)) -> Call:
    return Call(MULTIARRAY._reconstruct, np.ndarray, (0,), b"b", state=(1, shape, kind, False, raw))


def saved(value: Any, protocol: int = 4) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    return file


def read(value: Any, protocol: int = 4) -> Any:
    return unpickle.read_torch(saved(value, protocol), "it", True)


# ---- by the tool itself, in its own process: these ended it with a segmentation fault


FORGED = {
    "a list of forged objects": lambda: Call(list, array(forged_kind(), b"A" * 8)),
    "a tuple of forged objects": lambda: Call(tuple, array(forged_kind(), b"A" * 8)),
    "a forged object": lambda: Call(MULTIARRAY.scalar, forged_kind(), b"A" * 8),
    "an array beyond its bytes": lambda: array(Call(np.dtype, "f8", False, True), b"A" * 8, (1 << 40,)),
    "a kind that is larger than it says": lambda: array(
        Call(np.dtype, "V8", False, True, state=(3, "|", None, None, None, 1 << 30, 1, 0)), b"A" * 8
    ),
}


def test_forged_numpy_objects_do_nothing(tmp_path: Path) -> None:
    """One process for each would take long; the first that got through would end it."""
    state = {name: make() for name, make in FORGED.items() if name != "an array beyond its bytes"}
    torch.save({"weight": torch.arange(3.0), "forged": state}, tmp_path / "forged.pt", pickle_protocol=4)
    _, found = import_checkpoint("torch", tmp_path / "forged.pt", tmp_path / "out", allow_pickle=True)
    assert list(found.params) == ["weight"]


@pytest.mark.parametrize("name", FORGED)
def test_each_forged_numpy_object_is_a_stand_in_or_refused(name: str) -> None:
    try:
        found = read({"x": FORGED[name]()})["x"]
    except unpickle.RefusedError as error:
        assert "it is refused: it holds a numpy array of shape" in str(error) and name == "an array beyond its bytes"
    else:
        assert isinstance(found, inert.StandIn)


# ---- every name


ABSURD: list[Any] = [(), (1 << 62,), ("a", "b"), (b"x" * 10, "zip"), ([[]],), (None, None, None), (-1,), ({},) * 7]


@pytest.mark.parametrize("module, name", sorted(inert._KNOWN))
def test_what_a_name_means_is_of_this_project_and_cannot_be_changed(module: str, name: str) -> None:
    found = inert.Unpickler(io.BytesIO()).find_class(module, name)
    if isinstance(found, torch.dtype):
        return
    owner = found if isinstance(found, type) else type(found)
    assert owner.__module__ == "zeor.tools.importers.inert"
    before = dict(vars(owner))
    for state in ({"__call__": len, "items": len}, (None, {"__call__": len, "_call": len, "dtype": len})):
        program = f"c{module}\n{name}\n".encode() + pickle.dumps(state, 2)[2:-1] + b"b."
        with pytest.raises((inert.RefusedError, TypeError, AttributeError)):
            inert.Unpickler(io.BytesIO(program)).load()
    assert vars(owner) == before
    for arguments in ABSURD:
        for opcode in (b"R", b"\x81"):  # a call, and an object without its constructor
            program = b"\x80\x02" + f"c{module}\n{name}\n".encode() + pickle.dumps(arguments, 2)[2:-1] + opcode + b"."
            try:
                made = inert.settled(inert.Unpickler(io.BytesIO(program)).load())
            except (inert.RefusedError, TypeError, ValueError, pickle.UnpicklingError):
                continue
            assert not callable(made) and (
                made is None
                or type(made) in (dict, tuple, frozenset, bytes, complex, str, list, int)
                or type(made).__module__ == "zeor.tools.importers.inert"
                or isinstance(made, inert.StandIn)
            ), made


@pytest.mark.parametrize(
    "module, name",
    [
        ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "getattr"),
        ("builtins", "__import__"),
        ("numpy", "ndarray"), ("torch", "load"), ("torch.storage", "_load_from_bytes"), ("torch.jit", "load"),
        ("torch.serialization", "_get_layout"), ("torch", "device"), ("torch.nn.parameter", "Parameter"),
        ("collections", "OrderedDict.fromkeys"), ("copyreg", "_reconstructor"), ("functools", "partial"),
        ("torch.distributed.checkpoint.metadata", "torch"), ("torch.distributed.checkpoint.metadata", "os.system"),
        ("zeor.tools.importers.inert", "Function"), ("numpy.core.multiarray", "fromfile"),
    ],
)  # fmt: skip
def test_any_other_name_is_a_stand_in(module: str, name: str) -> None:
    found = inert.Unpickler(io.BytesIO()).find_class(module, name)
    assert isinstance(found, type) and issubclass(found, inert.StandIn)
    made = found("a", b=1)
    made.__setstate__({"a": 1})
    made["a"] = 1
    made.append(1)
    assert type(made) is found and not hasattr(made, "__dict__")


def test_an_attribute_named_like_a_method_stays_behind() -> None:
    """A state dict's own `_metadata` too."""
    given = Call(collections.OrderedDict, [["a", 1], ["b", 2]], state={"items": len, "_metadata": {}})
    found = read({"state": given}, 2)["state"]
    assert type(found) is dict and list(found.items()) == [("a", 1), ("b", 2)]


# ---- tensors by numbers alone


def zipped(program: bytes, data: bytes = b"\1" * 16, **more: Any) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", more.get("compress", zipfile.ZIP_STORED)) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", more.get("byteorder", "little"))
        if "storage" not in more:
            archive.writestr("archive/data/0", data)
    return file


class Told(pickle.Pickler):
    """Writes a storage as whatever is told of it."""

    def persistent_id(self, value: Any) -> Any:
        return value.parts if isinstance(value, Parts) else None


class Parts:
    def __init__(self, *parts: Any):
        self.parts = parts


def program(parts: tuple[Any, ...], *place: Any) -> bytes:
    file = io.BytesIO()
    Told(file, 2).dump({"x": Call(torch._utils._rebuild_tensor_v2, Parts(*parts), *place)})
    return file.getvalue()


FLOATS = ("storage", torch.FloatStorage, "0", "cpu", 4)


def test_a_tensor_made_by_hand_is_read() -> None:
    found = unpickle.read_torch(zipped(program(FLOATS, 1, (2,), (2,), False, {})), "it", True)["x"]
    assert torch.equal(found, torch.frombuffer(bytearray(b"\1" * 16), dtype=torch.float32)[[1, 3]])


@pytest.mark.parametrize(
    "parts, place, words",
    [
        (("storage", torch.FloatStorage, "0", "cpu", 1 << 40), (0, (1,), (1,)), "which holds 16 bytes"),
        (("storage", torch.FloatStorage, "0", "cpu", 5), (0, (1,), (1,)), "which holds 16 bytes"),
        (("storage", torch.FloatStorage, "0", "cpu", -4), (0, (1,), (1,)), "malformed storage"),
        (("storage", torch.FloatStorage, "0", "cpu", "4"), (0, (1,), (1,)), "malformed storage"),
        (("storage", torch.FloatStorage, "../x", "cpu", 4), (0, (1,), (1,)), "lacks the record"),
        (("storage", torch.FloatStorage, 0, "cpu", 4), (0, (1,), (1,)), "malformed storage"),
        (("module", "x"), (0, (1,), (1,)), "malformed storage"),
        (FLOATS, (4, (1,), (1,)), "last element is number 4 of a storage of 4"),
        (FLOATS, (-1, (1,), (1,)), "no numbers of elements"),
        (FLOATS, (0, (5,), (1,)), "last element is number 4"),
        (FLOATS, (0, (2, 2), (1 << 61, 1)), "last element"),
        (FLOATS, (0, (2,), (-1,)), "no numbers of elements"),
        (FLOATS, (0, (2,), ()), "malformed tensor"),
        (FLOATS, (0, (1 << 40,), (0,)), "over a storage of 4"),
        (FLOATS, (0, (True,), (1,)), "no numbers of elements"),
        (FLOATS, (0, (1,) * 100, (1,) * 100), "without a shape"),
        (FLOATS, (1 << 63, (1,), (1,)), "no numbers of elements"),
    ],
)
def test_a_tensor_beyond_its_file_is_refused(parts: Any, place: Any, words: str) -> None:
    file = zipped(program(parts, *place, False, {}))
    with pytest.raises(unpickle.RefusedError, match=f"^it is refused: it .*{words}"):
        unpickle.read_torch(file, "it", True)


def test_a_zip_file_made_with_intent_is_refused(tmp_path: Path) -> None:
    good = program(FLOATS, 0, (1,), (1,), False, {})
    for file, words in (
        (zipped(good, compress=zipfile.ZIP_DEFLATED), "is compressed"),
        (zipped(good, byteorder="big"), "another order of bytes"),
        (zipped(good, storage=None), "lacks the record"),
    ):
        with pytest.raises(unpickle.RefusedError, match=words):
            unpickle.read_torch(file, "it", True)
        (tmp_path / "file.pt").write_bytes(file.getvalue())
        with pytest.raises(unpickle.RefusedError, match=words):
            unpickle.read_torch(tmp_path / "file.pt", "it", True)


def test_torchs_safe_loader_reads_no_memory_beyond_a_file(tmp_path: Path) -> None:
    """Without --allow-pickle: a record that is shorter than the pickle says."""
    parts = ("storage", torch.FloatStorage, "0", "cpu", 1 << 20)
    file = zipped(program(parts, 0, (1 << 20,), (1,), False, collections.OrderedDict()))
    (tmp_path / "short.pt").write_bytes(file.getvalue())
    with pytest.raises(CheckpointError, match=r"short\.pt could not be read"):
        import_checkpoint("torch", tmp_path / "short.pt", tmp_path / "out")


def test_a_tree_without_end_is_refused(tmp_path: Path) -> None:
    value: Any = [1, 2]
    for _ in range(40):
        value = [value, value]
    over = unpickle.HandOver()
    over._count = unpickle._MOST_VALUES - 1000
    with pytest.raises(unpickle.RefusedError, match="more than 20,000,000 values"):
        over.plain(read({"x": value})["x"])


def test_a_process_that_reads_starts_no_other() -> None:
    for event in ("os.system", "subprocess.Popen", "os.fork", "socket.connect"):
        with pytest.raises(unpickle.RefusedError, match=event):
            unpickle._stay_alone(event, ())
    unpickle._stay_alone("open", ("x",))


# ---- honest files


class Config:
    def __init__(self) -> None:
        self.rank, self.betas = 3, (0.9, 0.95)


def honest() -> dict[str, Any]:
    base = torch.arange(24.0)
    return {
        "tensors": [base.view(4, 6), base.view(4, 6).t(), base[3:9:2], torch.zeros(0, 3), torch.tensor(2.5)],
        "kinds": [torch.arange(4).to(kind) for kind in (
            torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
            torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64)],
        "expanded": torch.ones(1).expand(5), "parameter": nn.Parameter(torch.arange(3.0)),
        "numpy": [np.arange(6, dtype=np.float32).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)),
                  np.arange(3, dtype=">i4"), np.array([True, False]), np.array(2.5), np.zeros((0, 2))],
        "numbers": [np.float64(0.1), np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("warm"), 1, 2.5, None],
        "rng": np.random.get_state(),
        "plain": {"a": (1, [2, {"b": "c"}]), 3: b"\xff\0", "nan": math.inf, "size": torch.Size((2, 3)), "none": b""},
        "sets": [{1, 2}, frozenset({3})], "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, x=[1]), "dtype": torch.bfloat16, "complex": 1 + 2j,
        "args": Config(), "device": torch.device("cuda", 1),
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("how", ["zip", "path", "before"])
def test_honest_files_come_over_in_every_bit(tmp_path: Path, protocol: int, how: str) -> None:
    given = honest()
    if how == "before":  # that format knows fewer kinds
        given["kinds"] = given["kinds"][:9]
    torch.save(given, tmp_path / "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=how != "before")
    source: Any = tmp_path / "x.pt" if how == "path" else io.BytesIO((tmp_path / "x.pt").read_bytes())
    found = unpickle.read_torch(source, "it", True)
    for kind in ("tensors", "kinds"):
        for one, other in zip(found[kind], given[kind], strict=True):
            assert one.dtype == other.dtype and one.stride() == other.stride() and same_bits(one, other)
    assert torch.equal(found["expanded"], torch.ones(5)) and torch.equal(found["parameter"], torch.arange(3.0))
    for one, other in zip(found["numpy"], given["numpy"], strict=True):
        assert np.array_equal(one.numpy(), other) and one.numpy().dtype == other.dtype.newbyteorder("=")
    assert found["numbers"] == [0.1, 0.5, -3, True, "warm", 1, 2.5, None]
    assert [type(value) for value in found["numbers"][:5]] == [float, float, int, bool, str]
    assert torch.equal(found["rng"][1].long(), torch.from_numpy(given["rng"][1].astype(np.int64)))
    assert found["plain"] == given["plain"] and found["sets"] == [{1, 2}, {3}] and found["complex"] == 1 + 2j
    assert found["counter"] == {"a": 2, "b": 1} and found["default"] == {"x": [1]} and found["dtype"] == torch.bfloat16
    assert type(found["args"]).__name__ == "Config" and isinstance(found["device"], inert.StandIn)
    assert found["tensors"][0].data_ptr() == found["tensors"][1].data_ptr()  # still one memory


def same_bits(one: Tensor, other: Tensor) -> bool:
    return bytes(one.contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
        other.contiguous().view(-1).view(torch.uint8).numpy()
    )


def test_what_torch_reads_safely_reads_the_same_here(tmp_path: Path) -> None:
    """A training checkpoint of plain PyTorch, without and with --allow-pickle."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    one, other = (unpickle.read_torch(tmp_path / "x.pt", "it", allow) for allow in (False, True))
    assert list(one["model"]) == list(other["model"])
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
    assert str(one["optimizer"]) == str(other["optimizer"])


def test_a_storage_is_made_of_bytes_wherever_they_lie() -> None:
    data = bytearray(range(64))
    for begin in (0, 16, 17):
        found = torchfile._bytes_of(data, begin, begin + 8)
        assert found.tolist() == list(range(begin, begin + 8))
    assert torchfile._bytes_of(data, 5, 5).numel() == 0
