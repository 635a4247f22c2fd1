"""A step's seconds worked out by hand, on machines whose other parts cost nothing; and beside what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests.planner.test_peaks import RESULTS, decoder
from zeor.memory.codecs import Codec
from zeor.memory.coding_speed import speed_of
from zeor.memory.device import default_device
from zeor.planner.bytes import CONTEXT_NBYTES, HOLES
from zeor.planner.machine import MACHINES
from zeor.planner.step_time import StepTime
from zeor.planner.work import CAST_NBYTES, Work, cost_of

FREE = 1e30
WIDTH, BATCH, UNITS = 64, 32, 4
NUMEL = WIDTH * WIDTH
# Only products cost anything: one second each.
MACHINE = zeor.Machine(
    "imagined", 1 << 40, products=2.0 * BATCH * NUMEL, products32=2.0 * BATCH * NUMEL, attention=FREE, hbm=FREE,
    elementwise=FREE, pcie=FREE, launch=0.0, inside=zeor.Link(FREE, 0.0), across=zeor.Link(FREE, 0.0), per_host=4,
)  # fmt: skip


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def one() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def said(machine: zeor.Machine = MACHINE, unit: Any = one, **options: Any) -> StepTime:
    with torch.device("meta"):
        model = nn.Sequential(*[unit() for _ in range(UNITS)])
    inputs = torch.empty(BATCH, WIDTH, device="meta")
    found = zeor.predict(model, inputs=inputs, units=[type(model[0])], gpu=machine, **options).time
    assert found is not None
    return found


def test_products_alone_are_three_of_each_unit_but_the_first_which_has_no_gradient_of_its_input() -> None:
    found = said()
    assert found.forward == pytest.approx(UNITS) and found.backward == pytest.approx(2 * UNITS - 1)
    assert found.seconds == pytest.approx(3 * UNITS - 1)
    assert found.operations == 3 * UNITS * 2.0 * BATCH * NUMEL
    assert found.exposed_seconds == pytest.approx(0.0)


def test_micro_batches_multiply_what_is_computed() -> None:
    assert said(accumulation=3).seconds == pytest.approx(3 * said().seconds)


def test_recomputing_costs_what_backward_needs_of_each_forward_once_more() -> None:
    """The first product of each unit: nobody needs the second's result. One product needs nothing but its input."""
    assert said(unit=Two, recompute=True).seconds == pytest.approx(said(unit=Two).seconds + UNITS)
    assert said(recompute=True).seconds == pytest.approx(said().seconds)


def test_an_update_reads_and_writes_what_it_keeps() -> None:
    """fp32: compute and two moments in and out, the gradient in: 28 bytes for each element; and the norm twice 4."""
    bandwidth = float(UNITS * NUMEL)
    found = said(replace(MACHINE, hbm=bandwidth))
    assert found.update == pytest.approx(28 + 8)
    assert said(replace(MACHINE, hbm=bandwidth), clip=False).update == pytest.approx(28)
    assert said(replace(MACHINE, hbm=bandwidth), clip=False, kernel="stock").update == pytest.approx(3 * 28)
    assert said(replace(MACHINE, hbm=bandwidth), world=4, clip=False).update == pytest.approx(28 / 4)


def test_state_on_the_host_travels_there_and_back() -> None:
    """Two moments of 4 bytes, as the master is compute itself: the next forward waits for what is fetched. Of four
    units the first is exposed wholly, and each of the others by what is more than a unit's second."""
    each = 8 * NUMEL
    found = said(replace(MACHINE, pcie=each / 3.0), offload="host", clip=False)
    assert found.exposed["fetch", "host"] == pytest.approx(3.0 + (UNITS - 1) * (3.0 - 1.0), rel=0.02)


