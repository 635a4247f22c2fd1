"""`zeor import`: checkpoints of others become zeor's, values bit for bit, and no pickle runs anything."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from tests.checkpoint.test_reshard import everything
from tests.checkpoint.weights.test_pretrained import tied
from zeor.checkpoint.api import load
from zeor.checkpoint.files.errors import CheckpointError
from zeor.tools import cli
from zeor.tools.importers import unpickle
from zeor.tools.importers.command import import_checkpoint

STEPS = 3


def adamw(model: nn.Module, groups: bool = False) -> torch.optim.AdamW:
    if not groups:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)


def trained(groups: bool = False) -> tuple[nn.Module, torch.optim.AdamW]:
    model = loops.net()
    optimizer = adamw(model, groups)
    loops.train(model, optimizer, range(STEPS))
    return model, optimizer


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What `everything` gives, of a plain run."""
    found = loops.values(model)
    for name, param in model.named_parameters():
        found.update({f"{name}/{key}": torch.as_tensor(value).clone() for key, value in optimizer.state[param].items()})
    return found


def resume(folder: str, stage: int, groups: bool) -> Any:
    """Load into another run, and go on."""
    model = loops.net(seed=9)
    model, optimizer = zeor.shard(model, adamw(model, groups), stage=stage)
    loaded = load(folder, model, optimizer)
    at_load = everything(model, optimizer)
    loops.train(model, optimizer, range(STEPS, STEPS + 2), loops.own_loss)
    settings = [{key: group[key] for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    return loaded.step, at_load, everything(model, optimizer), settings


def assert_resumes(ranks: Any, folder: Path, model: nn.Module, optimizer: Any, groups: bool = False) -> None:
    """At another world and stage: everything as it was, and then as plain PyTorch goes on."""
    step, at_load, at_end, settings = ranks(resume, 2, str(folder), 3, groups)[0]
    right = whole(model, optimizer)
    assert step == STEPS and at_load.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(at_load[name], value.to(at_load[name].dtype)), name
    loops.train(model, optimizer, range(STEPS, STEPS + 2))
    for name, value in whole(model, optimizer).items():
        torch.testing.assert_close(at_end[name], value.to(at_end[name].dtype), **loops.TIGHT)
    assert settings == [{key: group[key] for key in ("lr", "weight_decay")} for group in optimizer.param_groups]


# ---- torch


def test_a_training_checkpoint_of_plain_pytorch_resumes_sharded(ranks, tmp_path: Path, capsys: Any) -> None:
    model, optimizer = trained()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}  # as DDP names them
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": STEPS}, tmp_path / "run.pt")
    assert cli.main(["import", "--from", "torch", str(tmp_path / "run.pt"), str(tmp_path / "out")]) == 0
    assert "optimizer: exp_avg, exp_avg_sq, step" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"step-{STEPS:012d}"]
    assert_resumes(ranks, tmp_path / "out", model, optimizer)


def test_numbered_parameters_of_several_groups_need_names(ranks, tmp_path: Path) -> None:
    model, optimizer = trained(groups=True)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    given = {"optimizer": tmp_path / "optimizer.pt", "step": STEPS}
    with pytest.raises(CheckpointError, match="--names FILE"):
        import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "out", **given)
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    (tmp_path / "wrong").write_text("\n".join(reversed(order)))
    with pytest.raises(CheckpointError, match="has shape"):
        import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "out", names=tmp_path / "wrong", **given)
    (tmp_path / "names").write_text("\n".join(order))
    import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "out", names=tmp_path / "names", **given)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"step-{STEPS:012d}"]
    assert_resumes(ranks, tmp_path / "out", model, optimizer, groups=True)


def test_names_that_torch_keeps_in_groups_are_enough(tmp_path: Path) -> None:
    model = loops.net()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[5:]}, {"params": named[:5]}], lr=1e-2)
    loops.train(model, optimizer, range(1))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    _, found = import_checkpoint("torch", tmp_path / "run.pt", tmp_path / "out")
    assert found.groups is not None
    assert [group["params"] for group in found.groups] == [[n for n, _ in named[5:]], [n for n, _ in named[:5]]]


def load_tied(folder: str) -> dict[str, Tensor]:
    model = zeor.shard(tied(seed=9), stage=3)
    load(folder, model)
    return dict(zeor.iter_full(model, buffers=True))


def test_tied_and_frozen_parameters_and_buffers_of_a_bare_state_dict(ranks, tmp_path: Path) -> None:
    model = tied(seed=5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    _, found = import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "out")
    assert found.aliases == {"head.weight": "embed.weight"} and "no optimizer state" in found.notes[0]
    loaded = ranks(load_tied, 2, str(tmp_path / "out"))[0]
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(loaded[name], value), name


# ---- torch DCP, written by FSDP2


