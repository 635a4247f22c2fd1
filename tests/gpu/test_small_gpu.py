"""The Triton pass over moments in small formats against plain torch, and against the exact pass.

Without a GPU, Triton's interpreter runs the same:  TRITON_INTERPRET=1 python -m pytest tests/gpu/test_small_gpu.py
"""

import itertools
import os

import pytest
import torch

from tests.optim.kernels.reference import adam_pass_reference
from zeor.memory.formats import join_into, split_into
from zeor.memory.small import BLOCK_NUMEL, decode_into, encode_into, scale_count, storage_of
from zeor.optim.kernels.adam import AdamRun, AdamSettings, adam_pass
from zeor.optim.kernels.protocol import Launch
from zeor.optim.kernels.registry import unavailable_reason

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]  # the mark skips a test where there is no GPU
ODD_SIZES = [1, 255, 256, 257, 1024, 2300]
NAN = float("nan")
ADAMW = AdamSettings(lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
CASES = [
    AdamSettings(lr=1e-2),
    ADAMW,
    AdamSettings(lr=1e-2, weight_decay=0.1, maximize=True),
    AdamSettings(lr=3e-4, betas=(0.3, 0.95), eps=1e-6),
]
MASTERS = ["whole", "split", "compute"]


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        pytest.importorskip("triton")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    assert unavailable_reason(torch.device("cuda:0")) is None
    return torch.device("cuda:0")


def randn(numel: int, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)


def stored(values: torch.Tensor, format: str, signed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype, blocks = storage_of(format, values.numel(), signed)
    codes = torch.empty(values.numel(), dtype=dtype, device=values.device)
    scales = torch.empty(blocks, device=values.device) if blocks else None
    encode_into(codes, scales, values, signed)
    return codes, scales


def make_run(numel, device, formats=("int8", "int8"), master="split", grad_dtype=torch.bfloat16) -> AdamRun:
    """In mid-training; moments spread over decades inside a block."""
    weights = randn(numel, device, 0)
    size = torch.exp(randn(numel, device, 4))
    exp_avg, exp_avg_scale = stored(randn(numel, device, 2) * 0.1 * size, formats[0], True)
    exp_avg_sq, exp_avg_sq_scale = stored((randn(numel, device, 3) * size).square() * 0.1, formats[1], False)
    compute = None if master == "compute" else torch.full((numel,), NAN, dtype=torch.bfloat16, device=device)
    remainder = None
    if master == "split":
        remainder = torch.empty(numel, dtype=torch.int16, device=device)
        split_into(compute, remainder, weights)
    return AdamRun(
        None if master == "split" else weights,
        (randn(numel, device, 1) * size).to(grad_dtype),
        exp_avg,
        exp_avg_sq,
        compute,
        remainder,
        exp_avg_scale,
        exp_avg_sq_scale,
    )


def copy_of(run):
    return AdamRun(*(None if t is None else t.clone() for t in run))


def part_of(run: AdamRun, begin: int, end: int) -> AdamRun:
    assert begin % BLOCK_NUMEL == 0
    blocks = slice(begin // BLOCK_NUMEL, scale_count(end))
    cut = {name: None if t is None else t[blocks if "scale" in name else slice(begin, end)] for name, t in named(run)}
    return AdamRun(**cut)


def named(run: AdamRun):
    return run._asdict().items()


def assert_same_bits(got, expected) -> None:
    for name, tensor in named(got):
        other = getattr(expected, name)
        assert tensor is other is None or torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def master_of(run: AdamRun) -> torch.Tensor:
    if run.master is not None:
        return run.master
    master = torch.empty(run.compute.numel(), device=run.compute.device)
    join_into(master, run.compute, run.remainder)
    return master


def assert_runs_agree(got: AdamRun, expected: AdamRun) -> None:
    """Masters, scales and fp32 moments to rounding; codes to one (a last bit can turn the dither)."""
    torch.testing.assert_close(master_of(got), master_of(expected), rtol=2e-6, atol=3e-7)
    for name, tensor in named(got):
        other = getattr(expected, name)
        if name.startswith("exp_avg") and tensor is not None:
            if tensor.dtype in (torch.int8, torch.uint8):
                assert (tensor.int() - other.int()).abs().max() <= 1, name
            else:
                rtol = 2**-7 if tensor.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(tensor, other, rtol=rtol, atol=3e-7)


def both(run: AdamRun, settings: AdamSettings, step=3, scale: float | None = 0.3) -> tuple[AdamRun, AdamRun]:
    got, expected = copy_of(run), copy_of(run)
    control = None if scale is None else torch.tensor(scale, device=run.grad.device)
    adam_pass(got, settings, step, control)
    adam_pass_reference(expected, settings, step, control)
    return got, expected


@pytest.mark.parametrize("numel", ODD_SIZES)
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_int8_moments_against_plain_torch(device, settings, numel):
    assert_runs_agree(*both(make_run(numel, device), settings))


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("formats", list(itertools.product(("exact", "bf16", "int8"), repeat=2))[1:], ids="-".join)
def test_every_format_master_and_gradient(device, formats, grad_dtype, master):
    got, expected = both(make_run(1300, device, formats, master, grad_dtype), ADAMW, scale=None)
    assert_runs_agree(got, expected)
    if master == "whole":
        halves = make_run(1300, device, formats, "split", grad_dtype)
        adam_pass(halves, ADAMW, 3)
        assert torch.equal(master_of(halves), got.master) and torch.equal(halves.compute, got.compute)
        assert torch.equal(halves.exp_avg, got.exp_avg) and torch.equal(halves.exp_avg_sq, got.exp_avg_sq)


def test_equal_moments_have_equal_codes(device):
    """With betas of zero the moments are the gradient and its square, in bits; a code in a thousand may differ."""
    numel = 40 * BLOCK_NUMEL
    got, expected = both(make_run(numel, device), AdamSettings(lr=1e-2, betas=(0.0, 0.0)), scale=None)
    assert torch.equal(got.exp_avg_scale, expected.exp_avg_scale)
    assert torch.equal(got.exp_avg_sq_scale, expected.exp_avg_sq_scale)
    for ours, theirs in ((got.exp_avg, expected.exp_avg), (got.exp_avg_sq, expected.exp_avg_sq)):
        difference = (ours.int() - theirs.int()).abs()
        assert difference.max() <= 1 and int((difference > 0).sum()) <= numel // 1000


def test_the_update_is_that_of_the_exact_pass_on_decoded_moments(device):
    """Rounding comes after the update: master and compute are those of exact moments, to rounding."""
    run = make_run(2300, device, master="whole")
    moments = torch.empty(2, 2300, device=device)
    decode_into(moments[0], run.exp_avg, run.exp_avg_scale)
    decode_into(moments[1], run.exp_avg_sq, run.exp_avg_sq_scale)
    exact = AdamRun(run.master.clone(), run.grad, moments[0], moments[1], run.compute.clone())
    adam_pass(exact, ADAMW, 3)
    adam_pass(run, ADAMW, 3)
    torch.testing.assert_close(run.master, exact.master, rtol=2e-6, atol=3e-7)
    codes, scales = stored(exact.exp_avg_sq, "int8", False)
    assert (codes.int() - run.exp_avg_sq.int()).abs().max() <= 1
    torch.testing.assert_close(scales, run.exp_avg_sq_scale, rtol=1e-6, atol=0.0)


def test_numbers_on_the_device(device):
    run = make_run(1300, device)
    host = copy_of(run)
    adam_pass(host, ADAMW, 7)
    lr, step = torch.tensor(1e-2, device=device), torch.tensor(7.0, device=device)
    adam_pass(run, AdamSettings(lr=lr, weight_decay=0.1, decoupled_weight_decay=True), step)
    assert_runs_agree(run, host)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("cut", [256, 1024, 1280])
def test_a_cut_between_blocks_changes_no_bit(device, cut, master):
    whole = make_run(2300, device, master=master)
    parts = copy_of(whole)
    adam_pass(whole, ADAMW, 3)
    adam_pass(part_of(parts, 0, cut), ADAMW, 3)
    adam_pass(part_of(parts, cut, 2300), ADAMW, 3)
    assert_same_bits(parts, whole)


def test_a_run_that_starts_in_mid_vector_changes_no_bit(device):
    """Segments lie anywhere in a lane: the same numbers from addresses off any vector."""
    run = make_run(1300, device)
    moved = AdamRun(*(None if t is None else torch.cat([t.new_zeros(1), t])[1:] for t in run))
    adam_pass(run, ADAMW, 3)
    adam_pass(moved, ADAMW, 3)
    assert_same_bits(moved, run)


def test_the_launch_changes_no_bit(device):
    runs = [make_run(5000, device) for _ in range(4)]
    for run, launch in zip(runs, (Launch(256, 1), Launch(512, 4), Launch(1024, 8), Launch(2048, 8))):
        adam_pass(run, ADAMW, 3, launch=launch)
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("master", MASTERS)
def test_nothing_is_written_past_the_end(device, master):
    whole = make_run(2048, device, master=master)
    before = copy_of(whole)
    short = part_of(whole, 0, 1027)
    adam_pass(short, ADAMW, 3)
    for name, tensor in named(whole):
        if tensor is not None:
            kept = scale_count(1027) if "scale" in name else 1027
            was = getattr(before, name)[kept:]
            assert torch.equal(tensor[kept:].view(torch.uint8), was.view(torch.uint8)), name


def test_found_inf_writes_nothing_and_zero_writes_all(device):
    run = make_run(1300, device)
    before = copy_of(run)
    for found in (1.0, NAN):
        adam_pass(run, ADAMW, 3, None, torch.tensor(found, device=device))
    assert_same_bits(run, before)
    adam_pass(run, ADAMW, 3, None, torch.tensor(0.0, device=device))
    assert not torch.equal(run.exp_avg, before.exp_avg) and not torch.equal(run.remainder, before.remainder)


def test_nothing_finite_comes_of_a_block_with_inf_or_nan_in_it(device):
    for wrong in (float("inf"), NAN):
        run = make_run(4 * BLOCK_NUMEL, device, grad_dtype=torch.float32)
        run.grad[BLOCK_NUMEL + 7] = wrong
        got, expected = both(run, ADAMW)
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
            ours, theirs = getattr(got, name), getattr(expected, name)
            assert torch.equal(ours.isnan(), theirs.isnan()), name
        assert got.exp_avg_scale.isnan().tolist() == [False, True, False, False]
        values = torch.empty(4 * BLOCK_NUMEL, device=device)
        for moment in ("exp_avg", "exp_avg_sq"):
            decode_into(values, getattr(got, moment), getattr(got, f"{moment}_scale"))
            assert values.isnan().view(4, -1).sum(1).tolist() == [0, BLOCK_NUMEL, 0, 0]
            assert not getattr(got, moment)[BLOCK_NUMEL : 2 * BLOCK_NUMEL].any()


def test_blocks_of_nothing_and_blocks_that_are_tiny(device):
    """Zero stays zero; below TINY_SCALE exp_avg is zero, and exp_avg_sq never is."""
    run = make_run(3 * BLOCK_NUMEL, device, grad_dtype=torch.float32)
    for tensor in (run.exp_avg, run.exp_avg_sq, run.exp_avg_scale, run.exp_avg_sq_scale):
        tensor.zero_()
    run.grad[:BLOCK_NUMEL] = 0.0
    run.grad[BLOCK_NUMEL : 2 * BLOCK_NUMEL] *= 1e-16
    got, expected = both(run, AdamSettings(lr=1e-2), step=1, scale=None)
    assert not got.exp_avg[:BLOCK_NUMEL].any() and not got.exp_avg_sq[:BLOCK_NUMEL].any()
    assert got.exp_avg_scale[0] == got.exp_avg_sq_scale[0] == 0.0
    tiny = slice(BLOCK_NUMEL, 2 * BLOCK_NUMEL)
    assert bool((got.exp_avg_sq[tiny] == 255).all()) and 0.0 < got.exp_avg_sq_scale[1] < 1e-30
    assert got.exp_avg[tiny].any()  # 1e-17 is far from tiny: only the square is
    assert_runs_agree(got, expected)
    run.grad[tiny] *= 1e-14
    got, expected = both(run, AdamSettings(lr=1e-2), step=1, scale=None)
    assert not got.exp_avg[tiny].any() and got.exp_avg_scale[1] == 0.0
    assert_runs_agree(got, expected)


def test_encoding_on_the_device_is_that_of_the_host(device):
    values = randn(5000, torch.device("cpu"), 5) * torch.exp(3 * randn(5000, torch.device("cpu"), 6))
    for signed in (True, False):
        moment = values if signed else values.square()
        here, there = stored(moment, "int8", signed), stored(moment.to(device), "int8", signed)
        assert torch.equal(here[0], there[0].cpu()) and torch.equal(here[1], there[1].cpu())
        back = torch.empty(2, 5000)
        decode_into(back[0], *here)
        on_device = torch.empty(5000, device=device)
        decode_into(on_device, *there)
        assert torch.equal(back[0], on_device.cpu())


def test_wrong_tensors_are_named(device):
    run = make_run(300, device)
    for wrong, word in (
        (run._replace(exp_avg_scale=None), "exp_avg, 300 elements of torch.int8, goes with 2 contiguous scales"),
        (run._replace(exp_avg_sq_scale=run.exp_avg_sq_scale[:1]), "the run has 1 on"),
        (run._replace(exp_avg=run.exp_avg_sq), "exp_avg is torch.uint8"),
        (run._replace(exp_avg=run.exp_avg.bfloat16()), "goes with no contiguous scales"),
        (run._replace(exp_avg_scale=run.exp_avg_scale.double()), "exp_avg_scale is torch.float64"),
    ):
        with pytest.raises(ValueError, match=word):
            adam_pass(wrong, ADAMW, 1)
    adam_pass(part_of(run, 0, 0), ADAMW, 1)  # nothing to launch


def test_training_with_small_moments_stays_beside_the_exact_one(device):
    """A noisy bowl: after 15 steps the weights are where exact moments bring them, to a few per cent of the way."""
    numel, steps, ends = 1024, 15, {}
    target = randn(numel, device, 9)
    for format in ("exact", "bf16", "int8"):
        zeros = torch.zeros(numel, device=device)
        (exp_avg, m_scale), (exp_avg_sq, v_scale) = stored(zeros, format, True), stored(zeros, format, False)
        weights, grad = torch.zeros(numel, device=device), torch.empty(numel, device=device)
        run = AdamRun(weights, grad, exp_avg, exp_avg_sq, None, None, m_scale, v_scale)
        for step in range(1, steps + 1):
            grad.copy_(weights - target + 0.1 * randn(numel, device, 100 + step))
            adam_pass(run, AdamSettings(lr=0.05, betas=(0.9, 0.95)), step)
        ends[format] = weights
    way = ends["exact"].norm()
    assert way > 0.3 * target.norm()
    print({format: float((end - ends["exact"]).norm() / way) for format, end in ends.items()})
    assert (ends["bf16"] - ends["exact"]).norm() < 0.005 * way
    assert (ends["int8"] - ends["exact"]).norm() < 0.03 * way
