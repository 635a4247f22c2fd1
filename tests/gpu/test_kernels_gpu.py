"""The Triton passes against plain torch and against torch.optim.

On a machine without a GPU but with Triton, its interpreter runs the same tests (slowly, but all of them save
those that need the real device):  TRITON_INTERPRET=1 python -m pytest tests/gpu/test_kernels_gpu.py
"""

import os

import numpy as np
import pytest
import torch

from tests.optim.kernels.reference import adam_pass_reference, sgd_pass_reference
from zeor.memory.formats import cast_into, join_into, split_into
from zeor.optim.kernels.adam import AdamRun, AdamSettings, adam_pass
from zeor.optim.kernels.protocol import Launch
from zeor.optim.kernels.registry import unavailable_reason
from zeor.optim.kernels.sgd import SGDRun, SGDSettings, sgd_pass

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]  # the mark skips a test where there is no GPU
ODD_SIZES = [1, 7, 1023, 1024, 1025, 4099]
NAN = float("nan")

ADAM_CASES = [
    AdamSettings(lr=1e-2),
    AdamSettings(lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    AdamSettings(lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    AdamSettings(lr=1e-2, weight_decay=0.1),
    AdamSettings(lr=3e-4, weight_decay=0.1, maximize=True),
    AdamSettings(lr=3e-4, betas=(0.3, 0.95), eps=1e-6),
    AdamSettings(lr=1e-2, betas=(0.0, 0.99)),
]
SGD_CASES = [
    SGDSettings(lr=0.1),
    SGDSettings(lr=0.1, weight_decay=0.01, maximize=True),
    SGDSettings(lr=0.1, momentum=0.9),
    SGDSettings(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    SGDSettings(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True),
]


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        pytest.importorskip("triton")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    assert unavailable_reason(torch.device("cuda:0")) is None
    return torch.device("cuda:0")


@pytest.fixture
def real_device(device):
    if INTERPRETED:
        pytest.skip("the interpreter has no streams, caches or large memory")
    return device


def randn(numel: int, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)


def make_adam_run(numel, device, grad_dtype=torch.bfloat16, compute_dtype=torch.bfloat16) -> AdamRun:
    """In mid-training, with moments that are not zero. Compute is poisoned: all of it must be written."""
    compute = None
    if compute_dtype is not None:
        compute = torch.full((numel,), NAN, dtype=compute_dtype, device=device)
    return AdamRun(
        randn(numel, device, 0),
        randn(numel, device, 1).to(grad_dtype),
        randn(numel, device, 2) * 0.1,
        randn(numel, device, 3).square() * 0.1,
        compute,
    )


def make_sgd_run(numel, device, settings, grad_dtype=torch.bfloat16) -> SGDRun:
    compute = torch.full((numel,), NAN, dtype=torch.bfloat16, device=device)
    buffer = randn(numel, device, 2) if settings.momentum else None
    return SGDRun(randn(numel, device, 0), randn(numel, device, 1).to(grad_dtype), buffer, compute)


def copy_of(run):
    return type(run)(*(None if t is None else t.clone() for t in run))


def part_of(run, part: slice):
    return type(run)(*(None if t is None else t[part] for t in run))


def split_of(run):
    """The same run with its master split; everything is copied."""
    compute = torch.empty_like(run.master, dtype=torch.bfloat16)
    remainder = torch.empty_like(run.master, dtype=torch.int16)
    split_into(compute, remainder, run.master)
    return copy_of(run)._replace(master=None, compute=compute, remainder=remainder)


def assert_same_bits(got, expected) -> None:
    for name, tensor in got._asdict().items():
        other = getattr(expected, name)
        assert tensor is other is None or torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def assert_runs_agree(got, expected) -> None:
    """fp32 to a few units in the last place; compute is exactly the cast of the run's own master."""
    for name, tensor in got._asdict().items():
        if name != "compute" and tensor is not None:
            torch.testing.assert_close(
                tensor,
                getattr(expected, name),
                rtol=1e-6,
                atol=3e-7,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    if got.compute is not None:
        cast = torch.empty_like(got.compute)
        cast_into(cast, got.master)
        assert torch.equal(got.compute.view(torch.int16), cast.view(torch.int16))


@pytest.mark.parametrize("numel", ODD_SIZES)
@pytest.mark.parametrize("settings", ADAM_CASES, ids=str)
def test_adam_against_plain_torch(device, settings, numel):
    got = make_adam_run(numel, device)
    expected = copy_of(got)
    scale = torch.tensor(0.3, device=device)
    adam_pass(got, settings, 3, scale)
    adam_pass_reference(expected, settings, 3, scale)
    assert_runs_agree(got, expected)


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adam_dtypes(device, grad_dtype, compute_dtype):
    got = make_adam_run(1500, device, grad_dtype, compute_dtype)
    expected = copy_of(got)
    adam_pass(got, ADAM_CASES[1], 3)
    adam_pass_reference(expected, ADAM_CASES[1], 3)
    assert_runs_agree(got, expected)


@pytest.mark.parametrize("numel", ODD_SIZES)
@pytest.mark.parametrize("settings", SGD_CASES, ids=str)
@pytest.mark.parametrize("first", [False, True, "on device"])
def test_sgd_against_plain_torch(device, settings, numel, first):
    got = make_sgd_run(numel, device, settings)
    expected = copy_of(got)
    if first and got.momentum_buffer is not None:
        got.momentum_buffer.fill_(NAN)
    scale = torch.tensor(0.3, device=device)
    sgd_pass(got, settings, torch.tensor(True, device=device) if first == "on device" else first, scale)
    sgd_pass_reference(expected, settings, bool(first), scale)
    assert_runs_agree(got, expected)
    sgd_pass(got, settings, torch.tensor(False, device=device) if first == "on device" else False, scale)
    sgd_pass_reference(expected, settings, False, scale)
    assert_runs_agree(got, expected)


def fused_rounding(beta: float) -> float:
    """How far 1 - beta is off, relative to itself, when beta is rounded to fp32 first.

    Stock's fused kernel on CUDA does so since torch 2.11 (pytorch/pytorch#172505 and #173224); its other
    implementations subtract in fp64, and so does the pass. At 0.999 it is 1.3e-5, a factor common to every
    gradient in the moment: the moment is off by that factor and no more. At a beta that is itself an fp32
    number it is zero, and the fused kernel must agree as closely as the others.
    """
    return abs((1 - float(np.float32(beta))) / (1 - beta) - 1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (1 - 2**-3, 1 - 2**-10)])
@pytest.mark.parametrize("on_device", ["nothing", "step", "lr", "step and lr"])
def test_adam_against_stock_over_steps(device, kind, fused, betas, on_device):
    numel = 2050
    parameter = torch.nn.Parameter(randn(numel, device, 0))
    optimizer = kind([parameter], lr=1e-2, betas=betas, weight_decay=0.1, fused=fused, foreach=False)
    settings = AdamSettings.from_group(optimizer, optimizer.param_groups[0])
    if "lr" in on_device:
        settings = AdamSettings(
            torch.tensor(1e-2, device=device),
            betas=betas,
            weight_decay=0.1,
            decoupled_weight_decay=settings.decoupled_weight_decay,
        )
    moments = torch.zeros(2, numel, device=device)
    run = AdamRun(parameter.detach().clone(), parameter.detach(), moments[0], moments[1])
    for step in range(1, 9):
        parameter.grad = randn(numel, device, step)
        optimizer.step()
        count = torch.tensor(float(step), device=device) if "step" in on_device else step
        adam_pass(run._replace(grad=parameter.grad), settings, count)
    state = optimizer.state[parameter]
    torch.testing.assert_close(run.master, parameter.detach(), rtol=2e-6, atol=5e-7)
    for name, beta in (("exp_avg", betas[0]), ("exp_avg_sq", betas[1])):
        rtol = 2e-6 + (fused_rounding(beta) if fused and device.type == "cuda" else 0.0)
        torch.testing.assert_close(getattr(run, name), state[name], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("settings", SGD_CASES, ids=str)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_sgd_against_stock_over_steps(device, settings, tensor_lr):
    numel = 2050
    parameter = torch.nn.Parameter(randn(numel, device, 0))
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    arguments = {name: getattr(settings, name) for name in names}
    optimizer = torch.optim.SGD([parameter], foreach=False, **arguments)
    if tensor_lr:
        settings = SGDSettings(**{**arguments, "lr": torch.tensor(settings.lr, device=device)})
    buffer = torch.full((numel,), NAN, device=device) if settings.momentum else None
    run = SGDRun(parameter.detach().clone(), parameter.detach(), buffer)
    for step in range(6):
        parameter.grad = randn(numel, device, step)
        optimizer.step()
        sgd_pass(run._replace(grad=parameter.grad), settings, first=step == 0)
    torch.testing.assert_close(run.master, parameter.detach(), rtol=2e-6, atol=5e-7)
    if buffer is not None:
        stock = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(buffer, stock, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("numel", ODD_SIZES)
@pytest.mark.parametrize("settings", ADAM_CASES, ids=str)
def test_adam_on_a_split_master_gives_the_same_bits(device, settings, numel):
    whole = make_adam_run(numel, device)
    split = split_of(whole)
    scale = torch.tensor(0.3, device=device)
    for step in range(1, 5):
        grad = randn(numel, device, 10 + step).bfloat16()
        for run in (whole, split):
            run.grad.copy_(grad)
            adam_pass(run, settings, step, scale)
        assert_same_bits(split, split_of(whole))
        assert torch.equal(split.compute, whole.compute)


@pytest.mark.parametrize("numel", [1, 1025, 4099])
@pytest.mark.parametrize("settings", SGD_CASES, ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_sgd_on_a_split_master_gives_the_same_bits(device, settings, numel, on_device):
    whole = make_sgd_run(numel, device, settings)
    split = split_of(whole)
    for step in range(4):
        grad = randn(numel, device, 10 + step).bfloat16()
        first = torch.tensor(step == 0, device=device) if on_device else step == 0
        for run in (whole, split):
            run.grad.copy_(grad)
            sgd_pass(run, settings, first)
        assert_same_bits(split, split_of(whole))
        assert torch.equal(split.compute, whole.compute)


@pytest.mark.parametrize("settings", [ADAM_CASES[1], SGD_CASES[3]], ids=str)
def test_a_split_master_against_plain_torch(device, settings):
    is_adam = isinstance(settings, AdamSettings)
    whole = make_adam_run(1500, device) if is_adam else make_sgd_run(1500, device, settings)
    got, expected = split_of(whole), split_of(whole)
    if is_adam:
        adam_pass(got, settings, 3)
        adam_pass_reference(expected, settings, 3)
    else:
        sgd_pass(got, settings)
        sgd_pass_reference(expected, settings)
    joined = []
    for run in (got, expected):
        master = torch.empty(1500, device=device)
        join_into(master, run.compute, run.remainder)
        joined.append(run._replace(master=master, remainder=None))
    assert_runs_agree(*joined)


def hard_bits(device) -> torch.Tensor:
    """Every upper half with a tie, its neighbours and some others below: zeros, denormals, infinities, NaNs."""
    upper = torch.arange(1 << 16, dtype=torch.int64, device=device) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xBEEF], device=device)
    bits = (upper[:, None] | lower).reshape(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


def test_split_and_join_on_the_device(real_device):
    """tests/memory/test_formats.py tries every bit on a CPU; here the device must say the same."""
    bits = hard_bits(real_device)
    halves = []
    for master in (bits.view(torch.float32), bits.cpu().view(torch.float32)):
        compute = torch.empty_like(master, dtype=torch.bfloat16)
        remainder = torch.empty_like(master, dtype=torch.int16)
        split_into(compute, remainder, master)
        joined = torch.empty_like(master)
        join_into(joined, compute, remainder)
        assert torch.equal(joined.isnan(), master.isnan())
        same = joined.view(torch.int32) == master.view(torch.int32)
        assert bool((same | master.isnan()).all())
        halves.append((compute.view(torch.int16).cpu(), remainder.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*halves))


def test_an_update_of_nothing_keeps_every_bit_of_a_split_master(device):
    """Zero gradients: what is read and written again must be what was there, whatever the bits."""
    master = hard_bits(device).view(torch.float32)
    grad = torch.zeros_like(master, dtype=torch.bfloat16)
    run = split_of(SGDRun(master, grad))
    before = copy_of(run)
    sgd_pass(run, SGDSettings(lr=0.5))  # not 0.0: Triton 3.6 negates it to +0.0, and -0.0 loses its sign
    assert_same_bits(run, before)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95, 0.999, 0.99999])
@pytest.mark.parametrize("step", [1, 2, 10, 1000, 1_000_000])
def test_bias_corrections_made_on_the_device_are_precise(device, beta, step):
    """With moments of one the update is lr / (1 - beta1**t) * sqrt(1 - beta2**t): nothing cancels."""

    def update(count):
        ones = torch.ones(4, 16, device=device)
        run = AdamRun(torch.zeros(16, device=device), *ones[:3])
        adam_pass(run, AdamSettings(lr=1.0, betas=(beta, beta), eps=0.0), count)
        return run.master

    on_device = update(torch.tensor(float(step), device=device))
    torch.testing.assert_close(on_device, update(step), rtol=5e-7, atol=0.0)
    exact = -((1 - beta**step) ** -0.5)
    torch.testing.assert_close(on_device.double().cpu(), torch.full((16,), exact).double(), rtol=5e-7, atol=0.0)


@pytest.mark.parametrize("numel", [1000, 5000])
def test_found_inf_writes_nothing_and_zero_writes_all(device, numel):
    settings = SGDSettings(lr=0.1, momentum=0.9)
    for run, update in (
        (make_adam_run(numel, device), lambda run, found: adam_pass(run, ADAM_CASES[1], 1, None, found)),
        (
            make_sgd_run(numel, device, settings),
            lambda run, found: sgd_pass(run, settings, True, None, found),
        ),
        (
            split_of(make_adam_run(numel, device)),
            lambda run, found: adam_pass(run, ADAM_CASES[1], 1, None, found),
        ),
    ):
        before = copy_of(run)
        for found in (1.0, 3.0, NAN):
            update(run, torch.tensor(found, device=device))
        assert_same_bits(run, before)
        update(run, torch.tensor(0.0, device=device))
        assert not run.compute.isnan().any()
        kept = "master" if run.remainder is None else "remainder"
        assert not torch.equal(getattr(run, kept), getattr(before, kept))


@pytest.mark.parametrize("split", [False, True])
def test_nothing_is_written_past_the_end(device, split):
    numel, guard = 1027, 64
    whole = make_adam_run(numel + guard, device)
    whole = split_of(whole) if split else whole
    before = copy_of(whole)
    adam_pass(part_of(whole, slice(numel)), ADAM_CASES[1], 1)
    assert_same_bits(part_of(whole, slice(numel, None)), part_of(before, slice(numel, None)))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("cut", [1, 3, 1024, 1301])
def test_a_cut_changes_no_bit(device, cut, split):
    """Full blocks, tails and unaligned starts all round alike. See Note [rounding is written out]."""
    whole = make_adam_run(3000, device)
    whole = split_of(whole) if split else whole
    parts = copy_of(whole)
    scale = torch.tensor(0.3, device=device)
    adam_pass(whole, ADAM_CASES[1], 3, scale)
    adam_pass(part_of(parts, slice(cut)), ADAM_CASES[1], 3, scale)
    adam_pass(part_of(parts, slice(cut, None)), ADAM_CASES[1], 3, scale)
    assert_same_bits(parts, whole)


def test_block_size_changes_no_bit(device):
    runs = [make_adam_run(5000, device) for _ in range(3)]
    for run, launch in zip(runs, (Launch(512, 4), Launch(1024, 8), Launch(2048, 4))):
        adam_pass(run, ADAM_CASES[1], 3, launch=launch)
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def test_inf_and_nan_reach_compute_as_in_the_cast(device):
    run = make_adam_run(1030, device, grad_dtype=torch.float32)
    run.master[:3] = torch.tensor([float("inf"), float("-inf"), NAN], device=device)
    run.master[3:5] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32, device=device).view(torch.float32)
    run.grad[5:6] = torch.tensor([0x7FFFFFFF], dtype=torch.int32, device=device).view(torch.float32)
    split = split_of(run)
    adam_pass(run, ADAM_CASES[0], 1)
    adam_pass(split, ADAM_CASES[0], 1)
    assert torch.equal(split.compute.view(torch.int16), run.compute.view(torch.int16))
    assert torch.equal(split.remainder, split_of(run).remainder)
    assert not split.remainder[:6].any()
    cast = torch.empty_like(run.compute)
    cast_into(cast, run.master)
    assert torch.equal(run.compute.view(torch.int16), cast.view(torch.int16))
    assert run.compute.isnan().sum() == 4


def test_wrong_tensors_are_named(device):
    run = make_adam_run(100, device)
    with pytest.raises(ValueError, match=r"exp_avg .* 100 elements"):
        adam_pass(run._replace(exp_avg=run.exp_avg[:50]), ADAM_CASES[0], 1)
    with pytest.raises(ValueError, match=r"exp_avg_sq is torch.float16"):
        adam_pass(run._replace(exp_avg_sq=run.exp_avg_sq.half()), ADAM_CASES[0], 1)
    with pytest.raises(ValueError, match="momentum_buffer"):
        sgd_pass(SGDRun(run.master, run.grad), SGDSettings(lr=0.1, momentum=0.9))
    split = split_of(run)
    with pytest.raises(ValueError, match="either a master or"):
        adam_pass(run._replace(remainder=split.remainder), ADAM_CASES[0], 1)
    with pytest.raises(ValueError, match="needs compute as well"):
        adam_pass(split._replace(compute=None), ADAM_CASES[0], 1)
    for empty in (part_of(run, slice(0)), part_of(split, slice(0))):
        adam_pass(empty, ADAM_CASES[0], 1)  # nothing to launch


def test_numbers_that_vary_do_not_recompile_and_nothing_waits(real_device):
    from zeor.optim.kernels.triton import adam_kernel

    def compiled_count() -> int:
        return len(adam_kernel.device_caches[real_device.index][0])

    def update(numel, lr, step, beta1):
        adam_pass(part_of(buffers, slice(numel)), AdamSettings(lr=lr, betas=(beta1, 0.999)), step, scale)

    buffers = make_adam_run(5000, real_device)
    scale = torch.tensor(0.3, device=real_device)
    lr_on_device, step_on_device = (
        torch.tensor([1e-3], device=real_device),
        torch.ones((), device=real_device),
    )
    update(1024, 1e-3, 2, 0.9)
    update(1024, lr_on_device, step_on_device, 0.9)
    before = compiled_count()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for numel, lr, step, beta1 in ((1, 1.0, 1, 0.85), (16, 0.0, 16, 0.95), (4999, 1e-5, 1000, 0.8)):
            update(numel, lr, step, beta1)
            update(numel, lr_on_device, step_on_device, beta1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled_count() == before


@pytest.mark.long
def test_a_run_longer_than_32_bits(real_device):
    numel = 2**31 + 1037
    if torch.cuda.mem_get_info(real_device)[0] < 20 * numel // 2:
        pytest.skip("needs 20 GiB of GPU memory")
    master = torch.zeros(numel, device=real_device)
    grad = torch.ones(numel, dtype=torch.bfloat16, device=real_device)
    compute = torch.zeros(numel, dtype=torch.bfloat16, device=real_device)
    sgd_pass(SGDRun(master, grad, None, compute), SGDSettings(lr=0.5))
    for tensor in (master, compute):
        assert tensor.min() == -0.5 and tensor.max() == -0.5