def save_dcp(root: str, flatten: bool) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    model = loops.net()
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        kept = model.scale
        del model.scale
        model.scale = nn.Parameter(kept.detach().reshape(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loops.joint_loss(model, step).backward()  # every rank the whole batch: as one process
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    state = {"model": get_model_state_dict(model), "optim": optim, "step": STEPS}
    dcp.save(state, checkpoint_id=root)
    found = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
             for name, value in model.state_dict().items()}  # fmt: skip
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize("flatten", [False, True])
def test_a_dcp_checkpoint_of_fsdp2_resumes_at_another_world(ranks, tmp_path: Path, flatten: bool) -> None:
    right = ranks(save_dcp, 2, str(tmp_path / "dcp"), flatten)[0]
    with pytest.raises(CheckpointError, match=r"whose \.metadata is a pickle; pass --allow-pickle"):
        import_checkpoint("dcp", tmp_path / "dcp", tmp_path / "out")
    import_checkpoint("dcp", tmp_path / "dcp", tmp_path / "out", allow_pickle=True)
    step, at_load, _, _ = ranks(resume, 1, str(tmp_path / "out"), 2, False)[0]
    assert step == STEPS and at_load.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(at_load[name], value.to(at_load[name].dtype)), name


def save_numbered_dcp(root: str, state: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=root)  # equal on both ranks, so each writes every other tensor


@pytest.mark.parametrize("groups", [False, True])
def test_a_dcp_checkpoint_whose_optimizer_numbers_its_parameters_resumes(ranks, tmp_path: Path, groups: bool) -> None:
    model, optimizer = trained(groups)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    ranks(save_numbered_dcp, 2, str(tmp_path / "dcp"), state)
    arguments = ["import", "--from", "dcp", str(tmp_path / "dcp"), str(tmp_path / "out"), "--allow-pickle"]
    if groups:
        names = {id(param): name for name, param in model.named_parameters()}
        order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
        (tmp_path / "names").write_text("\n".join(order))
        arguments += ["--names", str(tmp_path / "names")]
    assert cli.main(arguments) == 0
    step, at_load, _, settings = resume(str(tmp_path / "out"), 3, groups)
    right = whole(model, optimizer)
    assert step == STEPS and at_load.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(at_load[name], value.to(at_load[name].dtype)), name
    assert settings == [{key: group[key] for key in ("lr", "weight_decay")} for group in optimizer.param_groups]


# ---- DeepSpeed: files of its structure, as version 0.19 writes them


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object that pickles by a name of DeepSpeed's, which nobody needs to have."""
    module = "deepspeed.runtime.fp16.loss_scaler"
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    made = type("LossScaler", (), {"__module__": module})
    sys.modules[module].LossScaler = made  # type: ignore[attr-defined]
    return made()


def cut(flat: Tensor, world: int) -> list[Tensor]:
    padded = torch.cat([flat, torch.zeros(-flat.numel() % world, dtype=flat.dtype)])
    return [part.clone() for part in padded.chunk(world)]


def save_deepspeed(root: Path, stage: int, world: int, run: tuple[nn.Module, Any], scaler: Any) -> None:
    """Groups flat and cut (stages 1, 2), or every parameter cut, then flat in two sub-groups (stage 3)."""
    model, optimizer = run
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]
    listed = groups if stage < 3 else [groups[0][:2], groups[0][2:], groups[1]]  # stage 3 lists sub-groups
    shapes = [{name: param.shape for name, param in group} for group in listed]
    tag = root / f"global_step{STEPS}"
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    main = {
        "module": {name: value.float().bfloat16() for name, value in model.state_dict().items()},
        "buffer_names": [], "param_shapes": shapes, "frozen_param_shapes": None, "frozen_param_fragments": None,
        "shared_params": {}, "global_steps": STEPS, "ds_version": "0.19.8", "ds_config": {"a": scaler},
    }  # fmt: skip
    states = {"param": lambda p: p.detach()}
    states.update({key: lambda p, key=key: optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")})
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    step = optimizer.state[groups[0][0][1]]["step"]
    for rank in range(world):
        flats: dict[str, list[Tensor]] = {}
        for key, take in states.items():
            if stage < 3:
                flats[key] = [
                    cut(torch.cat([take(p).reshape(-1) for _, p in group]), world)[rank] for group in groups
                ]
            else:
                parts = [cut(take(p).reshape(-1), world)[rank] for group in groups for _, p in group]
                ends = [0, 2, len(groups[0]), len(parts)]
                flats[key] = [torch.cat(parts[a:b]) for a, b in itertools.pairwise(ends)]
        base = {
            "state": {
                i: {"step": step, "exp_avg": flats["exp_avg"][i], "exp_avg_sq": flats["exp_avg_sq"][i]}
                for i in range(len(flats["param"]))
            },
            "param_groups": [{**s, "params": m} for s, m in zip(settings, [[0], [1]] if stage < 3 else [[0, 1], [2]])],
        }
        if stage < 3:
            mine = {"base_optimizer_state": base, "single_partition_of_fp32_groups": flats["param"]}
            mine["partition_count"] = [world] * len(groups)
        else:
            mine = {"optimizer_state_dict": base, "fp32_flat_groups": flats["param"], "partition_count": world}
            torch.save(main, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        mine["loss_scaler"] = scaler
        torch.save({"optimizer_state_dict": mine}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        torch.save(main, tag / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deepspeed_checkpoint_resumes_with_its_moments(ranks, tmp_path: Path, scaler: Any, stage: int) -> None:
    model, optimizer = trained(groups=True)
    save_deepspeed(tmp_path / "ds", stage, 3, (model, optimizer), scaler)
    with pytest.raises(CheckpointError, match=r"LossScaler.*pass --allow-pickle"):
        import_checkpoint("deepspeed", tmp_path / "ds", tmp_path / "out")
    _, found = import_checkpoint("deepspeed", tmp_path / "ds", tmp_path / "out", allow_pickle=True)
    assert set(found.own_dtypes.values()) == {torch.bfloat16}
    assert_resumes(ranks, tmp_path / "out", model, optimizer, groups=True)


def test_a_deepspeed_checkpoint_with_a_rank_missing_is_refused(tmp_path: Path, scaler: Any) -> None:
    save_deepspeed(tmp_path / "ds", 2, 3, trained(groups=True), scaler)
    tag = tmp_path / "ds" / f"global_step{STEPS}"
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="written by 3 ranks, but holds the state of 2"):
        import_checkpoint("deepspeed", tmp_path / "ds", tmp_path / "out", allow_pickle=True)
    (tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks the optim states of rank 0"):
        import_checkpoint("deepspeed", tmp_path / "ds", tmp_path / "out", allow_pickle=True)


def test_one_ranks_part_of_a_sharded_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {**optimizer.state_dict(), "zeor": {"world": 2, "rank": 0, "layout": 1}}
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "part.pt")
    with pytest.raises(CheckpointError, match=r"one rank's part of a sharded optimizer's state; save by zeor\.save"):
        import_checkpoint("torch", tmp_path / "part.pt", tmp_path / "out")


# ---- pickles


class Evil:
    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_code_in_a_pickle_never_runs(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(2), "evil": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    arguments = ["import", "--from", "torch", "evil.pt", "out"]
    assert cli.main(arguments) == 1
    assert "torch's safe loader refuses" in capsys.readouterr().err
    assert cli.main([*arguments, "--allow-pickle"]) == 0
    assert not (tmp_path / "made").exists()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="could not be read"):
        import_checkpoint("dcp", tmp_path / "dcp", tmp_path / "out", allow_pickle=True)
    assert not (tmp_path / "made").exists()


def test_what_cannot_be_read_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "junk.pt").write_bytes(b"junk")
    torch.save([1, 2], tmp_path / "list.pt")
    no_file = r"junk\.pt is no PyTorch file, or is damaged: it is not what torch\.save writes\.$"
    for name, sentence in (("junk.pt", no_file), ("list.pt", "no state dict of a model"), ("no.pt", "not exist")):
        with pytest.raises(CheckpointError, match=sentence):
            import_checkpoint("torch", tmp_path / name, tmp_path / "out", allow_pickle=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("allow", [False, True])
def test_a_damaged_file_is_told_from_one_that_is_refused(tmp_path: Path, allow: bool) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "new.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "new.pt").read_bytes()[:-30])
    (tmp_path / "junk.pt").write_bytes(b"\x80\x02e junk")
    (tmp_path / "text.pt").write_text("the quick brown fox")
    (tmp_path / "empty.pt").touch()
    for name in ("cut.pt", "junk.pt", "text.pt", "empty.pt"):
        for given in (tmp_path / name, io.BytesIO((tmp_path / name).read_bytes())):
            with pytest.raises(unpickle.RefusedError, match=f"^{name} is no PyTorch file, or is damaged"):
                unpickle.read_torch(given, name, allow)
    for name in ("new.pt", "old.pt"):
        assert torch.equal(unpickle.read_torch(tmp_path / name, name, allow)["weight"], torch.ones(2))
    for zipped in (False, True):
        torch.save({"evil": Evil(tmp_path / "made"), "n": 3}, tmp_path / "e.pt", _use_new_zipfile_serialization=zipped)
        for given in (tmp_path / "e.pt", io.BytesIO((tmp_path / "e.pt").read_bytes())):
            if allow:
                assert unpickle.read_torch(given, "e.pt", allow)["n"] == 3
            else:
                with pytest.raises(unpickle.RefusedError, match="safe loader refuses"):
                    unpickle.read_torch(given, "e.pt", allow)
    assert not (tmp_path / "made").exists()


def test_a_url_is_no_place_for_an_import(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(loops.net().state_dict(), "model.pt")
    assert cli.main(["import", "--from", "torch", "model.pt", "memory://runs/one"]) == 1
    told = "zeor import writes a local folder, and 'memory://runs/one' is a URL; give a folder of this machine"
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
