"""More than ten thousand mutated manifests and files: refused with zeor's own error before anything changed, or loaded
in every bit; no other exception, no code run, no file outside opened, no memory beyond the checkpoint's size."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zeor
from tests.checkpoint.mutants import ABSURD, mutated_bytes, mutated_tree, places, signed, signed_text
from tests.checkpoint.test_reshard import make, steps
from zeor.access.sharded import state_of
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files import manifest as manifests
from zeor.checkpoint.files.errors import CheckpointError

PARSED, RAW, SIGNED, DAMAGED, HEADERS = 7000, 300, 1500, 400, 900
assert PARSED + RAW + SIGNED + DAMAGED + HEADERS >= 10_000
# `make test` takes a fifth of them.
SHARES = [pytest.param(5, id="a fifth"), pytest.param(1, id="all", marks=pytest.mark.whole)]
MOST_GROWTH_NBYTES = 256 << 20


def write_base(folder: str) -> str:
    model, optimizer, scheduler = make(2)
    steps(model, optimizer, scheduler, range(2))
    extra = {"scheduler": scheduler, "tensor": torch.arange(40.0), "note": ("a", [1, {"b": float("nan")}])}
    return str(save(folder, model, optimizer, step=2, extra=extra))


def values(model: Any, optimizer: Any) -> dict[str, Any]:
    """Parameters and the optimizer's state, of whatever kind it is, whole."""
    segments = state_of(model).steppers[0].segments
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        found.update({f"{name}/{key}": value for key, value in segments.whole(param).items()})
    with zeor.full_params(model):
        found.update({name: param.detach().clone() for name, param in model.named_parameters()})
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


