"""The meaning of the one-pass updates (in plain torch) against torch.optim, and which groups they take.

The kernels themselves are tested in tests/gpu/test_kernels_gpu.py.
"""

import subprocess
import sys

import pytest
import torch

from tests.optim.kernels.reference import adam_pass_reference, sgd_pass_reference
from zeor.memory.formats import cast_into, split_into
from zeor.memory.small import decode_into, encode_into, storage_of
from zeor.optim.kernels.adam import MOMENTS, AdamRun, AdamSettings, _log2_in_two_parts
from zeor.optim.kernels.protocol import check_run
from zeor.optim.kernels.registry import supports, unavailable_reason
from zeor.optim.kernels.sgd import SGDRun, SGDSettings

NUMEL = 1003
STEPS = 5

ADAM_CASES = [
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    {"lr": 3e-4, "betas": (0.3, 0.95), "eps": 1e-6},
    {"lr": 1e-2, "betas": (0.0, 0.99)},
    {"lr": torch.tensor(1e-2), "weight_decay": 0.1},
]
SGD_CASES = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"lr": torch.tensor(0.1), "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


def assert_same(got: torch.Tensor, stock: torch.Tensor, settings: AdamSettings | SGDSettings) -> None:
    """Equal in bits; where lr is a tensor stock divides it in fp32 and the pass in fp64, so to rounding."""
    tolerance = 1e-6 if isinstance(settings.lr, torch.Tensor) else 0.0
    torch.testing.assert_close(got, stock, rtol=tolerance, atol=tolerance / 10)


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(NUMEL, generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize("case", ADAM_CASES, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_reference_equals_stock(kind, case):
    parameter = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    run = AdamRun(parameter.detach().clone(), torch.empty(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL))
    optimizer = kind([parameter], foreach=False, **case)
    settings = AdamSettings.from_group(optimizer, optimizer.param_groups[0])
    assert settings.decoupled_weight_decay == (kind is torch.optim.AdamW)
    for step, grad in enumerate(gradients(), start=1):
        parameter.grad = grad.clone()
        optimizer.step()
        adam_pass_reference(run._replace(grad=grad), settings, step if step % 2 else torch.tensor(float(step)))
    state = optimizer.state[parameter]
    assert_same(run.master, parameter.detach(), settings)
    assert_same(run.exp_avg, state["exp_avg"], settings)
    assert_same(run.exp_avg_sq, state["exp_avg_sq"], settings)


@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_sgd_reference_equals_stock(case):
    parameter = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD([parameter], foreach=False, **case)
    settings = SGDSettings.from_group(optimizer.param_groups[0])
    buffer = torch.full((NUMEL,), float("nan")) if settings.momentum else None
    run = SGDRun(parameter.detach().clone(), torch.empty(NUMEL), buffer)
    for step, grad in enumerate(gradients()):
        parameter.grad = grad.clone()
        optimizer.step()
        sgd_pass_reference(run._replace(grad=grad), settings, first=step == 0)
    assert_same(run.master, parameter.detach(), settings)
    if buffer is not None:
        assert_same(buffer, optimizer.state[parameter]["momentum_buffer"], settings)


def test_scale_found_inf_and_compute():
    grad = gradients()[0].bfloat16()
    compute = torch.full((NUMEL,), float("nan"), dtype=torch.bfloat16)
    run = AdamRun(torch.ones(NUMEL), grad, torch.zeros(NUMEL), torch.zeros(NUMEL), compute)
    settings = AdamSettings(lr=0.1)
    adam_pass_reference(run, settings, 1, found_inf=torch.tensor(1.0))
    assert torch.equal(run.master, torch.ones(NUMEL)) and compute.isnan().all()
    adam_pass_reference(run, settings, 1, scale=torch.tensor(0.25), found_inf=torch.tensor(0.0))
    assert torch.equal(run.exp_avg, torch.zeros(NUMEL).lerp_(grad.float() * 0.25, 1 - 0.9))
    expected = torch.empty_like(compute)
    cast_into(expected, run.master)
    assert torch.equal(compute, expected)


def split_of(run: AdamRun | SGDRun) -> AdamRun | SGDRun:
    compute = torch.empty(NUMEL, dtype=torch.bfloat16)
    remainder = torch.empty(NUMEL, dtype=torch.int16)
    split_into(compute, remainder, run.master)
    others = {name: None if tensor is None else tensor.clone() for name, tensor in run._asdict().items()}
    return type(run)(**{**others, "master": None, "compute": compute, "remainder": remainder})


def assert_same_bits(got: AdamRun | SGDRun, expected: AdamRun | SGDRun) -> None:
    for name, tensor in got._asdict().items():
        other = getattr(expected, name)
        assert tensor is other is None or torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("case", ADAM_CASES, ids=str)
def test_adam_on_a_split_master_gives_the_same_bits(case):
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    compute = torch.empty(NUMEL, dtype=torch.bfloat16)
    whole = AdamRun(master, torch.empty(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL), compute)
    split = split_of(whole)
    for step, grad in enumerate(gradients(), start=1):
        for run in (whole, split):
            adam_pass_reference(run._replace(grad=grad), AdamSettings(**case), step, torch.tensor(0.3))
        assert_same_bits(split._replace(grad=grad), split_of(whole._replace(grad=grad)))
        assert torch.equal(split.compute, whole.compute)


@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_sgd_on_a_split_master_gives_the_same_bits(case):
    settings = SGDSettings(**case)
    buffer = torch.zeros(NUMEL) if settings.momentum else None
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    whole = SGDRun(master, torch.empty(NUMEL), buffer, torch.empty(NUMEL, dtype=torch.bfloat16))
    split = split_of(whole)
    for step, grad in enumerate(gradients()):
        for run in (whole, split):
            sgd_pass_reference(run._replace(grad=grad), settings, first=step == 0)
        assert_same_bits(split._replace(grad=grad), split_of(whole._replace(grad=grad)))
        assert torch.equal(split.compute, whole.compute)


def checked(run: AdamRun | SGDRun) -> tuple[int, torch.device]:
    return check_run(run._asdict(), MOMENTS if isinstance(run, AdamRun) else {}, ())


def test_a_run_has_one_whole_or_one_split_master():
    whole = AdamRun(*torch.zeros(4, NUMEL), compute=torch.zeros(NUMEL, dtype=torch.bfloat16))
    split = split_of(whole)
    assert checked(whole) == checked(split) == (NUMEL, torch.device("cpu"))
    for run, word in (
        (whole._replace(master=None), "either a master or"),
        (whole._replace(remainder=split.remainder), "either a master or"),
        (split._replace(compute=None), "needs compute as well"),
        (split._replace(compute=split.compute.half()), "compute is torch.float16, but a pass takes torch.bfloat16$"),
        (split._replace(remainder=split.remainder.int()), "remainder is torch.int32"),
        (split._replace(remainder=split.remainder[1:]), rf"remainder .* {NUMEL} elements"),
        (SGDRun(None, whole.grad), "either a master or"),
    ):
        with pytest.raises(ValueError, match=word):
            checked(run)


def stored(values: torch.Tensor, format: str, signed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype, blocks = storage_of(format, NUMEL, signed)
    codes, scales = torch.empty(NUMEL, dtype=dtype), torch.empty(blocks) if blocks else None
    encode_into(codes, scales, values, signed)
    return codes, scales


@pytest.mark.parametrize("formats", [("int8", "int8"), ("bf16", "bf16"), ("exact", "int8"), ("int8", "bf16")])
@pytest.mark.parametrize("case", ADAM_CASES[:3], ids=str)
def test_small_moments_are_decoded_updated_and_encoded(case, formats):
    """The same bits as the exact pass between a decode and an encode; over a split master too."""
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    compute = torch.empty(NUMEL, dtype=torch.bfloat16)
    zeros = torch.zeros(NUMEL)
    (exp_avg, avg_scale), (exp_avg_sq, sq_scale) = stored(zeros, formats[0], True), stored(zeros, formats[1], False)
    whole = AdamRun(master, torch.empty(NUMEL), exp_avg, exp_avg_sq, compute, None, avg_scale, sq_scale)
    assert whole.small and not whole._replace(exp_avg=zeros, exp_avg_sq=zeros).small
    split, expected = split_of(whole), master.clone()
    for step, grad in enumerate(gradients(), start=1):
        moments = torch.empty(2, NUMEL)
        decode_into(moments[0], whole.exp_avg, whole.exp_avg_scale)
        decode_into(moments[1], whole.exp_avg_sq, whole.exp_avg_sq_scale)
        adam_pass_reference(AdamRun(expected, grad, *moments), AdamSettings(**case), step)
        for run in (whole, split):
            adam_pass_reference(run._replace(grad=grad), AdamSettings(**case), step)
        assert torch.equal(whole.master, expected)
        for run in (whole, split):
            expected_run = run
            for i, signed in enumerate((True, False)):
                codes, scales = stored(moments[i], formats[i], signed)
                expected_run = expected_run._replace(**{run._fields[2 + i]: codes, run._fields[6 + i]: scales})
            assert_same_bits(run, expected_run)
        assert_same_bits(split._replace(grad=grad), split_of(whole._replace(grad=grad)))


def test_scales_fit_their_codes():
    codes, scales = stored(torch.ones(NUMEL), "int8", True)
    squares, square_scales = stored(torch.ones(NUMEL), "int8", False)
    run = AdamRun(*torch.zeros(2, NUMEL), codes, squares, None, None, scales, square_scales)
    assert checked(run) == (NUMEL, torch.device("cpu"))
    for wrong, word in (
        (run._replace(exp_avg_scale=None), "exp_avg, 1003 elements of torch.int8, goes with 4 contiguous scales"),
        (run._replace(exp_avg_sq_scale=square_scales[1:]), "the run has 3 on cpu"),
        (run._replace(exp_avg=squares), "exp_avg is torch.uint8"),
        (run._replace(exp_avg=torch.zeros(NUMEL)), "goes with no contiguous scales"),
        (run._replace(exp_avg_scale=scales.double()), "exp_avg_scale is torch.float64"),
    ):
        with pytest.raises(ValueError, match=word):
            checked(wrong)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_supports_the_three_stock_classes(kind):
    optimizer = kind([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], lr=torch.tensor(0.1))
    assert supports(optimizer, optimizer.param_groups[0]) is None


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("kind", "arguments", "word"),
    [
        (MyAdam, {}, "MyAdam is not exactly"),
        (torch.optim.NAdam, {}, "NAdam is not exactly"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.AdamW, {"differentiable": True}, "differentiable"),
        (torch.optim.SGD, {"differentiable": True}, "differentiable"),
        (torch.optim.SGD, {"weight_decay": torch.tensor(0.1)}, "weight_decay is a tensor"),
        (torch.optim.SGD, {"lr": torch.tensor(0.1, requires_grad=True)}, "lr requires grad"),
        (torch.optim.Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas is a tensor"),
    ],
)
def test_supports_says_why_not(kind, arguments, word):
    optimizer = kind([torch.nn.Parameter(torch.zeros(3))], **arguments)
    assert word in supports(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_supports_names_a_dtype_without_an_fp32_master(dtype):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=dtype))])
    assert str(dtype) in supports(optimizer, optimizer.param_groups[0])


def test_a_cpu_has_no_pass():
    assert "not cpu" in unavailable_reason(torch.device("cpu"))


def test_importing_the_module_leaves_triton_and_the_device_alone():
    # torch itself may bring Triton along: only what this module adds counts.
    program = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "import zeor.optim.kernels.registry\n"
        "assert ('triton' in sys.modules) == before and 'zeor.optim.kernels.triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_log2_in_two_parts_carries_48_bits():
    for beta in (0.9, 0.95, 0.999, 0.99999):
        high, low = _log2_in_two_parts(beta)
        for step in (1, 10, 100_000):
            assert 2.0 ** ((high + low) * step) == pytest.approx(beta**step, rel=1e-9, abs=1e-300)
    assert _log2_in_two_parts(0.0) == (float("-inf"), 0.0)
