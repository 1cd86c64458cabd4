"""Training beside plain torch on the same device, with delays where a missing wait would show."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zeropage as zp
from benchmarks import models
from benchmarks.competitors.base import optimizer_settings
from benchmarks.competitors.plain import Masters
from zeropage.memory.device import Copies, CudaLane, Flight, HostLane, Lane

__all__ = ["Verdict", "check_correctness"]

PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("none", "host")
DELAYS = ("no delay", "slow operators", "slow copies")
BARE = "no engine"  # a torch optimizer on the parameters
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Of a loss. In fp32 an optimizer on the host rounds otherwise than one on the device; sums of 16 bits do as well."""

STEPS = 4
TOKENS = 16
LOSS_SCALE = 8.0
CYCLES = 2_000_000  # about a millisecond: far longer than what may go wrong meanwhile
TINY_BUDGET = 1 << 19  # the largest page comes on top: frames are used again all the time


@dataclass(frozen=True)
class Verdict:
    precision: str
    offload: str
    delay: str
    right: bool
    largest_difference: float  # of a loss, relative
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        told = self.problem or f"losses differ by {self.largest_difference:.1e}"
        return f"{'right' if self.right else 'WRONG'}  {self.precision}, offload {self.offload}, {self.delay}: {told}"


def check_correctness(device: torch.device) -> list[Verdict]:
    """Every combination; each is printed as soon as it is known."""
    verdicts = []
    for precision in PRECISIONS:
        reference = _plain(precision, device)
        for offload, delay in itertools.product(OFFLOADS, DELAYS if device.type == "cuda" else DELAYS[:2]):
            verdicts.append(_compare(reference, precision, offload, delay, device))
            print(verdicts[-1], flush=True)
        if precision == "fp32":  # without an engine there are no masters
            for offload in OFFLOADS:
                verdicts.append(_compare(reference, precision, offload, BARE, device))
                print(verdicts[-1], flush=True)
    return verdicts


def _compare(reference: list[float], precision: str, offload: str, delay: str, device: torch.device) -> Verdict:
    try:
        found = _sharded(precision, offload, delay, device)
    except Exception as error:
        return Verdict(precision, offload, delay, False, float("nan"), f"{type(error).__name__}: {error}")
    pairs = zip(found, reference, strict=True)
    worst = max(abs(one - other) / abs(other) if one == one else float("inf") for one, other in pairs)
    return Verdict(precision, offload, delay, worst <= TOLERANCE[precision], worst)


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return models.build("test").to(device)


def _batch(step: int, device: torch.device) -> Tensor:
    with torch.device("cpu"):  # its generator is one of the host
        return models.tokens("test", TOKENS, step, 0).to(device)


def _plain(precision: str, device: torch.device) -> list[float]:
    with device:
        model = _model(device)
        masters = [parameter.detach().clone() for parameter in model.parameters()]
        model.to(DTYPES[precision])
        stepping = Masters([(parameter, 0, parameter.numel()) for parameter in model.parameters()])
        with torch.no_grad():  # masters are what the parameters were before they were cast
            for value, master in zip(stepping.values, masters, strict=True):
                value.copy_(master.view(-1))
        scale, losses = LOSS_SCALE if precision == "fp16" else 1.0, []
        for step in range(STEPS):
            loss = model(_batch(step, device))
            (loss * scale).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(scale)
            stepping.step()
            model.zero_grad()
            losses.append(loss.item())
        return losses


def _sharded(precision: str, offload: str, delay: str, device: torch.device) -> list[float]:
    config: dict[str, Any] = {
        "precision": precision, "resident_bytes": TINY_BUDGET, "bucket_bytes": TINY_BUDGET, "poison_frames": True,
        "offload": {"parameters": offload, "optimizer": offload},
    }  # fmt: skip
    if precision == "fp16":
        config["loss_scale"] = {"dynamic": False, "initial": LOSS_SCALE}
    with device, _lanes(device, slow=delay == "slow copies"):
        model = _model(device)
        if delay == "slow operators":
            _delay(model, device)
        optimizer = torch.optim.AdamW(model.parameters(), **optimizer_settings())
        if delay == BARE:
            return _without_engine(zp.shard(model, config), optimizer, device)
        engine = zp.Engine(model, optimizer, config)
        losses = []
        for step in range(STEPS):
            loss = engine(_batch(step, device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        return losses


def _without_engine(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(_batch(step, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- delays


def _delay(model: nn.Module, device: torch.device) -> None:
    """Operators run late: what they read must still be there."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_: _sleep(device))
            module.register_full_backward_pre_hook(lambda *_: _sleep(device))


def _sleep(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(1e-4)


class _SlowLane(CudaLane):
    """Copies run late: who reads what they bring must wait."""

    def fill(self, copies: Copies) -> Flight:
        with torch.cuda.stream(self._side(self._inward, copies[0][0].device)):
            torch.cuda._sleep(CYCLES)
        return super().fill(copies)

    def fetch(self, source: Tensor) -> tuple[Tensor, Flight]:
        with torch.cuda.stream(self._side(self._outward, source.device)):
            torch.cuda._sleep(CYCLES)
        return super().fetch(source)


class _Serving(HostLane):
    """Takes processors for a device, so that what offload does is run without one as well."""

    def serves(self, device: torch.device) -> bool:
        return True

    def fetch(self, source: Tensor) -> tuple[Tensor, Flight]:
        return super().fetch(source.clone())


@contextmanager
def _lanes(device: torch.device, *, slow: bool) -> Iterator[None]:
    def open_lane(where: torch.device) -> Lane:
        if device.type != "cuda":
            return _Serving()
        return _SlowLane(where) if slow else CudaLane(where)

    with mock.patch("zeropage.construct.open_lane", open_lane):
        yield
