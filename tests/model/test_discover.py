"""Which modules become units, and where each parameter finds its home.

Pure bookkeeping on module trees: no ranks. Every model here is checked for what must always hold: each
parameter is in exactly one unit, under its own name, with every place that holds it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeor.model.discover import UnitSpec, find_units


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Gpt(nn.Module):
    """Large enough embeddings to be units of their own, and a final norm too small to be one."""

    def __init__(self, layers: int = 3, width: int = 16, vocab: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def units_of(model: nn.Module, units: list | None = None) -> dict[str, list[str]]:
    """Unit name -> parameter names, after the checks that hold for every model."""
    specs = find_units(model, units)
    check(model, specs)
    return {spec.name: [name for name, _, _ in spec.params] for spec in specs}


def check(model: nn.Module, specs: list[UnitSpec]) -> None:
    assert specs[0].name == "root" and specs[0].module is model
    modules = dict(model.named_modules())
    plain = dict(model.named_parameters())
    found = [(name, param) for spec in specs for name, param, _ in spec.params]
    assert sorted(name for name, _ in found) == sorted(plain)
    for name, param in found:
        assert param is plain[name]
    for spec in specs[1:]:
        assert modules[spec.name] is spec.module and spec.params
        inside = set(spec.module.modules())
        assert all(module in inside for _, _, owners in spec.params for module, _ in owners)
    owners = [(module, attr) for spec in specs for _, _, where in spec.params for module, attr in where]
    held = [(m, attr) for m in model.modules() for attr, p in m._parameters.items() if p is not None]
    assert len(owners) == len(held) and set(owners) == set(held)


def test_a_gpt_is_cut_into_its_blocks_embedding_and_head() -> None:
    found = units_of(Gpt())
    assert list(found) == ["root", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert found["root"] == ["norm.weight", "norm.bias"]
    assert found["embed"] == ["embed.weight"] and found["head"] == ["head.weight"]
    assert found["blocks.1"] == [f"blocks.1.{n}.{p}" for n in ("norm", "up", "down") for p in ("weight", "bias")]


def test_tied_embeddings_live_in_the_root_under_their_first_name() -> None:
    model = Gpt(tied=True)
    found = units_of(model)
    assert list(found) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert found["root"] == ["embed.weight", "norm.weight", "norm.bias"]
    embed = find_units(model)[0].params[0]
    assert embed[2] == [(model.embed, "weight"), (model.head, "weight")]


def test_a_parameter_tied_across_blocks_lives_in_the_root() -> None:
    model = Gpt()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = units_of(model)
    assert "blocks.0.up.weight" in found["root"]
    assert found["blocks.2"] == [f"blocks.2.{n}" for n in ("norm.weight", "norm.bias", "up.bias")] + [
        "blocks.2.down.weight",
        "blocks.2.down.bias",
    ]


def test_a_parameter_tied_inside_one_block_stays_there() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    found = units_of(nn.Sequential(Twice(), Twice()))
    assert found == {
        "root": [],
        "0": ["0.a.weight", "0.a.bias", "0.b.bias"],
        "1": ["1.a.weight", "1.a.bias", "1.b.bias"],
    }


def test_a_block_used_twice_is_one_unit() -> None:
    block = Block(4)
    found = units_of(nn.Sequential(block, nn.ReLU(), block, Block(4)))
    assert list(found) == ["root", "0", "3"]


def test_the_linears_of_a_sequential_mlp_are_units() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert list(units_of(model)) == ["root", "0", "2", "4"]


def test_a_resnet_is_cut_into_the_blocks_of_its_stages() -> None:
    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(width, width, 3), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3), nn.BatchNorm2d(width)

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.layer1 = nn.Sequential(Residual(8), Residual(8))
            self.layer2 = nn.Sequential(Residual(8), Residual(8), Residual(8))
            self.fc = nn.Linear(8, 10)

    found = units_of(ResNet())
    # conv and fc are larger than a hundredth of this small model, so they are units of their own.
    assert list(found) == ["root", "conv", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2", "fc"]
    assert found["root"] == []


def test_what_is_smaller_than_a_hundredth_stays_with_the_root() -> None:
    model = nn.ModuleDict({"big": nn.Linear(100, 100), "other": nn.Linear(50, 100), "small": nn.Linear(10, 1)})
    assert units_of(model)["root"] == ["small.weight", "small.bias"]


def test_blocks_of_different_classes_are_split_by_size() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Encoder(), nn.Linear(20, 20)

    assert list(units_of(Two())) == ["root", "encoder.a", "encoder.b", "decoder"]


def test_attention_is_kept_whole_because_its_projection_is_never_called() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.out = nn.Linear(16, 16)

    found = units_of(Model())
    assert list(found) == ["root", "attention", "out"]
    names = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    assert sorted(found["attention"]) == sorted(f"attention.{n}" for n in names)


def test_an_lstm_is_one_unit() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.lstm = nn.LSTM(8, 8, num_layers=2)
            self.head = nn.Linear(8, 50)

    found = units_of(Model())
    assert list(found) == ["root", "embed", "lstm", "head"]
    assert len(found["lstm"]) == 8


def test_nested_blocks_are_taken_outermost_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    model = nn.ModuleDict({"stack": nn.ModuleList([Outer(), Outer()])})
    assert list(units_of(model)) == ["root", "stack.0", "stack.1"]


def test_lists_of_lists_are_opened_because_a_list_is_never_called() -> None:
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2)])
    assert list(units_of(lists)) == ["root", "0.0", "0.1", "1.0", "1.1"]


def test_a_model_of_one_parameter_is_its_root() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    assert units_of(One()) == {"root": ["scale"]}
    assert units_of(nn.Linear(3, 3)) == {"root": ["weight", "bias"]}


def test_a_model_without_parameters_has_an_empty_root() -> None:
    assert units_of(nn.Sequential(nn.ReLU())) == {"root": []}


def test_parameters_in_a_parameter_list_stay_with_whoever_is_called() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.zeros(4, 4) for _ in range(3)])
            self.head = nn.Linear(4, 4)

    found = units_of(Model())
    assert found["root"] == ["weights.0", "weights.1", "weights.2"]


def test_the_order_is_that_of_registration() -> None:
    found = [name for name in units_of(Gpt()) if name != "root"]
    assert found == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_units_by_class() -> None:
    assert list(units_of(Gpt(), [Block])) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    found = units_of(Gpt(layers=1), [nn.Linear])
    assert list(found) == ["root", "blocks.0.up", "blocks.0.down", "head"]
    assert "embed.weight" in found["root"] and "blocks.0.norm.weight" in found["root"]


def test_units_by_module() -> None:
    model = Gpt()
    found = units_of(model, [model.blocks[1], model.head])
    assert list(found) == ["root", "blocks.1", "head"]
    assert "blocks.0.up.weight" in found["root"]


def test_nested_units_by_hand_each_hold_their_own() -> None:
    model = Gpt()
    found = units_of(model, [model.blocks[0], model.blocks[0].up])
    assert list(found) == ["root", "blocks.0", "blocks.0.up"]
    assert found["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert "blocks.0.up.weight" not in found["blocks.0"]


def test_no_units_by_hand_is_the_root_alone() -> None:
    model = Gpt()
    assert list(units_of(model, [])) == ["root"]
    assert list(units_of(model, [model])) == ["root"]


def test_mistakes_by_hand_get_one_sentence() -> None:
    model = Gpt()
    with pytest.raises(ValueError, match="holds a Linear that is not part of the model"):
        find_units(model, [nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="names the class Conv2d, which the model does not contain"):
        find_units(model, [nn.Conv2d])
    with pytest.raises(ValueError, match="holds 'blocks', a container that is never called; name its children"):
        find_units(model, [model.blocks])
    with pytest.raises(TypeError, match="holds 'blocks'; give modules of the model or module classes"):
        find_units(model, ["blocks"])  # type: ignore[list-item]
