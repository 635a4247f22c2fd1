"""load_pretrained: sharded safetensors into sharded models, bit for bit, by slice, or one sentence on every rank."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import zeor
from tests import loops
from zeor.checkpoint.weights import pretrained

STAGES = [0, 1, 2, 3]


class Tied(nn.Module):
    """An embedding tied to a head across units, a frozen layer, persistent and other buffers, an integer parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(loops.Block(6) for _ in range(2))
        self.blocks[0].up.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.full((2,), 4.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.cache[0]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, 1)))


def tied(seed: int, dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.num_batches_tracked.fill_(seed)
        model.table.add_(seed)
    return model


def save_split(model: nn.Module, folder: Path, names: Callable[[str], str] = str) -> Path:
    """As save_pretrained does it: tied names once, one tensor per file or a few, and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[names(name)] = tensor.detach().clone()
    order, files = list(tensors), {}
    for number in range(0, len(order), 3):
        file = f"model-{number:05d}.safetensors"
        save_file({name: tensors[name] for name in order[number : number + 3]}, folder / file)
        files.update(dict.fromkeys(order[number : number + 3], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return dict(zeor.iter_full(model, buffers=True))


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), name


# ---- equal to plain loading


def check_load(folder: Path, stage: int, how: str, dtype: torch.dtype, precision: str | None) -> dict[str, Tensor]:
    if how == "meta":
        with zeor.on_meta():
            model = tied(7, dtype)
    else:
        model = tied(7, dtype)
    model = zeor.shard(model, stage=stage, precision=precision)
    assert zeor.load_pretrained(model, folder) == ([], [])
    assert model.head.weight is model.embed.weight
    if precision is None:
        assert model.eval()(torch.tensor([[1, 2], [3, 4]])).isfinite().all()
    return full_state(model)


@pytest.mark.parametrize("how", ["meta", "values"])
@pytest.mark.parametrize("stage, world", [(0, 2), (1, 3), (2, 2), (3, 1), (3, 2), (3, 4)])
def test_an_index_of_files_loads_as_plain_loading_does(ranks, tmp_path, stage, world, how):
    save_split(tied(1), tmp_path)
    plain = tied(7)
    plain.load_state_dict(tied(1).state_dict())
    for found in ranks(check_load, world, tmp_path, stage, how, torch.float32, None):
        assert_same(found, plain_state(plain))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted, precision", [(torch.float32, "bf16"), (torch.float32, "fp16"), (torch.float64, None)])
def test_dtypes_are_converted_through_the_master(ranks, tmp_path, saved, wanted, precision):
    save_split(tied(1, saved), tmp_path)
    plain = tied(7, wanted)
    plain.load_state_dict(tied(1, saved).state_dict())
    for stage in (1, 3):
        for found in ranks(check_load, 2, tmp_path, stage, "meta", wanted, precision):
            assert_same(found, plain_state(plain))


def check_masters(folder: Path, stage: int, precision: str) -> dict[str, Tensor]:
    """Loaded over trained values: what trains on is the file's, not the old master's."""
    model = loops.net(torch.float32, seed=8)
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision=precision)
    loss = lambda m, step: loops.own_loss(m, step, torch.float32).float()
    loops.train(model, optimizer, range(2), loss)
    zeor.load_pretrained(model, folder)
    loops.train(model, optimizer, range(2, 4), loss)
    return full_state(model)


def check_fresh(stage: int, precision: str) -> dict[str, Tensor]:
    model = loops.net(torch.float32, seed=9)
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision=precision)
    loops.train(model, optimizer, range(2, 4), lambda m, step: loops.own_loss(m, step, torch.float32).float())
    return full_state(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_loading_over_trained_values_refreshes_the_masters(ranks, tmp_path, stage, precision):
    save_file(loops.net(torch.float32, seed=9).state_dict(), tmp_path / "model.safetensors")
    found, wanted = ranks(check_masters, 2, tmp_path, stage, precision), ranks(check_fresh, 2, stage, precision)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_a_plain_model_with_values_or_on_meta_loads_too(tmp_path):
    save_split(tied(1), tmp_path)
    with zeor.on_meta():
        described = tied(7)
    objects = dict(described.named_parameters())
    for model in (tied(7), described):
        assert zeor.load_pretrained(model, tmp_path) == ([], [])
        assert_same(plain_state(model), plain_state(tied(1)))
    assert all(objects[name] is param for name, param in described.named_parameters())
    transposed = nn.Linear(6, 11, bias=False)
    transposed.weight = nn.Parameter(torch.zeros(6, 11).t())
    save_file({"weight": torch.arange(66.0).view(11, 6)}, tmp_path / "one.safetensors")
    zeor.load_pretrained(transposed, tmp_path / "one.safetensors")
    assert torch.equal(transposed.weight, torch.arange(66.0).view(11, 6))


# ---- names


def check_rename(folder: Path) -> dict[str, Tensor]:
    with zeor.on_meta():
        model = tied(7)
    model = zeor.shard(model)
    with pytest.raises(ValueError) as caught:
        zeor.load_pretrained(model, folder)
    assert "Pass rename=lambda name: name.removeprefix('model.'), or strict=False" in str(caught.value)
    zeor.load_pretrained(model, folder, rename=lambda name: name.removeprefix("model."))
    return full_state(model)


def test_rename_maps_the_files_names_and_the_error_suggests_it(ranks, tmp_path):
    save_split(tied(1), tmp_path, lambda name: f"model.{name}")
    for found in ranks(check_rename, 2, tmp_path):
        assert_same(found, plain_state(tied(1)))


def test_a_rename_that_is_wrong_is_told(tmp_path):
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.zeros(1)))
    for rename, text in (
        (lambda name: "a", "rename gives 'a' and 'b' of .* the same name 'a'"),
        (lambda name: 3, r"rename\('a'\) gave 3"),
        (lambda name: {}[name], "KeyError: 'a'"),
    ):
        with pytest.raises(ValueError, match=text):
            zeor.load_pretrained(model, tmp_path, rename=rename)
    zeor.load_pretrained(model, tmp_path, rename=lambda name: name if name == "a" else None)
    assert model.a.item() == 1.0


def check_misfits(folder: Path, stage: int) -> list[Any]:
    model = zeor.shard(loops.net(torch.float32), stage=stage)
    before = full_state(model)
    with pytest.raises(ValueError) as caught:
        zeor.load_pretrained(model, folder)
    assert_same(full_state(model), before)
    loaded = zeor.load_pretrained(model, folder, strict=False)
    after = full_state(model)
    assert bool((after["head.weight"] == 3).all()) and torch.equal(after["head.bias"], before["head.bias"])
    return [str(caught.value), loaded.missing_keys, loaded.unexpected_keys]


@pytest.mark.parametrize("stage", STAGES)
def test_missing_and_extra_names_raise_once_on_every_rank_and_change_nothing(ranks, tmp_path, stage):
    state = {name: tensor for name, tensor in loops.net(torch.float32).state_dict().items() if name != "head.bias"}
    state["head.weight"].fill_(3)
    extra = {f"extra.{number:02d}": torch.ones(1) for number in range(12)}
    save_file({**state, **extra}, tmp_path / "model.safetensors")
    for text, missing, unexpected in ranks(check_misfits, 2, tmp_path, stage):
        names = ", ".join(repr(name) for name in list(extra)[:10])
        assert text == (
            f"{tmp_path} does not fit the model; 1 missing: 'head.bias'; 12 unexpected: {names} and 2 more. Pass "
            "rename= to map the file's names to the model's, or strict=False to load what fits."
        )
        assert missing == ["head.bias"] and sorted(unexpected) == list(extra)


def check_shapes(folder: Path) -> list[str]:
    model = zeor.shard(loops.net(torch.float32))
    before, texts = full_state(model), []
    for strict in (True, False):
        with pytest.raises(ValueError) as caught:
            zeor.load_pretrained(model, folder, strict=strict)
        texts.append(str(caught.value))
    assert_same(full_state(model), before)
    return texts


def test_another_shape_or_kind_of_number_always_raises(ranks, tmp_path):
    state = loops.net(torch.float32).state_dict()
    state["head.weight"] = state["head.weight"].t().contiguous()
    state["blocks.1.up.bias"] = state["blocks.1.up.bias"].to(torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    for text in itertools.chain(*ranks(check_shapes, 2, tmp_path)):
        assert text == (
            f"{tmp_path} does not fit the model; 2 of another kind: 'blocks.1.up.bias' is torch.int8 in the file and "
            "torch.float32 in the model, 'head.weight' has shape (6, 5) in the file and (5, 6) in the model. Load the "
            "files of this very architecture."
        )


def check_new_head(folder: Path, stage: int, eager: bool) -> dict[str, Tensor]:
    with zeor.on_meta():
        model = loops.net(torch.float32)
    model = zeor.shard(model, stage=stage)
    loaded = zeor.load_pretrained(model, folder, strict=False)
    assert loaded.missing_keys == ["head.weight", "head.bias"]
    with pytest.raises(RuntimeError, match=r"'head\.weight' was on the meta device"):
        model(torch.zeros(1, 6))
    zeor.init_parameters(model, seed=5, missing_only=True, eager=eager)
    return full_state(model)


def check_whole_model(stage: int) -> dict[str, Tensor]:
    with zeor.on_meta():
        model = loops.net(torch.float32)
    model = zeor.shard(model, stage=stage)

    def init(module: nn.Module) -> None:
        if module is model:
            model.scale.fill_(0.0)  # Net has no initialiser of its own

    zeor.init_parameters(model, seed=5, init=init)
    return full_state(model)


def without_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.startswith("head")}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_new_head_on_loaded_weights(ranks, tmp_path, stage):
    """A stream by position knows seed and name alone: the head is as if all of the model had been drawn."""
    loaded = without_head(loops.net(torch.float32).state_dict())
    save_file(loaded, tmp_path / "model.safetensors")
    (drawn,) = ranks(check_whole_model, 1, 3)
    assert not torch.equal(drawn["head.weight"], loops.net(torch.float32).head.weight)
    for found in ranks(check_new_head, 2, tmp_path, stage, False):
        assert_same(found, {**drawn, **loaded})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_new_head_drawn_as_a_plain_module_draws_it(ranks, tmp_path, stage):
    loaded = without_head(loops.net(torch.float32).state_dict())
    save_file(loaded, tmp_path / "model.safetensors")
    torch.manual_seed(5)
    head = nn.Linear(6, 5)
    wanted = {**loaded, "head.weight": head.weight.detach(), "head.bias": head.bias.detach()}
    for found in ranks(check_new_head, 2, tmp_path, stage, True):
        assert_same(found, wanted)


# ---- bad files, on one rank or all


def spoil(folder: Path, how: str) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    if how == "truncated":
        first.write_bytes(first.read_bytes()[:-1])
    elif how == "missing":
        first.unlink()
    elif how == "header":
        first.write_bytes(b"\xff" * 64)
    elif how == "outside":
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(first.name, "../" + first.name))


def check_bad(folders: list[Path], stage: int) -> str:
    """Each rank reads a folder of its own, as with local disks."""
    model = zeor.shard(loops.net(torch.float32), stage=stage)
    before = full_state(model)
    with pytest.raises(ValueError) as caught:
        zeor.load_pretrained(model, folders[dist.get_rank()])
    assert_same(full_state(model), before)
    return str(caught.value)


@pytest.mark.parametrize("how, text", [
    ("truncated", "is truncated: its header describes"), ("missing", "does not exist, though"),
    ("header", "its header is cut short or malformed"), ("outside", "leads out of its folder; that is refused"),
])  # fmt: skip
@pytest.mark.parametrize("where", ["rank 1", "every rank"])
def test_a_bad_file_on_any_rank_raises_on_every_rank_naming_it(ranks, tmp_path, how, text, where):
    folders = [save_split(loops.net(torch.float32), tmp_path / name) for name in ("zero", "one")]
    for folder in folders if where == "every rank" else folders[1:]:
        spoil(folder, how)
    texts = ranks(check_bad, 2, folders, 3)
    assert len(set(texts)) == 1 and text in texts[0]
    assert texts[0].startswith(f"On rank 1: {folders[1]}" if where == "rank 1" else str(folders[0]))


def test_ranks_that_see_other_files_are_told(ranks, tmp_path):
    folders = [tmp_path / "zero", tmp_path / "one"]
    for folder, dtype in zip(folders, (torch.float32, torch.float16)):
        save_split(loops.net(dtype), folder)
    texts = ranks(check_bad, 2, folders, 3)
    assert len(set(texts)) == 1 and "The ranks' files to load differ: rank 0 has scale: (), torch.float32" in texts[0]


def check_late_failure(folder: Path, stage: int) -> str:
    """A disk that fails on rank 1 after the headers were read: nobody hangs, nothing counts as filled."""
    with zeor.on_meta():
        model = loops.net(torch.float32)
    model = zeor.shard(model, stage=stage)
    plain = pretrained.Reader._fill

    def fails(self: Any, entry: Any, position: int, raw: Tensor) -> None:
        if dist.get_rank() == 1 and self.read_nbytes > 100:
            raise ValueError(f"{entry.path} cannot be read: Input/output error.")
        plain(self, entry, position, raw)

    pretrained.Reader._fill = fails  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError) as caught:
            zeor.load_pretrained(model, folder)
    finally:
        pretrained.Reader._fill = plain  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="has no values yet"):
        model(torch.zeros(1, 6))
    zeor.load_pretrained(model, folder)
    assert_same(full_state(model), loops.values(loops.net(torch.float32)))
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_a_read_that_fails_half_way_on_one_rank_raises_on_all_and_can_be_repeated(ranks, tmp_path, stage):
    save_split(loops.net(torch.float32), tmp_path)
    texts = ranks(check_late_failure, 2, tmp_path, stage)
    assert len(set(texts)) == 1 and texts[0].startswith(f"On rank 1: {tmp_path}/model-")
    assert texts[0].endswith("Input/output error. The model is partly loaded: load again, or discard it.")


def test_loading_inside_full_params_is_refused(tmp_path):
    model = zeor.shard(loops.net())
    with zeor.full_params(model), pytest.raises(RuntimeError, match=r"cannot load inside zeor\.full_params"):
        zeor.load_pretrained(model, tmp_path)


# ---- bytes

WIDTH, LAYERS = 1024, 16  # 4 MiB a layer, 64 MiB in all


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def peak_rss_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def check_memory(folder: Path) -> tuple[int, int]:
    """Growth of this process, at its peak, from before the model is built until it is loaded; and bytes read."""
    counted: list[int] = []
    plain = pretrained.Reader.__exit__
    pretrained.Reader.__exit__ = lambda self, *args: (counted.append(self.read_nbytes), plain(self, *args))[1]
    zeor.shard(nn.Linear(2, 2))  # groups and threads are there
    zeor.load_pretrained(nn.Linear(2, 2), folder / "small.safetensors")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at what there is
    before = peak_rss_nbytes()
    try:
        with zeor.on_meta():
            model = Stack()
        model = zeor.shard(model)
        zeor.load_pretrained(model, folder)
    finally:
        pretrained.Reader.__exit__ = plain  # type: ignore[method-assign]
    growth = peak_rss_nbytes() - before
    first = next(zeor.iter_full(model))[1]
    assert bool((first == 0.25).all())
    return growth, counted[-1]


@pytest.mark.long
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux's count of a process's peak")
def test_a_rank_grows_by_its_slice_and_at_most_the_largest_tensor(ranks, tmp_path):
    tensor_nbytes = WIDTH * WIDTH * 4
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "small.safetensors")
    files = {}
    for number in range(LAYERS):
        name = f"model-{number}.safetensors"
        save_file({f"layers.{number}.weight": torch.full((WIDTH, WIDTH), 0.25)}, tmp_path / name)
        files[f"layers.{number}.weight"] = name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    slice_nbytes = LAYERS * tensor_nbytes // 4
    for growth, read in ranks(check_memory, 4, tmp_path):
        assert read == slice_nbytes, "each rank reads the bytes of its own part"
        assert growth <= slice_nbytes + tensor_nbytes + (2 << 20), f"{growth / 2**20:.1f} MiB"


# ---- transformers


def llama_config(tie: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tie,
    )  # fmt: skip


def check_llama(folder: Path, tie: bool, out: Path) -> list[float]:
    from transformers import LlamaForCausalLM

    with zeor.on_meta():
        model = LlamaForCausalLM(llama_config(tie))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = zeor.shard(model, optimizer, stage=3)
    zeor.load_pretrained(model, folder)
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert_same(full_state(model), plain_state(plain))
    tokens = torch.arange(12).view(2, 6)
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with zeor.full_params(model):
        if dist.get_rank() == 0:
            model.save_pretrained(out)
        wanted = plain_state(model)
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(out)
    assert_same(plain_state(again), wanted)
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)
    return losses


@pytest.mark.long
@pytest.mark.parametrize("tie", [False, True])
def test_a_saved_llama_loads_trains_and_is_saved_again_by_its_own_save_pretrained(ranks, tmp_path, tie):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(tie)).save_pretrained(tmp_path / "in", max_shard_size="4KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    first, second = ranks(check_llama, 2, tmp_path / "in", tie, tmp_path / "out")
    assert first == second and first[1] < first[0]
