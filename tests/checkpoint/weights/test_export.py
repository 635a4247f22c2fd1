"""zeor.export: others read it bit for bit, load_pretrained is its inverse, and nobody holds it whole."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from tests.checkpoint.weights.test_pretrained import tied
from zeor.access.sharded import state_of
from zeor.checkpoint.api import save
from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.weights.export import export
from zeor.checkpoint.weights.hf_folder import OutFiles, Planned, divide, parse_size
from zeor.checkpoint.weights.pretrained import load_pretrained
from zeor.memory.formats import cast_into


def read(folder: Path) -> dict[str, Tensor]:
    """As anyone would: by the index, or the one file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return safetensors.torch.load_file(folder / "model.safetensors")
    told = json.loads(index.read_text())
    found: dict[str, Tensor] = {}
    for name in sorted(set(told["weight_map"].values())):
        values = safetensors.torch.load_file(folder / name)
        assert {key for key, file in told["weight_map"].items() if file == name} == set(values)
        found.update(values)
    assert told["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    return found


def wanted(model: nn.Module) -> dict[str, Tensor]:
    """A plain model's state dict, tied tensors once."""
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    return {n: t.detach().clone() for n, t in state.items() if not (id(t) in seen or seen.add(id(t)))}


def assert_same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


# ---- live


def export_all(root: str) -> None:
    for stage in range(4):
        model = zeor.shard(tied(seed=5), stage=stage)
        returned = export(model, f"{root}/{stage}", max_file=200)
        assert returned == Path(f"{root}/{stage}")


@pytest.mark.parametrize("world", [1, 3])
def test_every_stage_writes_the_plain_models_state_dict(ranks, tmp_path: Path, world: int) -> None:
    ranks(export_all, world, str(tmp_path))
    for stage in range(4):
        folder = tmp_path / str(stage)
        assert_same(read(folder), wanted(tied(seed=5)))
        assert len(list(folder.glob("*.safetensors"))) > 3
    assert not list(tmp_path.glob(".*"))


def test_a_plain_process_loads_it_strictly_tied_names_included(ranks, tmp_path: Path) -> None:
    def one(out: str) -> None:
        export(zeor.shard(tied(seed=5), stage=3), out)

    ranks(one, 2, str(tmp_path / "out"))
    other = tied(seed=6)
    missing, unexpected = safetensors.torch.load_model(other, tmp_path / "out" / "model.safetensors", strict=True)
    assert not missing and not unexpected
    assert_same(wanted(other), wanted(tied(seed=5)))
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def there_and_back(root: str) -> dict[str, Tensor]:
    """Trained in bf16 with an fp32 master, exported, loaded elsewhere."""
    model = loops.net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, stage=3, precision="bf16")
    for step in range(3):
        loops.own_loss(model, step, torch.bfloat16).backward()
        optimizer.step()
        optimizer.zero_grad()
    export(model, f"{root}/live")
    export(model, f"{root}/live-bf16", dtype="bf16")
    save(f"{root}/saved", model, optimizer, step=3)
    again = zeor.shard(loops.net(torch.float32, seed=9), stage=2, precision="bf16")
    load_pretrained(again, f"{root}/live")
    before, after = dict(zeor.iter_full(model)), dict(zeor.iter_full(again))
    for name in before:
        assert torch.equal(before[name], after[name]), name
    return before


def test_load_pretrained_is_its_inverse_and_a_checkpoint_gives_the_same_bits(ranks, tmp_path: Path) -> None:
    values = ranks(there_and_back, 2, str(tmp_path))[0]
    assert all(value.dtype == torch.float32 for value in values.values())
    assert_same(read(tmp_path / "live"), values)
    assert not dist.is_initialized()
    export(tmp_path / "saved", tmp_path / "offline", max_file=100)
    assert_same(read(tmp_path / "offline"), values)
    for name, value in read(tmp_path / "live-bf16").items():
        cast = torch.empty(value.shape, dtype=torch.bfloat16)
        cast_into(cast, values[name])
        assert torch.equal(value, cast), name
    export(tmp_path / "saved", tmp_path / "offline-bf16", dtype=torch.bfloat16)
    assert_same(read(tmp_path / "offline-bf16"), read(tmp_path / "live-bf16"))


def widened(root: str) -> Any:
    """Parameters of bf16 with masters of fp32: asked for in fp32 they come from the masters."""
    model = loops.net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, stage=3)
    for step in range(3):
        loops.own_loss(model, step, torch.bfloat16).backward()
        optimizer.step()
        optimizer.zero_grad()
    export(model, f"{root}/own")
    export(model, f"{root}/fp32", dtype="fp32")
    save(f"{root}/saved", model, optimizer, step=3)