def test_links_count_by_axis() -> None:
    """Eight ranks in two hosts, 1 second a unit's gather inside: 4 (W - 1) / W bytes for each element."""
    unit = 4.0 * NUMEL
    near, far = zeor.Link(unit * 3 / 4, 0.0), zeor.Link(unit / 2 / 5, 0.0)
    machine = replace(MACHINE, inside=near, across=far)
    staged = said(machine, world=8, hierarchy=4, clip=False)
    keys = {*staged.exposed, *staged.hidden}
    total = {key: staged.exposed.get(key, 0.0) + staged.hidden.get(key, 0.0) for key in keys}
    assert total["gather", "gpu"] == pytest.approx(2 * UNITS - 1)  # the last of forward stays for backward
    assert total["reduce", "gpu"] == pytest.approx(UNITS) and total["reduce", "node"] == pytest.approx(5 * UNITS)
    assert total["publish", "node"] == pytest.approx(5 * UNITS)
    plain = said(machine, world=8, stage=3, clip=False)
    assert plain.seconds > staged.seconds  # 11 passes over the slow link in place of 8
    both = plain.exposed["gather", "node"] + plain.hidden.get(("gather", "node"), 0.0)
    assert both == pytest.approx(5 * (2 * UNITS - 1))


def test_what_travels_as_codes_is_encoded_and_decoded_besides() -> None:
    """Four ranks, stage 2, one pass over values and codes: of gradients three quarters are encoded, and as many are
    decoded; of weights a quarter, and all."""
    bandwidth = float(UNITS * NUMEL)
    machine, elements = replace(MACHINE, hbm=bandwidth), (0.75 + 0.75 + 0.25 + 1.0) * bandwidth
    found, exact = (said(machine, world=4, stage=2, clip=False, wire=wire) for wire in ("int8", None))
    assert exact.coding == 0.0 and found.coding == pytest.approx(elements * (4 + 130 / 128) / bandwidth)
    assert found.seconds == pytest.approx(exact.seconds + found.coding) and "coding 13.793" in str(found)
    nibbles = said(machine, world=4, stage=2, clip=False, wire="int4").coding
    assert nibbles == pytest.approx(elements * (4 + 66 / 128) / bandwidth)
    gathers = said(machine, world=4, stage=3, clip=False, wire=zeor.Wire("int8")).coding  # each time
    assert gathers == pytest.approx((2 * UNITS - 1) * 1.25 * NUMEL * (4 + 130 / 128) / bandwidth)


def test_on_the_machine_that_is_here_codecs_are_measured() -> None:
    speed = speed_of(Codec("int8"), default_device())
    found = said(zeor.Machine.here(), world=4, stage=2, clip=False, wire="int8").coding
    elements = UNITS * NUMEL
    assert found == pytest.approx(elements * (1.0 / speed.encode + 1.75 / speed.decode))
    assert said("CPU", world=4, stage=2, wire="int8").coding > 0


def test_a_step_that_nobody_can_hide_is_all_of_its_parts() -> None:
    machine = replace(MACHINE, inside=zeor.Link(4.0 * NUMEL * 3 / 4, 0.0), hides=False)
    found = said(machine, world=4, clip=False)
    assert found.exposed["gather", "ranks"] == pytest.approx(2 * UNITS - 1)
    assert found.exposed["reduce", "ranks"] == pytest.approx(UNITS)
    assert found.seconds == pytest.approx(3 * UNITS - 1 + 3 * UNITS - 1)


def test_time_needs_a_machine_and_a_batch() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    assert zeor.predict(model, gpu="H100").time is None
    assert zeor.predict(model, inputs=torch.empty(2, 4)).time is None
    assert "s a step: forward" in str(zeor.predict(model, inputs=torch.empty(2, 4), gpu="H100").time)


def test_on_the_h200_a_step_is_within_15_percent_of_what_was_measured() -> None:
    """One rank: the runs that benchmarks/results holds."""
    runs = json.loads((RESULTS / "gpu_suite.json").read_text())["runs"]
    alone = [run for run in runs if run["system"] == "zeor" and run["world"] == 1 and not run["compile"]]
    assert len(alone) >= 3
    for run in alone:
        batch = run["batch"], run["tokens"]
        model = decoder(run["size"])
        found = zeor.predict(model, batch=batch, stage=run["stage"], precision="bf16", gpu=MACHINES["H200"]).time
        assert found is not None
        said_rate = batch[0] * batch[1] / found.seconds
        assert said_rate == pytest.approx(run["tokens_per_s"], rel=0.15), (run["size"], run["stage"])


