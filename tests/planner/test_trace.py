"""Activations counted without values: against hand counts, with every way of computing again, and leaving no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeor
from zeor.model.discover import find_units
from zeor.plan import Plan
from zeor.planner.computed_again import shelf_nbytes
from zeor.planner.rests import device_nbytes, pinned_nbytes, reused_nbytes
from zeor.planner.trace import Trace, Workload, trace

MIB = 1 << 20


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def traced(model: nn.Module, inputs: Any = None, batch: Any = None, loss: Any = None, **options: Any) -> Trace:
    work = Workload.parse(batch, inputs, loss)
    assert work is not None
    return trace(model, find_units(model, options.pop("units", None)), Plan.parse(options), work)


def test_a_small_model_by_hand() -> None:
    """fp32, 32 rows. The most before any gradient has arrived is in the second layer's backward: the input, relu's
    result, the loss and the one it begins with, the output's gradient, the weight's, and that of relu's result."""
    found = traced(TwoLayers(), torch.empty(32, 64))
    x, hidden, weight, number = 32 * 64 * 4, 32 * 256 * 4, 64 * 256 * 4, 512
    second = x + hidden + 2 * number + x + weight + hidden
    # Then relu's own backward (its result, and two gradients of that size), and the first layer's: a weight's gradient.
    relu, first = x + 2 * number + 3 * hidden, x + 2 * number + hidden + weight
    assert found.peaks[:2] == [second, max(relu, first)]
    assert len(found.arrived) == 2


def test_half_precision_halves_it() -> None:
    wide, narrow = traced(TwoLayers(), torch.empty(32, 64)), traced(TwoLayers(), torch.empty(32, 64), precision="bf16")
    given, cast = 32 * 64 * 4, 32 * 64 * 2  # a floating input is there as it was given, and cast
    numbers = 2 * 512
    output = 32 * 64 * 4  # the mean is taken of a float copy, whose gradient is one too
    assert narrow.peak - numbers - given <= (wide.peak - numbers) / 2 + cast + output
    assert narrow.peak < wide.peak


def test_gradients_arrive_last_layer_first() -> None:
    model = TwoLayers()
    found = traced(model, torch.empty(4, 64))
    assert [id(param) for param in found.arrived] == [id(model.second.weight), id(model.first.weight)]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        return x + F.dropout(self.out(y), self.dropout, self.training)