class Watch(TorchDispatchMode):
    """What is done while a checkpoint is loaded: no tensor larger than it, no file but its own, no code."""

    _watching: Watch | None = None
    _hooked = False

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__()
        self.folder, self.nbytes = str(folder), nbytes
        self.seen: list[str] = []
        if not Watch._hooked:
            sys.addaudithook(Watch._hear)
            Watch._hooked = True

    @staticmethod
    def _hear(event: str, args: tuple[Any, ...]) -> None:
        self = Watch._watching
        if self is None:
            return
        if event in ("pickle.find_class", "exec", "os.system", "subprocess.Popen", "os.exec", "import"):
            self.seen.append(f"{event} {str(args)[:200]}")
        if event == "open" and isinstance(args[0], (str, bytes)):
            name = args[0].decode() if isinstance(args[0], bytes) else args[0]
            if not name.startswith((self.folder, "/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup")):
                self.seen.append(f"open {name}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "empty" in str(func) or "zeros" in str(func):
            size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            dtype = (kwargs or {}).get("dtype") or torch.float32
            if torch.Size(size).numel() * dtype.itemsize > self.nbytes:
                self.seen.append(f"{func} {size}")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Watch:
        Watch._watching = self
        return super().__enter__()

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        Watch._watching = None


class Target:
    """A folder with a checkpoint to spoil, and a run to load it into."""

    def __init__(self, path: Path, copied: Path) -> None:
        self.path = Path(shutil.copytree(path, copied / path.name))
        self.files = {file.name: file.read_bytes() for file in self.path.iterdir()}
        self.body = json.loads(self.files[manifests.NAME])["manifest"]
        self.nbytes = sum(map(len, self.files.values()))
        self.model, self.optimizer, self.scheduler = make(1, seed=8)
        self.groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in self.groups_now()])
        load(self.path, self.model, self.optimizer)
        self.truth = {key: copy.deepcopy(value) for key, value in values(self.model, self.optimizer).items()}
        self.watch = Watch(self.path, self.nbytes)
        self.refused = self.loaded = 0

    def groups_now(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def put(self, **changed: bytes) -> None:
        for name, data in {**self.files, **{k.replace("__", "."): v for k, v in changed.items()}}.items():
            if (self.path / name).read_bytes() != data:
                (self.path / name).write_bytes(data)

    def attempt(self) -> dict[str, Any] | None:
        """What the run holds after a load; None where it was refused, and nothing has changed."""
        before = str(self.scheduler.state_dict())
        try:
            with self.watch:
                load(self.path, self.model, self.optimizer, extra={"scheduler": self.scheduler})
        except CheckpointError as error:
            assert str(error).strip() and str(self.scheduler.state_dict()) == before
            self.refused += 1
            found = values(self.model, self.optimizer)
            assert found.keys() == self.truth.keys()
            assert all(equal(value, self.truth[key]) for key, value in found.items())
            return None
        finally:
            assert self.watch.seen == []
        self.loaded += 1
        return values(self.model, self.optimizer)

    def restore(self) -> None:
        """The run as it was, after a load of something else."""
        for group, old in zip(self.groups_now(), self.groups):
            for key in [key for key in group if key not in old and key != "params"]:
                del group[key]
            group.update(copy.deepcopy(old))
        self.put()
        load(self.path, self.model, self.optimizer)


@pytest.fixture(scope="module")
def target(ranks, tmp_path_factory) -> Target:
    root = tmp_path_factory.mktemp("fuzz")
    path = ranks(write_base, 2, str(root / "base"))[0]
    return Target(Path(path), root)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_GROWTH_NBYTES


def parse(data: bytes) -> manifests.Manifest | None:
    try:
        return manifests.parse(data, "it")
    except CheckpointError:
        return None


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
def test_manifests_damaged_or_made_with_intent_parse_or_are_refused(target: Target, share: int) -> None:
    count = PARSED // share
    source, where = random.Random(1), list(places(target.body))
    plain, passed = target.files[manifests.NAME], 0
    for number in range(count):
        if number % 5 == 0:
            assert parse(mutated_bytes(plain, source)) is None
            continue
        body = target.body
        for _ in range(source.choice([1, 1, 1, 2, 5])):
            body, _path = mutated_tree(body, source, list(places(body)) if body is not target.body else where)
        found = parse(signed(body))
        if found is not None:
            passed += 1
            held = sum(file.nbytes for file in found.files)
            assert sum(tensor.nbytes for tensor in found.tensors) <= held
    assert 0 < passed < count // 2


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
def test_a_manifest_changed_in_any_byte_is_refused_by_load(target: Target, share: int) -> None:
    count = RAW // share
    source = random.Random(2)
    for _ in range(count):
        target.put(manifest__json=mutated_bytes(target.files[manifests.NAME], source))
        assert target.attempt() is None
    target.restore()


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
def test_a_manifest_made_with_intent_is_refused_or_loads_the_same_tensors(target: Target, share: int) -> None:
    count = SIGNED // share
    source, where = random.Random(3), list(places(target.body))
    target.refused = target.loaded = 0
    for _ in range(count):
        body, path = mutated_tree(target.body, source, where)
        target.put(manifest__json=signed(body))
        found = target.attempt()
        if found is None:
            continue
        for key, value in target.truth.items():
            if "/" not in key or (path[0] != "state" and path[0] != "tensors"):
                assert equal(found[key], value), (key, path)
            elif "exp_avg" in key and isinstance(found.get(key), Tensor) and path[0] != "state":
                assert torch.equal(found[key], value), (key, path)
        target.restore()
    assert target.refused > count // 4 and target.loaded > count // 20


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
def test_a_file_changed_in_any_byte_is_refused(target: Target, share: int) -> None:
    count = DAMAGED // share
    source = random.Random(4)
    names = [name for name in target.files if name.endswith(".safetensors")]
    for _ in range(count):
        name = source.choice(names)
        target.put(**{name.replace(".", "__"): mutated_bytes(target.files[name], source)})
        assert target.attempt() is None
    target.restore()


def what_files_say(target: Target, body: Any) -> dict[str, Tensor]:
    """The parameters as the safetensors library reads them."""
    files = [safetensors.torch.load((target.path / file["name"]).read_bytes()) for file in body["files"]]
    found = {}
    for stored in manifests.parse(signed(body), "it").tensors:
        if stored.role == "param":
            found[stored.name] = torch.empty(stored.shape)
            for piece in stored.pieces:
                found[stored.name][piece.box.slices()] = files[piece.file][stored.key(piece.box)]
    return found


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
def test_headers_made_with_intent_are_refused_or_mean_what_safetensors_reads(target: Target, share: int) -> None:
    count = HEADERS // share
    source = random.Random(5)
    target.refused = target.loaded = 0
    for _ in range(count):
        number = source.randrange(len(target.body["files"]))
        name = target.body["files"][number]["name"]
        data = target.files[name]
        length = int.from_bytes(data[:8], "little")
        if source.random() < 0.3:
            data = mutated_bytes(data[: 8 + length], source) + data[8 + length :]
        else:
            header = json.loads(data[8 : 8 + length])
            header, _path = mutated_tree(header, source, list(places(header)))
            text = json.dumps(header).encode()
            data = len(text).to_bytes(8, "little") + text + data[8 + length :]
        body = copy.deepcopy(target.body)
        body["files"][number] |= {"nbytes": len(data), "blocks": [manifests.digest(data)]}
        target.put(manifest__json=signed(body), **{name.replace(".", "__"): data})
        found = target.attempt()
        if found is not None:
            for key, value in what_files_say(target, body).items():
                assert torch.equal(found[key], value), key
            target.restore()
    assert target.refused > count // 2


# ---- by name


def refused(target: Target, data: bytes, words: str) -> None:
    target.put(manifest__json=data)
    with pytest.raises(CheckpointError, match=words):
        load(target.path, target.model, target.optimizer)
    target.restore()


def test_the_same_key_twice_is_refused(target: Target) -> None:
    text = json.dumps(target.body, sort_keys=True, separators=(",", ":"))
    assert text.count('"step":2,') >= 1
    head, tail = text.split('"step":2,', 1)
    refused(target, signed_text(f'{head}"step":2,"step":2,{tail}'.encode()), "does not match its own hash")
    refused(target, target.files[manifests.NAME].replace(b'{"hash"', b'{"hash":"","hash"', 1), "does not match its own")


def test_deep_nesting_is_refused(target: Target) -> None:
    for depth in (1000, 200_000):
        refused(target, b'{"hash":"","manifest":' + b"[" * depth + b"]" * depth + b"}\n", "manifest")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..safetensors", ""])
def test_a_path_out_of_the_folder_is_refused(target: Target, name: str) -> None:
    body = copy.deepcopy(target.body)
    body["files"][0]["name"] = name
    refused(target, signed(body), "malformed")


def test_a_link_to_another_file_is_refused(target: Target, tmp_path: Path) -> None:
    file = target.path / target.body["files"][0]["name"]
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=file.name):
        load(target.path, target.model, target.optimizer)
    file.unlink()
    elsewhere.rename(file)
    target.restore()