def test_where_all_units_keep_their_activations_a_step_is_as_without_recomputation() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[Two() for _ in range(UNITS)])
    inputs = torch.empty(BATCH, WIDTH, device="meta")
    plain, auto, again = (
        zeor.predict(model, inputs=inputs, units=[Two], gpu=MACHINE, recompute=each) for each in (False, "auto", True)
    )
    assert plain.time is not None and auto.time is not None and again.time is not None
    assert auto.kept == UNITS  # the root computes nothing again, and is not counted
    assert auto.time.seconds == pytest.approx(plain.time.seconds) and again.time.seconds > plain.time.seconds
    a_unit = 2 * BATCH * WIDTH * 4
    assert plain.device_peak <= auto.device_peak <= plain.device_peak + a_unit


WIDE, ROWS = 256, 8192  # wide enough for a product to be worth keeping, and activations larger than all else


class Deep(nn.Module):
    """Backward reads what relu and tanh made; of its products the first is computed again, unless it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)).tanh())


def test_products_are_kept_first_and_then_all_as_memory_grows() -> None:
    product = 2.0 * ROWS * WIDE * WIDE
    machine = replace(MACHINE, products=product, products32=product)
    with torch.device("meta"):
        model = nn.Sequential(*[Deep() for _ in range(UNITS)])

    def foreseen(recompute: Any, limit: int = 1 << 40) -> zeor.Prediction:
        memory = int(limit / (1 - HOLES)) + 1 + CONTEXT_NBYTES
        inputs = torch.empty(ROWS, WIDE, device="meta")
        gpu = replace(machine, memory=memory)
        return zeor.predict(model, inputs=inputs, units=[Deep], gpu=gpu, recompute=recompute)

    plain, products, again = (foreseen(each) for each in (False, "products", True))
    assert plain.time is not None and products.time is not None and again.time is not None
    assert products.time.seconds == pytest.approx(plain.time.seconds)
    assert again.time.seconds == pytest.approx(plain.time.seconds + UNITS)
    a_product = ROWS * WIDE * 4
    assert again.device_peak < products.device_peak < plain.device_peak
    limits = range(again.device_peak, plain.device_peak + 3 * a_product, a_product)
    found = [foreseen("auto", limit) for limit in limits]
    assert all(each.device_peak <= limit for each, limit in zip(found, limits, strict=True))
    kept = [(each.products + each.kept, each.kept) for each in found]
    assert kept == sorted(kept) and kept[0] == (0, 0) and kept[-1] == (UNITS, UNITS) and (UNITS, 0) in kept
    for each, (some, _) in zip(found, kept, strict=True):
        assert each.time is not None
        assert each.time.seconds == pytest.approx(again.time.seconds - some)


def test_products_in_8_bits_cast_what_they_read() -> None:
    machine = replace(MACHINE, products8=FREE, elementwise=1.0)
    work = Work(products=1.0, operands=3.0, nbytes=5.0)
    assert work.seconds(machine, fp8=True) == pytest.approx(5.0 + 3 * CAST_NBYTES)
    assert work.seconds(replace(machine, fused=0.5), compiled=True, fp8=True) == pytest.approx(2.5 + 3 * CAST_NBYTES)
    assert work.seconds(machine) == pytest.approx(5.0 + 1.0 / machine.products)
    traced = cost_of(torch.ops.aten.mm.default, *_products((4, 8), (8, 16)))
    assert traced is not None and traced.operands == 4 * 8 + 8 * 16


def _products(left: tuple[int, int], right: tuple[int, int]) -> tuple[Any, Any, Any]:
    a, b = torch.empty(left, dtype=torch.bfloat16), torch.empty(right, dtype=torch.bfloat16)
    return (a, b), {}, a @ b
