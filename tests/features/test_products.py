"""Results of products that a recomputed call keeps: the same gradients, fewer products, and memory that goes.

torch's own checkpoint computes again here; training with zeor is in test_recompute.py and test_keeping.py.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from zeor.features import products
from zeor.features.products import Counted, Products, is_product

CPU, WIDTH, ROWS = torch.device("cpu"), 8, 4


@pytest.fixture(autouse=True)
def all_products(monkeypatch):
    monkeypatch.setattr(products, "LEAST_INNER", 1)
    monkeypatch.setattr(products, "_always", lambda args: 1)


class Block(nn.Module):
    """Two products and attention; dropout before, between and behind them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        q, k, v = (part.reshape(1, 2, ROWS, WIDTH // 2) for part in self.qkv(F.dropout(x, 0.2)).chunk(3, dim=-1))
        x = x + F.scaled_dot_product_attention(q, k, v).reshape(ROWS, WIDTH) * self.scale
        return x + self.down(F.dropout(self.up(x).tanh(), 0.3))


RUNS = 4  # qkv, attention, up, and down, which no recomputation comes to


def inputs():
    torch.manual_seed(2)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def counted(compute):
    with Counted() as run:
        compute()
    return run.count


def grads(module, forward, backward=lambda loss: loss.backward()):
    """Gradients, and how many products ran in forward and in backward."""
    module.zero_grad()
    x = inputs()
    torch.manual_seed(3)
    found = []
    inside = counted(lambda: found.append(checkpoint(forward, x, use_reentrant=False).square().sum()))
    again = counted(lambda: backward(found.pop()))
    return [x.grad, *(param.grad for param in module.parameters())], inside, again


def same(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def compare(module, kept=3, most=RUNS, backward=lambda loss: loss.backward(), times=1):
    wanted, inside, again = grads(module, module, backward)
    found, same_inside, fewer = grads(module, Products(CPU, most).around(module), backward)
    same(found, wanted)
    assert (inside, again - fewer) == (same_inside, kept), (inside, same_inside, again, fewer)


def test_a_recomputation_runs_no_product_that_was_kept():
    compare(Block())


@pytest.mark.parametrize("most", range(4))
def test_the_first_are_kept_and_no_more(most):
    compare(Block(), kept=most, most=most)


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_computes_again():
    compare(Block(), kept=3, backward=twice)


def of_second_order(loss):
    slopes = torch.autograd.grad(loss, leaves(loss), create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()


def leaves(loss):
    found, nodes, seen = [], [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes += [each for each, _ in node.next_functions]
    return found


class Smooth(nn.Module):
    """Without attention, which has no gradient of a gradient on a CPU."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return F.dropout(self.down(self.up(x).tanh()), 0.3).tanh()


def test_gradients_of_gradients():
    module = Smooth()
    wanted, *_ = grads(module, module, of_second_order)
    found, *_ = grads(module, Products(CPU, 2).around(module), of_second_order)
    same(found, wanted)


class InPlace(Smooth):
    """One result is changed in place through a view, one as it is, one not at all."""

    def forward(self, x):
        first = self.up(x)
        first.view(-1).mul_(2.0)
        second = self.down(first.tanh())
        second += x
        return self.up(second).tanh()


def test_a_result_that_was_changed_in_place_is_computed_again():
    kept = Products(CPU, 3)
    module = InPlace()
    checkpoint(kept.around(module), inputs(), use_reentrant=False)
    assert [each is not None for each in kept._results] == [False, False, True]
    compare(module, kept=1, most=3)


def test_a_result_that_is_changed_behind_the_call_is_computed_again():
    linear = nn.Linear(WIDTH, WIDTH)

    def more(x):  # behind the product something is saved, so that the recomputation comes to it
        y = linear(x)
        return y, y.tanh()

    def run(forward):
        linear.zero_grad()
        x = inputs()
        y, z = checkpoint(forward, x, use_reentrant=False)
        with torch.no_grad():
            y.add_(1.0)
        (y.sum() + z.sum()).backward()
        return [x.grad, linear.weight.grad]

    same(run(Products(CPU, 1).around(more)), run(more))


def test_memory_is_free_behind_backward_and_when_a_loss_is_dropped():
    gc.disable()
    try:
        for backward in (True, False):
            kept = Products(CPU, RUNS)
            loss = checkpoint(kept.around(Block()), inputs(), use_reentrant=False).sum()
            made = tree_leaves([each.given for each in kept._results])
            refs = [StorageWeakRef(each.untyped_storage()) for each in made]
            assert len(refs) == 5 and not any(ref.expired() for ref in refs)
            del kept, made
            if backward:
                loss.backward()
            del loss
            assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


class Changes(nn.Module):
    """Takes another path when it is computed again, as no module may: then its products are its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            if self.calls == 2:
                self.other(x)
        return self.one(self.one(x).tanh()).tanh()


def test_nothing_is_handed_out_behind_an_operation_that_differs():
    module = Changes()
    wanted, *_ = grads(module, module)
    module.calls = 0
    found, *_ = grads(module, Products(CPU, 2).around(module))
    same([found[0], *found[1:3]], [wanted[0], *wanted[1:3]])


def test_of_two_forwards_nothing_is_kept():
    kept, block = Products(CPU, RUNS), Block()
    for _ in range(2):
        with kept.keeps():
            block(inputs())
    assert kept._results == []


# ---- random numbers


@torch.library.custom_op("zeor_tests::attention", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As an attention kernel: it draws inside, and its mask, which backward needs, is a result."""
    mask = (torch.rand_like(x) >= dropout_p).to(x.dtype) if dropout_p else torch.ones_like(x)
    return x * mask, mask


attention.register_autograd(
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Draws(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(attention(x.sin(), self.p)[0].tanh(), 0.5).tanh()


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_what_a_product_draws_is_drawn_though_it_does_not_run(monkeypatch, p):
    monkeypatch.setitem(products._INNER, "zeor_tests::attention", lambda args: 1)
    compare(Draws(p), kept=1)
    assert products._draws(torch.ops.zeor_tests.attention.default, (None, p)) == (p > 0)


# ---- what is a product


def test_products_that_cost_no_more_than_an_elementwise_operation_are_left_out(monkeypatch):
    monkeypatch.undo()
    found = {}

    def seen(name, compute):
        found[name] = counted(compute) > 0

    wide = torch.randn(2, 256)
    seen("linear", lambda: F.linear(wide, torch.randn(8, 256), torch.randn(8)))
    seen("LoRA's second", lambda: F.linear(torch.randn(2, 16), torch.randn(8, 16)))
    seen("scores", lambda: torch.randn(3, 512, 128) @ torch.randn(3, 128, 512))
    seen("weights and values", lambda: torch.randn(3, 512, 512) @ torch.randn(3, 512, 128))
    seen("convolution", lambda: F.conv2d(torch.randn(1, 32, 8, 8), torch.randn(4, 32, 3, 3)))
    seen("depthwise", lambda: F.conv2d(torch.randn(1, 32, 8, 8), torch.randn(32, 1, 3, 3), groups=32))
    seen("attention", lambda: F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8)))
    seen("into a given tensor", lambda: torch.mm(wide, wide.t(), out=torch.empty(2, 2)))
    kept = {"linear", "weights and values", "convolution", "attention"}
    assert {name for name, is_kept in found.items() if is_kept} == kept


def test_no_result_in_the_table_is_a_part_of_the_arguments():
    names = [name.removeprefix("aten::") for name in products._INNER]
    known = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    assert len(known) > 12
    for func in known:
        assert not func._schema.is_mutable
        assert all(each.alias_info is None for each in func._schema.returns), func


def test_what_is_compiled_inside_stays_compiled():
    torch._dynamo.reset()
    seen = []

    def backend(graph, example_inputs):
        seen.append(graph)
        return graph.forward

    inner = torch.compile(lambda x: x.sin() * 2.0, backend=backend)
    linear = nn.Linear(WIDTH, WIDTH)

    def forward(x):
        return inner(linear(x)).tanh()

    x = inputs()
    with Products(CPU, 1).keeps():
        forward(x)
    assert len(seen) == 1 and not is_product(torch.ops.aten.sin.default, (x,))
