"""`zeor plan --gpu`: what is printed is what zeor.choose says, for a folder, a function and a built-in size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zeor
from zeor.tools import choose, cli, plan

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip


def built() -> nn.Module:
    """What `module:function` names here."""
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))


def not_a_model() -> int:
    return 3


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["plan", "--gpu", "H100", "--batch", "2", "32", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_folder_of_hugging_face_is_built_without_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for what in (tmp_path, tmp_path / "config.json"):
        model = choose.factory(str(what))()
        assert type(model).__name__ == "LlamaForCausalLM" and len(model.model.layers) == 3
        assert all(param.is_meta for param in model.parameters())


def test_what_is_printed_is_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    lines = run(capsys, "--model", str(tmp_path), "--ranks", "16")
    found = zeor.choose(choose.factory(str(tmp_path)), "AdamW", (2, 32), world=16, gpu="H100")
    assert lines[: len(str(found).splitlines())] == str(found).splitlines()
    assert lines[0].startswith("16 ranks of H100")
    assert lines[-1].startswith("zeor.shard(model, optimizer, precision='bf16', stage=")


def test_a_function_and_a_built_in_size(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--model", "tests.tools.test_choose:built", "--precision", "fp32")
    assert lines[0] == "1 rank of H100, 76.5 GiB each to use" and "precision='fp32'" in lines[-1]
    tiny = run(capsys, "--size", "tiny", "--batch", "1", "2048")  # longer than the size's own context
    assert tiny[2].split()[:2] == ["stage", "3"]
    assert plan._as_long_as(plan.SIZES["tiny"], (1, 2048)).context == 2048


def test_what_to_type_is_python(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--size", "13b", "--gpu", "4090", "--batch", "4", "2048", "--host", "128GiB", "--allow", "int8"]
    told = run(capsys, *options)[-1]
    typed = eval(told.replace("zeor.shard(model, optimizer, ", "dict("), {"zeor": zeor})
    found = zeor.choose(
        lambda: plan.meta_model(plan.SIZES["13b"]), "AdamW", (4, 2048), world=1, gpu="4090", host="128GiB", allow="int8"
    )
    assert zeor.Offload.parse(typed.pop("offload")) == found.options["offload"] and typed.pop("moments") == "int8"
    assert typed == {"precision": "bf16", "stage": 3, "recompute": "auto"}


def test_micro_batches_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--size", "gpt2-xl", "--gpu", "40GiB", "--batch", "64", "1024", "--ranks", "8")
    assert lines[-1].startswith("with ") and "micro-batches of" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpu", "H100", "--size", "tiny"], "give --batch SEQUENCES TOKENS"),
        (["--model", "tests.tools.test_choose:built"], "--model goes with --gpu"),
        (["--gpu", "H100", "--batch", "1", "8", "--model", "nowhere"], "is no folder; give one with a config.json"),
        (["--gpu", "H100", "--batch", "1", "8", "--model", "no_such:f"], "there is no module 'no_such' here"),
        (["--gpu", "H100", "--batch", "1", "8", "--model", "tests.tools.test_choose:f"], "has no function 'f'"),
        (["--gpu", "H100", "--batch", "1", "8", "--model", "tests.tools.test_choose:not_a_model"], "gave a int; it"),
        (["--gpu", "H100", "--batch", "1", "8", "--model", "tests"], "there is no config.json in 'tests'"),
        (["--gpu", "Z80", "--batch", "1", "8", "--size", "tiny"], "gpu='Z80' is not known"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence(arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as told:
        cli.main(["plan", *arguments])
    assert text in str(told.value) and str(told.value).startswith("zeor: ")


def test_where_no_number_of_ranks_would_do_it_says_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(32, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 32))
    with pytest.raises(ValueError, match=r"No number of ranks would do: .* or cut the units themselves"):
        zeor.choose(model, "AdamW", (1, 64), world=2, gpu="1100MiB", precision="fp32")