class Decoder(nn.Module):
    """`again`: it computes its blocks again by itself."""

    def __init__(self, width: int = 512, layers: int = 6, again: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.again = again
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64, bias=False)
        self.blocks = nn.ModuleList([Block(width, 8, dropout) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def on_meta(**options: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(**options)


BATCH = (2, 4096)
INPUT = 2 * 4096 * 512 * 2  # one block's, in bf16


def test_attention_keeps_no_matrix_of_tokens_by_tokens() -> None:
    found = traced(on_meta(layers=2), batch=BATCH, precision="bf16")
    assert found.peak < 2 * 8 * 4096 * 4096 * 2


def test_a_block_keeps_what_its_kernels_keep() -> None:
    """Between forward and backward: a block's input (norm and residual), the norm's result, queries, keys and values,
    attention's result; and a number per row for the norm, one per row and head for attention."""
    one, two = (traced(on_meta(layers=n), batch=BATCH, precision="bf16") for n in (1, 2))
    rows = 2 * 4096
    kept = 6 * INPUT + 4 * rows + 4 * rows * 8
    assert two.peaks[0] - one.peaks[0] == pytest.approx(kept, abs=6 * MIB)


def test_dropout_keeps_a_mask_of_bytes() -> None:
    without, with_it = (traced(on_meta(layers=n, dropout=p), batch=BATCH, precision="bf16").peaks[0]
                        for n, p in ((4, 0.0), (4, 0.1)))  # fmt: skip
    assert with_it - without == pytest.approx(4 * INPUT / 2, abs=8 * MIB)


def test_computing_again_is_honoured_whoever_does_it() -> None:
    plain = traced(on_meta(), batch=BATCH, precision="bf16")
    own = traced(on_meta(again=True), batch=BATCH, precision="bf16")
    ours = traced(on_meta(), batch=BATCH, precision="bf16", recompute=True)
    named = traced(on_meta(), batch=BATCH, precision="bf16", recompute=[Block])
    assert own.peak == ours.peak == named.peak
    assert ours.peak < plain.peak - 4 * 4 * INPUT


def test_inputs_kept_on_the_host_leave_the_device() -> None:
    ours = traced(on_meta(layers=12), batch=BATCH, precision="bf16", recompute=True)
    sent = traced(on_meta(layers=12), batch=BATCH, precision="bf16", recompute="offload")
    assert sent.sent == [INPUT] * 12
    assert ours.peak - sent.peak >= (12 - 4) * INPUT  # two on their way out, one in use, one ahead
    with_some = zeor.predict(on_meta(layers=12), precision="bf16", batch=BATCH, recompute="offload")
    assert with_some.host_peak == shelf_nbytes(sent.sent) == 128 * MIB


def test_blocks_for_inputs_are_powers_of_two() -> None:
    assert shelf_nbytes([]) == 0
    assert shelf_nbytes([8 * MIB] * 8) == 64 * MIB
    assert shelf_nbytes([8 * MIB] * 9) == 128 * MIB
    assert shelf_nbytes([96 * MIB] * 6) == 2 * 512 * MIB


def test_nothing_is_left_behind() -> None:
    model = Decoder(width=64, layers=2)
    model.register_buffer("table", torch.arange(3.0))

    def seen() -> dict[str, tuple[int, int]]:
        both = [*model.named_parameters(), *model.named_buffers()]
        return {name: (id(value), value.data_ptr()) for name, value in both}

    before = seen()
    zeor.predict(model, precision="bf16", batch=(2, 16), recompute="offload")
    assert seen() == before
    assert all(param.grad is None for param in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()


def test_a_recurrent_net_keeps_its_own_list_of_weights() -> None:
    model = nn.LSTM(8, 16, num_layers=2)
    own = list(model._flat_weights)
    found = traced(model, torch.zeros(5, 4, 8))
    assert {id(param) for param in found.arrived} == {id(param) for param in model.parameters()}
    assert all(after is before for after, before in zip(model._flat_weights, own, strict=True))
    assert all(param.grad is None for param in model.parameters())


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_forward_that_looks_at_values_is_refused_and_left_as_it_was() -> None:
    model = Looks()
    weight = model.linear.weight
    with pytest.raises(ValueError, match="leave out batch= and inputs="):
        zeor.predict(model, inputs=torch.zeros(2, 4))
    assert model.linear.weight is weight


def test_a_check_of_all_values_is_taken_to_hold() -> None:
    class Checks(Looks):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if (x[:, -1] == 0).all() else x

    assert zeor.predict(Checks(), inputs=torch.ones(2, 4)).activations > 0


def test_the_loss_may_be_the_models_own_or_a_function() -> None:
    class Scored(Decoder):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(tokens).flatten(0, 1).float(), targets.flatten())

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    with torch.device("meta"):
        scored = Scored()
    plain = traced(on_meta(), batch=BATCH, precision="bf16")
    assert traced(on_meta(), batch=BATCH, loss=loss, precision="bf16").peaks == plain.peaks
    assert traced(scored, batch=BATCH, precision="bf16").peak == pytest.approx(plain.peak, rel=0.02)


def test_mistakes_about_the_workload_get_one_sentence() -> None:
    model = on_meta(layers=1)
    with pytest.raises(TypeError, match="not both"):
        zeor.predict(model, batch=(1, 4), inputs=(torch.zeros(1),))
    with pytest.raises(ValueError, match=r"batch=\(1,\); give \(sequences, tokens\)"):
        zeor.predict(model, batch=(1,))
    with pytest.raises(TypeError, match="loss= without what it works on"):
        zeor.predict(model, loss=lambda model: model)
    with pytest.raises(ValueError, match="not one number with a gradient"):
        zeor.predict(model, batch=(1, 4), loss=lambda model, x, y: model(x))


def test_allocators_round_as_torch_does() -> None:
    assert [device_nbytes(n) for n in (0, 1, 513)] == [0, 512, 1024]
    assert device_nbytes(11 * MIB) == 12 * MIB  # the rest of the segment is too small to be cut off
    assert device_nbytes(10 * MIB + 512) == 10 * MIB + 512
    assert reused_nbytes(64 * MIB) == 65 * MIB
    assert [pinned_nbytes(n) for n in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