def test_a_wider_dtype_is_the_masters_own(ranks, tmp_path: Path) -> None:
    ranks(widened, 2, str(tmp_path))
    own, wide = read(tmp_path / "own"), read(tmp_path / "fp32")
    assert all(value.dtype == torch.bfloat16 for value in own.values())
    for name, value in wide.items():
        cast = torch.empty(value.shape, dtype=torch.bfloat16)
        cast_into(cast, value)
        assert value.dtype == torch.float32 and torch.equal(cast, own[name]), name
    assert any(not torch.equal(value, own[name].float()) for name, value in wide.items())
    export(tmp_path / "saved", tmp_path / "offline")
    export(tmp_path / "saved", tmp_path / "offline-fp32", dtype="fp32")
    assert_same(read(tmp_path / "offline"), own)
    assert_same(read(tmp_path / "offline-fp32"), wide)


def adapters(root: str) -> None:
    model = tied(seed=5)
    for param in model.parameters():
        param.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(True)
    model.blocks[1].up.bias.requires_grad_(True)
    optimizer = torch.optim.SGD([model.blocks[1].up.weight, model.blocks[1].up.bias], lr=0.1)
    zeor.shard(model, optimizer, stage=3)
    before = zeor.traffic(model)["bytes_sent"]
    export(model, f"{root}/live", trainable_only=True)
    sent = zeor.traffic(model)["bytes_sent"] - before
    assert sent <= 2 * (7 * 6 + 7) * 4 + 64  # two parameters, not the frozen rest
    save(f"{root}/saved", model, optimizer, step=0)


def test_trainable_only_writes_what_trains(ranks, tmp_path: Path) -> None:
    ranks(adapters, 2, str(tmp_path))
    full = wanted(tied(seed=5))
    right = {name: full[name] for name in ("blocks.1.up.weight", "blocks.1.up.bias")}
    assert_same(read(tmp_path / "live"), right)
    export(tmp_path / "saved", tmp_path / "offline", trainable_only=True)
    assert_same(read(tmp_path / "offline"), right)


def drop_in(out: str) -> None:
    model = tied(seed=5 + dist.get_rank())
    with torch.no_grad():
        for tensor, right in zip(model.state_dict().values(), tied(seed=5).state_dict().values()):
            tensor.copy_(right)
    export(model, out)


def test_a_plain_model_is_written_by_rank_zero(ranks, tmp_path: Path) -> None:
    ranks(drop_in, 2, str(tmp_path / "out"))
    assert_same(read(tmp_path / "out"), wanted(tied(seed=5)))
    export(tied(seed=5), tmp_path / "alone")
    assert_same(read(tmp_path / "alone"), wanted(tied(seed=5)))


# ---- memory


def peak(out: str) -> int:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    zeor.shard(model, stage=3)
    ledger = state_of(model).engine.ledger
    ledger.peak_nbytes = 0
    export(model, out, max_file=2 * 64 * 64 * 4)
    return ledger.peak_nbytes