def test_absurd_sizes_cost_nothing(target: Target) -> None:
    """Of a tensor, of a file that is sparse, of blocks."""
    name = target.body["files"][0]["name"]
    body = copy.deepcopy(target.body)
    body["tensors"][0] |= {"shape": [2**50], "pieces": [[0, [0], [2**50]]]}
    refused(target, signed(body), "is said to hold")
    body = copy.deepcopy(target.body)
    body["block_nbytes"] = 2**50
    body["files"][0]["nbytes"] = 2**40
    with contextlib.suppress(OSError), open(target.path / name, "r+b") as file:
        file.truncate(2**40)
    target.files[name], kept = b"", target.files[name]
    (target.path / manifests.NAME).write_bytes(signed(body))
    with pytest.raises(CheckpointError, match="block_nbytes"):
        load(target.path, target.model, target.optimizer)
    target.files[name] = kept
    (target.path / name).write_bytes(kept)
    target.restore()


@pytest.mark.parametrize("pieces", [[], [[0, [0], [7]], [0, [0], [7]]], [[0, [1], [7]]], [[9, [0], [7]]], [[0, [0]]]])
def test_pieces_that_overlap_or_leave_gaps_are_refused(target: Target, pieces: list[Any]) -> None:
    body = copy.deepcopy(target.body)
    entry = next(tensor for tensor in body["tensors"] if tensor["shape"] == [7])
    entry["pieces"] = pieces
    refused(target, signed(body), "malformed")


def test_very_many_pieces_are_looked_at_quickly(target: Target) -> None:
    count = 20_000
    body = copy.deepcopy(target.body)
    body["tensors"][0] |= {"shape": [1, count], "pieces": [[0, [0, i], [1, 1]] for i in range(count)]}
    refused(target, signed(body), "is said to hold")


@pytest.mark.parametrize("key", [["exp_avg", 2**40], [0], [], "exp_avg", ["exp_avg", "x"], [["exp_avg"]], None])
def test_a_place_in_an_optimizer_that_cannot_be_is_refused(target: Target, key: Any) -> None:
    body = copy.deepcopy(target.body)
    scalars = body["state"]["optimizers"][0]["scalars"]
    scalars["head.weight"].append([key, 1])
    refused(target, signed(body), "no place in an optimizer's state")


@pytest.mark.parametrize("setting", [("lr", "fast"), ("lr", [1]), ("params", [1]), ("param_names", None)])
def test_a_setting_that_cannot_be_is_refused(target: Target, setting: tuple[str, Any]) -> None:
    body = copy.deepcopy(target.body)
    body["state"]["optimizers"][0]["groups"][0]["settings"][setting[0]] = setting[1]
    refused(target, signed(body), "of a group cannot be")


def test_absurd_values_are_of_every_kind() -> None:
    kinds = {type(None), bool, int, float, str, list, dict}
    assert {type(value) for value in ABSURD} == kinds
