"""`zeor.chunked_cross_entropy` against `F.cross_entropy` of all logits: values, gradients, stages in bits, memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeor
from tests.loops import assert_close, assert_equal, values

WIDTH, CLASSES = 6, 11
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def data(rows=(3, 5), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(CLASSES, rows, generator=generator)
    targets.view(-1)[::4] = -100
    return hidden.requires_grad_(), targets


def head_of(dtype=torch.float64, bias=True):
    torch.manual_seed(1)
    return nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)


def plain(hidden, head, targets, **options):
    logits = head(hidden)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), **options)
    return loss.view(targets.shape) if options.get("reduction") == "none" else loss


def gradients(compute, hidden, head, targets, factor=1.0, **options):
    hidden = hidden.detach().requires_grad_()
    head.zero_grad()
    loss = compute(hidden, head, targets, **options)
    (loss * factor).sum().backward()
    return loss.detach(), {"hidden": hidden.grad, **{name: p.grad.clone() for name, p in head.named_parameters()}}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_those_of_all_logits(reduction, smoothing):
    hidden, targets = data()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    for bias, chunk, factor in itertools.product([True, False], [1, 4, 15, 100, None], [1.0, 3.0]):
        head = head_of(bias=bias)
        want, grads = gradients(plain, hidden, head, targets, factor, **options)
        found, again = gradients(zeor.chunked_cross_entropy, hidden, head, targets, factor, chunk=chunk, **options)
        torch.testing.assert_close(found, want, **TIGHT)
        assert_close(again, grads, **TIGHT)


class Softcap(nn.Module):
    """A head that is more than a product."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH, dtype=torch.float64), head_of()

    def forward(self, hidden):
        return 5.0 * torch.tanh(self.linear(self.norm(hidden)) / 5.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_module_may_be_the_head(reduction):
    hidden, targets = data()
    for head, chunk in itertools.product([Softcap(), nn.Sequential(nn.Tanh(), head_of())], [4, None]):
        want, grads = gradients(plain, hidden, head, targets, reduction=reduction)
        found, again = gradients(zeor.chunked_cross_entropy, hidden, head, targets, chunk=chunk, reduction=reduction)
        torch.testing.assert_close(found, want, **TIGHT)
        assert_close(again, grads, **TIGHT)
        assert "forward" not in vars(head)


def test_a_weight_may_be_given_and_what_is_frozen_gets_no_gradient():
    hidden, targets = data()
    head = head_of()
    want, grads = gradients(plain, hidden, head, targets)
    head.zero_grad()
    loss = zeor.chunked_cross_entropy(hidden, head.weight, targets, bias=head.bias, chunk=4)
    loss.backward()
    torch.testing.assert_close(loss, want, **TIGHT)
    torch.testing.assert_close(head.weight.grad, grads["weight"], **TIGHT)
    head.requires_grad_(False)
    head.zero_grad()
    again = hidden.detach().requires_grad_()
    zeor.chunked_cross_entropy(again, head, targets, chunk=4).backward()
    torch.testing.assert_close(again.grad, grads["hidden"], **TIGHT)
    head.weight.requires_grad_(True)
    zeor.chunked_cross_entropy(hidden.detach(), head, targets, chunk=4).backward()
    torch.testing.assert_close(head.weight.grad, grads["weight"], **TIGHT)
    assert head.bias.grad is None


def test_backward_twice_no_grad_and_rows_that_do_not_count():
    hidden, targets = data()
    head = head_of()
    _, grads = gradients(plain, hidden, head, targets)
    head.zero_grad()
    loss = zeor.chunked_cross_entropy(hidden, head, targets, chunk=4)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(head.weight.grad, 2 * grads["weight"], **TIGHT)
    with torch.no_grad():
        quiet = zeor.chunked_cross_entropy(hidden, head, targets, chunk=4)
    assert torch.equal(quiet, loss) and not quiet.requires_grad
    nothing = torch.full_like(targets, -100)
    summed = zeor.chunked_cross_entropy(hidden, head, nothing, reduction="sum")
    assert summed.item() == 0.0
    assert zeor.chunked_cross_entropy(hidden, head, nothing).isnan()
    assert zeor.chunked_cross_entropy(hidden, head, targets + 100 * (targets < 0), ignore_index=0).isfinite()


def test_a_second_derivative_is_refused_for_a_linear_head_and_right_otherwise():
    hidden, targets = data()
    head = head_of()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(zeor.chunked_cross_entropy(hidden, head, targets), hidden, create_graph=True)
    found = []
    for compute in (plain, zeor.chunked_cross_entropy):
        loss = compute(hidden, head, targets, reduction="none").sum()
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), head.weight)[0])
    torch.testing.assert_close(found[1], found[0], **TIGHT)