def test_no_rank_holds_more_than_a_file(ranks, tmp_path: Path) -> None:
    peaks = ranks(peak, 2, str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 8
    assert all(0 < nbytes <= 2 * 64 * 64 * 4 for nbytes in peaks)


RSS = """
import resource, sys
from zeor.checkpoint.weights.export import export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(sys.argv[1], sys.argv[2], max_file="40MB")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
def test_an_export_from_a_checkpoint_takes_memory_for_a_batch_not_for_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))  # 384 MiB
    zeor.shard(model, stage=3)
    save(tmp_path / "saved", model, step=0)
    command = [sys.executable, "-c", RSS, str(tmp_path / "saved"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert int(done.stdout) * 1024 < 64 * 2**20 * 3.5  # a batch, what waits to be written, blocks read ahead
    assert sum(value.nbytes for value in read(tmp_path / "out").values()) == 24 * 2048 * 2048 * 4


# ---- transformers


LOADS = """
import sys, torch, transformers
assert "zeor" not in sys.modules
model, info = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
torch.manual_seed(0)
print(model.dtype, model(torch.arange(8)[None]).logits.double().sum().item())
"""


def llama(tie: bool) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tie, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def export_llama(root: str, tie: bool) -> float:
    model = llama(tie)
    expected = model(torch.arange(8)[None]).logits.double().sum().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3)
    export(model, f"{root}/live", max_file="10KB")
    save(f"{root}/saved", model, optimizer, step=0)
    return expected


@pytest.mark.long
@pytest.mark.parametrize("tie", [pytest.param(False, marks=pytest.mark.whole), True])
def test_transformers_loads_it_in_a_process_without_zeor(ranks, tmp_path: Path, tie: bool) -> None:
    expected = ranks(export_llama, 2, str(tmp_path), tie)[0]
    assert json.loads((tmp_path / "live" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert ("lm_head.weight" in read(tmp_path / "live")) is not tie
    export(tmp_path / "saved", tmp_path / "offline", config=tmp_path / "live")
    assert_same(read(tmp_path / "offline"), read(tmp_path / "live"))
    for folder in ("live", "offline"):
        command = [sys.executable, "-c", LOADS, str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        dtype, total = done.stdout.split()
        assert dtype == "torch.float32" and float(total) == expected


def test_the_config_names_the_dtype_that_was_written(tmp_path: Path) -> None:
    model = llama(tie=True)
    export(model, tmp_path / "bf16", dtype="bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "bf16" / "generation_config.json").is_file()
    export(model, tmp_path / "fp16", dtype="fp16", config=tmp_path / "bf16" / "config.json")
    assert json.loads((tmp_path / "fp16" / "config.json").read_text())["dtype"] == "float16"


# ---- what goes wrong


class FullDisk(Disk):
    def __init__(self, after: int):
        self.left = after

    def write(self, fd: int, parts: Any, position: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, parts, position)


def fail_on(out: str, writes: int) -> str:
    import zeor.checkpoint.weights.hf_folder as hf_folder

    model = zeor.shard(tied(seed=5), stage=3)
    kept, hf_folder.DISK = hf_folder.DISK, FullDisk(writes)
    try:
        export(model, out, max_file=200)
    except CheckpointError as error:
        return str(error)
    finally:
        hf_folder.DISK = kept
    return ""


@pytest.mark.parametrize("writes", [0, 6, 12, 22])
def test_a_full_disk_is_told_on_every_rank_and_leaves_nothing(ranks, tmp_path: Path, writes: int) -> None:
    said = ranks(fail_on, 2, str(tmp_path / "out"), writes)
    assert said[0] == said[1] and "No space left on device" in said[0] and str(tmp_path / "out") in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(loops.net(), tmp_path / "out")  # an empty one gives way
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        export(loops.net(seed=4), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    model = zeor.shard(loops.net(torch.float32), stage=3)
    path = save(tmp_path / "saved", model, step=0)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        export(tmp_path / "saved", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "float99"}, "dtype='float99' is not known"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not known"),
        ({"max_file": "5 bananas"}, "is not a size"),
        ({"config": "/nowhere"}, "cannot be read"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        export(loops.net(), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_other_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not a dict"):
        export({}, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="does not exist"):
        export(tmp_path / "nothing", tmp_path / "out")
    frozen = loops.net().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter trains"):
        export(frozen, tmp_path / "out", trainable_only=True)


# ---- the files


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(s) for s in (7, "5GB", "1.5 KiB", "10kb")] == [7, 5 * 10**9, 1536, 10**4]


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own() -> None:
    sizes = [3, 4, 20, 1, 8, 2]
    tensors = [Planned(str(i), torch.uint8, (n,)) for i, n in enumerate(sizes)]
    files = divide(tensors, 10)
    assert [[t.name for t in file] for file in files.values()] == [["0", "1"], ["2"], ["3", "4"], ["5"]]
    assert list(files) == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert list(divide(tensors, 100)) == ["model.safetensors"]


def test_tensors_may_be_put_in_any_order_and_in_parts(tmp_path: Path) -> None:
    values = {"a": torch.arange(6, dtype=torch.int8), "b": torch.randn(3, 2), "empty": torch.empty(0, 2)}
    planned = [Planned(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    files = OutFiles(tmp_path / "out", planned, 1000, {})
    files.begin()
    files.put("b", values["b"].view(-1)[2:], start=2)
    files.put("a", values["a"])
    files.put("b", values["b"].view(-1)[:2])
    files.commit()
    assert_same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), values)


def test_names_with_digits_that_are_no_numbers_are_exported_from_a_checkpoint(tmp_path: Path) -> None:
    """A raised 2 is a digit to Python and no number; an Arabic one is a letter here."""
    names = ["layer1\u00b2", "layer10", "layer2", "layer\u0663"]
    model = nn.Module()
    for number, name in enumerate(names):
        model.register_parameter(name, nn.Parameter(torch.full((3,), float(number))))
    path = save(tmp_path / "run", zeor.shard(model, stage=1), step=1)
    values = safetensors.torch.load_file(export(path, tmp_path / "out") / "model.safetensors")
    assert {name: value.tolist() for name, value in values.items()} == {
        name: [float(number)] * 3 for number, name in enumerate(names)
    }
