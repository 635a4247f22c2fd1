"""Importing zeor is quick and touches nothing; a script runs quietly under python, torchrun and SLURM's variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeor.comm.launch import world
from zeor.comm.launch.world import backend_for, ensure_process_group, first_host

REPOSITORY = Path(__file__).resolve().parents[1]
NO_WARNING = ["-W", "error::FutureWarning", "-W", "error::DeprecationWarning", "-W", "error::UserWarning"]

SCRIPT = """
import torch, zeor
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model, optimizer = zeor.shard(model, optimizer, stage=STAGE)
data = torch.utils.data.TensorDataset(torch.rand(8, 4, generator=torch.Generator().manual_seed(1)))
for (x,) in zeor.data.shard(torch.utils.data.DataLoader(data, batch_size=2)):
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
with zeor.full_params(model):
    total = sum(p.double().sum().item() for p in model.parameters())
print(f"rank {rank} of {torch.distributed.get_world_size() if rank or torch.distributed.is_initialized() else 1}: "
      f"{total:.10f}", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def run(arguments: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("SLURM_")}
    env |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **extra}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def in_new_process(code: str, *flags: str) -> dict:
    """Run code that fills `found`; returns it, and what reached stderr."""
    done = run([*flags, "-c", f"import json\nfound = {{}}\n{code}\nprint(json.dumps(found))"])
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


# ---- import


def test_the_import_touches_no_device_and_starts_nothing():
    code = """
import sys, threading, torch
modules, threads = set(sys.modules), threading.active_count()
import zeor
found["cuda"] = torch.cuda.is_initialized()
found["group"] = torch.distributed.is_initialized()
found["triton"] = "triton" in sys.modules and "triton" not in modules
found["dynamo"] = "torch._dynamo" in sys.modules and "torch._dynamo" not in modules
found["threads"] = threading.active_count() - threads
names = {name.partition(".")[0] for name in set(sys.modules) - modules} - set(sys.stdlib_module_names)
found["beyond torch"] = sorted(names - {"zeor"})
"""
    found = in_new_process(code, "-W", "error")
    assert found.pop("beyond torch") == ["cloudpickle"], "what takes time is imported when it is needed"
    assert found == {"cuda": False, "group": False, "triton": False, "dynamo": False, "threads": 0, "stderr": ""}


def test_public_names_are_there_and_documented():
    import zeor

    for name in zeor.__all__:
        assert getattr(zeor, name).__doc__, f"{name} has no docstring"
    assert set(zeor.__all__) <= set(dir(zeor))


# ---- scripts


def totals(output: str) -> dict[str, str]:
    """`rank R of W: total` by their left side; two ranks may write into one line."""
    return dict(sorted(re.findall(r"(rank \d of \d): (-?\d+\.\d{10})", output)))


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT.replace("STAGE", "3"))
    return path


def test_a_script_under_python_warns_of_nothing(script):
    done = run([*NO_WARNING, str(script)])
    assert list(totals(done.stdout)) == ["rank 0 of 1"]
    shown = done.stderr.splitlines()  # the start-up block and nothing else
    assert 1 <= len(shown) <= 5 and all(line.startswith("zeor: ") for line in shown)


def test_the_same_script_under_torchrun(script):
    done = run(
        [*NO_WARNING, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        PYTHONWARNINGS="error::FutureWarning,error::DeprecationWarning",
    )
    found = totals(done.stdout)
    assert list(found) == ["rank 0 of 2", "rank 1 of 2"] and len(set(found.values())) == 1
    assert "Warning" not in done.stderr


def test_the_same_script_under_slurms_variables(script):
    port = str(20000 + os.getpid() % 10000)
    shared = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "7",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **shared}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    found = totals("".join(outputs))
    assert list(found) == ["rank 0 of 2", "rank 1 of 2"] and len(set(found.values())) == 1


# ---- the world


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("localhost", "localhost"),
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("gpu[12]", "gpu12"),
        ("rack1-n[2,4-6]", "rack1-n2"),
        ("n[1-2].cluster.org,other", "n1.cluster.org"),
        ("a-b-c[07-11]", "a-b-c07"),
        ("r[1-2]n[3-4],x", "r1n3"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.fixture
def bare(monkeypatch):
    """An environment without any launcher's variables, restored afterwards."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield monkeypatch
    for name in set(os.environ) - set(before):
        del os.environ[name]


def slurm(monkeypatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_slurms_variables_become_torchruns(bare):
    slurm(bare, PROCID="5", STEP_NUM_TASKS="8", LOCALID="1", STEP_NODELIST="gpu[03-04]", JOB_ID="1234", STEP_ID="2")
    world._take_over_slurm()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03"}
    assert 1024 < int(port) < 65536


def test_a_master_that_the_user_named_is_kept(bare):
    slurm(bare, PROCID="0", STEP_NUM_TASKS="2", STEP_NODELIST="gpu[03-04]")
    bare.setenv("MASTER_ADDR", "10.0.0.1")
    bare.setenv("MASTER_PORT", "29501")
    world._take_over_slurm()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "29501")


def test_ports_of_two_steps_differ(bare):
    ports = []
    for step in ("0", "1"):
        slurm(bare, PROCID="0", STEP_NUM_TASKS="2", JOB_ID="99", STEP_ID=step)
        world._take_over_slurm()
        ports.append(os.environ.pop("MASTER_PORT"))
    assert ports[0] != ports[1]


def test_an_interactive_or_single_slurm_task_is_a_world_of_one(bare):
    slurm(bare, PROCID="0", STEP_NUM_TASKS="1", NODELIST="gpu7", JOB_ID="1")
    ensure_process_group(torch.device("cpu"), 5.0)
    assert not dist.is_initialized() and "RANK" not in os.environ


def test_half_a_launchers_variables_are_named(bare):
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="RANK is set but MASTER_ADDR, MASTER_PORT is not; start the script with"):
        ensure_process_group(torch.device("cpu"), 5.0)


def test_backends_by_device():
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