def exactly(head):
    exact = head_of()
    exact.load_state_dict(head.state_dict())
    return exact


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_low_precision_is_as_near_to_the_truth_as_plain_pytorch(dtype, bound):
    hidden, targets = data((64, 8), dtype)
    head = head_of(dtype)
    truth, true_grads = gradients(plain, hidden.double(), exactly(head), targets)
    loss, grads = gradients(zeor.chunked_cross_entropy, hidden, head, targets, chunk=32)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - truth.item()) < bound * truth.item()
    for name, grad in true_grads.items():
        assert grads[name].dtype == dtype
        assert (grads[name].double() - grad).norm() < bound * grad.norm(), name


def test_a_loss_scale_saves_small_fp16_gradients():
    hidden, targets = data((64, 64), torch.float16)
    head = head_of(torch.float16)
    _, true_grads = gradients(plain, hidden.double(), exactly(head), targets)
    _, grads = gradients(zeor.chunked_cross_entropy, hidden, head, targets, 2.0**12, chunk=256)
    scaled = grads["hidden"].double() / 2.0**12
    assert (scaled - true_grads["hidden"]).norm() < 0.01 * true_grads["hidden"].norm()


def saved_nbytes(compute):
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(found.values())


def test_logits_are_never_kept():
    rows, classes = 256, 500
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    targets = torch.randint(classes, (rows,))
    linear = nn.Linear(WIDTH, classes, bias=False)
    logits, inputs = rows * classes * 4, (rows * WIDTH + classes * WIDTH) * 4
    assert saved_nbytes(lambda: plain(hidden, linear, targets)) > logits
    assert saved_nbytes(lambda: zeor.chunked_cross_entropy(hidden, linear, targets, chunk=16)) <= inputs + 64
    other = nn.Sequential(nn.Tanh(), linear)
    kept = saved_nbytes(lambda: zeor.chunked_cross_entropy(hidden, other, targets, chunk=16))
    assert kept <= inputs + rows * 8 + 16 * 64 + 4 * rows


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor any operation makes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    rows, classes, chunk = 256, 500, 16
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    targets = torch.randint(classes, (rows,))
    for head in (nn.Linear(WIDTH, classes), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, classes))):
        with Peak() as peak:
            zeor.chunked_cross_entropy(hidden, head, targets, chunk=chunk).backward()
        assert peak.nbytes == max(chunk * classes, classes * WIDTH) * 4


# ---- sharded


class Model(nn.Module):
    def __init__(self, inside, tied=False):
        super().__init__()
        self.inside = inside
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, targets, chunked):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if not self.inside:
            return hidden
        return loss_of(self, hidden, targets, chunked)


def loss_of(model, hidden, targets, chunked):
    if chunked:
        return zeor.chunked_cross_entropy(hidden, model.head, targets, chunk=3)
    return plain(hidden, model.head, targets)


def train(stage, inside, tied=False, chunked=True, dtype=torch.float64, **options):
    torch.manual_seed(2)
    model = Model(inside, tied).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens, targets = torch.randint(CLASSES, (2, 2, 4), generator=generator)
        loss = model(tokens, targets, chunked)
        loss = loss if inside else loss_of(model, loss, targets, chunked)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        return values(model)


def sharded(inside, tied):
    first = None
    for stage in (0, 1, 2, 3):
        found = train(stage, inside, tied)
        assert_close(found, train(stage, inside, tied, chunked=False), rtol=1e-9, atol=1e-10)
        first = first or found
        assert_equal(found, first)
        single = train(stage, inside, tied, dtype=torch.float32, recompute="offload")
        assert_equal(single, train(0, inside, tied, dtype=torch.float32))


@pytest.mark.parametrize("inside, tied", [(True, False), (True, True), (False, False)])
def test_every_stage_gives_the_same_bits_and_the_plain_loss(ranks, inside, tied):
    ranks(sharded, 2, inside, tied)


def tied_outside():
    model = Model(inside=False, tied=True)
    zeor.shard(model, stage=3)
    tokens = torch.randint(CLASSES, (2, 4))
    try:
        with torch.no_grad():  # after a forward with gradients the root's parameters stay until backward
            loss_of(model, model(tokens, None, True), tokens, True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_tied_head_outside_the_models_forward_is_told_what_to_do(ranks):
    for told in ranks(tied_outside, 2):
        assert "'embed.weight' is sharded" in told


# ---- sentences


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"targets": torch.zeros(4, dtype=torch.long)}, r"one target for each row of hidden: hidden is \(3, 5, 6\)"),
        ({"targets": torch.zeros(3, 5)}, "takes classes as targets, not torch.float32"),
        ({"reduction": "avg"}, "reduction='avg' is not known; use 'mean', 'sum' or 'none'"),
        ({"chunk": 0}, "chunk=0; give how many rows"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0; give a number from 0 to 1"),
        ({"bias": torch.zeros(CLASSES)}, "takes bias= beside a weight only"),
    ],
)
def test_wrong_arguments(change, sentence):
    hidden, targets = data()
    with pytest.raises(ValueError, match=sentence):
        zeor.chunked_cross_entropy(hidden, **{"head": head_of(), "targets": targets, **change})
