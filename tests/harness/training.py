"""A sharded training must equal the plain one: `assert_same_training` runs both and compares.

The reference is one process and one plain model. For each micro-batch, each rank's loss / accumulate goes
backward in the order of ranks; its gradients, each times 1 / world, are added up in exactly that order, in
fp32 where they have 16 bits; then come clipping and the optimizer. Each rank has its own random numbers and
its own buffers, as it would have: they are put in place before its turn and taken back after it.

Everything that goes to the ranks is sent by name: `build`, `batches`, `loss`, `optimizer` and the like are
functions at the top level of a module (or classes, or functools.partial of them), never lambdas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models import mean_square
from tests.harness.pool import run

__all__ = ["Record", "SameTraining", "TrainingMismatch", "adamw", "assert_same_training", "tolerance_of"]

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LINES = 40
"""How many differences a `TrainingMismatch` lists."""

SEED = 0

EXACT_TRANSPORTS = ("shared", "local")


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a training that names none."""
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass(frozen=True)
class Training:
    """What both sides are to do."""

    build: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Any]
    world: int
    steps: int
    accumulate: int
    clip: float | None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    optimizer_first: bool
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    loss: Callable[[Any, Any], Tensor]
    before_step: Callable[[nn.Module, int], None] | None
    inspect: Callable[[nn.Module, Any], Any] | None
    config: Mapping[str, Any]
    engine: bool
    init: bool
    call_engine: bool


@dataclass
class Record:
    """What one rank saw of a training."""

    losses: list[list[float]] = field(default_factory=list)
    """By step and micro-batch."""

    grad_norms: list[float] = field(default_factory=list)
    """By step; empty without clipping."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    extra: Any = None
    """What `inspect` returned; nothing on the side of the reference."""


@dataclass(frozen=True)
class SameTraining:
    """Both sides of a comparison that went well: one record a rank."""

    reference: list[Record]
    ranks: list[Record]


class TrainingMismatch(AssertionError):
    """The sharded training differs from plain torch; the message lists where."""


def assert_same_training(
    build: Callable[[], nn.Module],
    batches: Callable[[int, int, int], Any],
    *,
    world: int = 2,
    transport: str = "shared",
    steps: int = 5,
    accumulate: int = 1,
    clip: float | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    optimizer_first: bool = False,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    loss: Callable[[Any, Any], Tensor] = mean_square,
    before_step: Callable[[nn.Module, int], None] | None = None,
    inspect: Callable[[nn.Module, Any], Any] | None = None,
    config: Mapping[str, Any] | None = None,
    engine: bool = True,
    init: bool = False,
    call_engine: bool = True,
    exact: bool | None = None,
    tolerance: float | None = None,
    timeout: float = 60.0,
) -> SameTraining:
    """Train plain and sharded; compare losses of each step, gradient norms, final parameters and buffers.

    Args:
        build: makes the model, from torch's present seed.
        batches: the batch of (step, micro-batch, rank).
        clip: the gradient norm to clip to.
        optimizer: makes the optimizer from the list of all parameters.
        optimizer_first: whether it is made before the model is sharded.
        scheduler: makes a learning-rate scheduler, stepped once a step.
        loss: the loss of (model, batch); the engine stands for the model if `call_engine`.
        before_step: called with (model, step) on both sides, for instance to freeze parameters.
        inspect: called at the end with (model, engine or None) on each rank; its result is in `extra`.
        config: settings beyond transport, accumulate and clip_grad_norm, which come from the arguments.
            The reference follows `precision` and the initial loss scale; it never skips a step.
        engine: through `zp.Engine`; if false a plain loop with a torch optimizer on paged parameters.
        init: build under `zp.init` rather than `zp.shard` the built model.
        exact: bit for bit. By default with at most two ranks over shared memory or alone, except where
            the engine clips: it adds up squares by slice, so that the norm's last bit may differ.
        tolerance: otherwise, the greatest difference relative to the greatest value of each tensor; by default
            that of `tolerance_of`.

    Raises:
        TrainingMismatch: the two differ.
    """
    settings = {"transport": transport} | dict(config or {})
    if engine:
        settings |= {"accumulate": accumulate, "clip_grad_norm": clip}
    training = Training(
        build=build,
        batches=batches,
        world=world,
        steps=steps,
        accumulate=accumulate,
        clip=clip,
        optimizer=optimizer,
        optimizer_first=optimizer_first,
        scheduler=scheduler,
        loss=loss,
        before_step=before_step,
        inspect=inspect,
        config=settings,
        engine=engine,
        init=init,
        call_engine=call_engine,
    )
    if exact is None:
        exact = world <= 2 and transport in EXACT_TRANSPORTS and not (engine and clip is not None)
    ranks = run(world, train_sharded, training, timeout=timeout)
    reference = train_plain(training)
    if tolerance is None:
        tolerance = tolerance_of(world)
    assert_same_records(reference, ranks, tolerance=0.0 if exact else tolerance)
    return SameTraining(reference, ranks)


def tolerance_of(world: int) -> float:
    """The greatest difference where bits may differ, relative to the greatest value of the tensor.

    A third cannot be told exactly, so the sums of three ranks differ from the reference's by a rounding, in which
    elements depends on the processor. Where the three cancel to a hundredth of their size it is a hundred times as
    much of the sum, and Adam moves by the sum's relative size: 100 x 6e-8 of a step.
    """
    return 1e-6 if world <= 2 else 1e-5


# --- the reference ----------------------------------------------------------------------------------


def train_plain(training: Training) -> list[Record]:
    """One plain model that stands for all ranks; one record a rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = training.build()
        ranks = _PlainRanks(model, training.world)
        optimizer, masters = _plain_optimizer(training, model)
        scheduler = training.scheduler and training.scheduler(optimizer)
        for step in range(training.steps):
            if training.before_step:
                training.before_step(model, step)
            sums = _plain_backwards(training, model, ranks, step)
            for parameter, master in masters.items():
                master.grad = None if parameter not in sums else sums[parameter].to(master.dtype)
            if training.clip is not None:
                norm = nn.utils.clip_grad_norm_(masters.values(), training.clip)
                for record in ranks.records:
                    record.grad_norms.append(norm.item())
            optimizer.step()
            _write_back(masters)
            if scheduler:
                scheduler.step()
            for parameter in masters.values():
                parameter.grad = None
    ranks.finish()
    return ranks.records


def _plain_backwards(training: Training, model: nn.Module, ranks: _PlainRanks, step: int) -> dict[nn.Parameter, Tensor]:
    """All backwards of one step; the averaged gradient of each parameter that got one."""
    sums: dict[nn.Parameter, Tensor] = {}
    loss_scale = _loss_scale(training)
    for record in ranks.records:
        record.losses.append([])
    for micro in range(training.accumulate):
        for rank in range(training.world):
            with ranks.turn(rank) as record:
                loss = training.loss(model, training.batches(step, micro, rank))
                record.losses[step].append(loss.item())
                if loss.requires_grad:
                    (loss / training.accumulate * loss_scale).backward()
            _move_gradients(model, sums, 1 / training.world / loss_scale)
    return sums


def _move_gradients(model: nn.Module, sums: dict[nn.Parameter, Tensor], factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        parameter.grad = None
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * factor
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient


class _PlainRanks:
    """What is each rank's own in a plain model that stands for all: its random numbers and buffers."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self.records = [Record() for _ in range(world)]
        self._model = model
        self._random = [torch.get_rng_state() for _ in range(world)]
        self._buffers = [self._copy_buffers() for _ in range(world)]

    @contextmanager
    def turn(self, rank: int) -> Iterator[Record]:
        """Inside, the model is that of `rank`."""
        torch.set_rng_state(self._random[rank])
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in self._buffers[rank]:
                    buffer.copy_(self._buffers[rank][name])
        yield self.records[rank]
        self._random[rank] = torch.get_rng_state()
        self._buffers[rank] = self._copy_buffers()

    def finish(self) -> None:
        for record, buffers in zip(self.records, self._buffers, strict=True):
            record.parameters = {name: _plain_copy(p) for name, p in self._model.named_parameters()}
            record.buffers = buffers

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: _plain_copy(buffer) for name, buffer in self._model.named_buffers()}


_Masters = dict[nn.Parameter, nn.Parameter]
"""The parameter that the optimizer sees, by parameter of the model: itself, or its fp32 master."""


def _plain_optimizer(training: Training, model: nn.Module) -> tuple[torch.optim.Optimizer, _Masters]:
    """Through the engine, trainable 16-bit parameters have fp32 masters and fp32 sums of gradients.

    With `precision` the masters keep what the parameters were before they were cast.
    """
    masters: _Masters = {}
    for parameter in model.parameters():
        exact = parameter.detach().clone()
        if training.engine and (parameter.requires_grad or training.config.get("cast_frozen")):
            parameter.data = parameter.data.to(DTYPES[training.config.get("precision")] or parameter.dtype)
        small = parameter.dtype in (torch.bfloat16, torch.float16) and parameter.requires_grad
        masters[parameter] = nn.Parameter(exact.float()) if small and training.engine else parameter
    return training.optimizer(list(masters.values())), masters


def _loss_scale(training: Training) -> float:
    """The scale of every step: that of an fp16 training which never overflows nor grows."""
    if not training.engine or training.config.get("precision") != "fp16":
        return 1.0
    return training.config.get("loss_scale", {}).get("initial", 65536.0)


@torch.no_grad()
def _write_back(masters: _Masters) -> None:
    for parameter, master in masters.items():
        if master is not parameter:
            parameter.copy_(master)


# --- the ranks --------------------------------------------------------------------------------------


def train_sharded(training: Training) -> Record:
    """The same training on this rank of a sharded model."""
    return _train_with_engine(training) if training.engine else _train_in_plain_loop(training)


def _train_with_engine(training: Training) -> Record:
    import zeropage as zp

    model, optimizer, scheduler = _build_sharded(training)
    engine = zp.Engine(model, optimizer, training.config, lr_scheduler=scheduler)
    record = Record()
    for step in range(training.steps):
        if training.before_step:
            training.before_step(model, step)
        record.losses.append([])
        for micro in range(training.accumulate):
            batch = training.batches(step, micro, _rank())
            loss = training.loss(engine if training.call_engine else model, batch)
            record.losses[step].append(loss.item())
            if loss.requires_grad:
                engine.backward(loss)
            result = engine.step()
        if training.clip is not None:
            record.grad_norms.append(float(result.grad_norm))
    _finish(record, training, model, engine)
    engine.close()
    return record


def _train_in_plain_loop(training: Training) -> Record:
    model, optimizer, scheduler = _build_sharded(training)
    record = Record()
    for step in range(training.steps):
        if training.before_step:
            training.before_step(model, step)
        record.losses.append([])
        for micro in range(training.accumulate):
            loss = training.loss(model, training.batches(step, micro, _rank()))
            record.losses[step].append(loss.item())
            if loss.requires_grad:
                (loss / training.accumulate).backward()
        if training.clip is not None:
            record.grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), training.clip).item())
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
    _finish(record, training, model, None)
    torch.distributed.barrier()  # over messages, no rank may let go of its slices while another still reads them
    return record


def _build_sharded(training: Training) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    import zeropage as zp

    torch.manual_seed(SEED)
    if training.init:
        with zp.init(training.config):
            model = training.build()
        optimizer = training.optimizer(list(model.parameters()))
    elif training.optimizer_first:
        model = training.build()
        optimizer = training.optimizer(list(model.parameters()))
        zp.shard(model, training.config)
    else:
        model = zp.shard(training.build(), training.config)
        optimizer = training.optimizer(list(model.parameters()))
    return model, optimizer, training.scheduler and training.scheduler(optimizer)


def _finish(record: Record, training: Training, model: nn.Module, engine: Any) -> None:
    import zeropage as zp

    record.parameters = {name: _plain_copy(zp.full(p)) for name, p in model.named_parameters()}
    record.buffers = {name: _plain_copy(buffer) for name, buffer in model.named_buffers()}
    if training.inspect:
        record.extra = training.inspect(model, engine)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _plain_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


# --- the comparison ---------------------------------------------------------------------------------


def assert_same_records(reference: list[Record], ranks: list[Record], *, tolerance: float) -> None:
    """Raise `TrainingMismatch` with every difference greater than `tolerance` (0: any bit), rank by rank."""
    found = [
        f"rank {rank}: {difference}"
        for rank, (expected, got) in enumerate(zip(reference, ranks, strict=True))
        for difference in _differences(expected, got, tolerance)
    ]
    if found:
        asked = "bit for bit" if tolerance == 0 else f"within {tolerance:g}"
        more = [f"... and {len(found) - LINES} more"] if len(found) > LINES else []
        raise TrainingMismatch("\n".join([f"not equal to plain torch ({asked}):", *found[:LINES], *more]))


def _differences(expected: Record, got: Record, tolerance: float) -> Iterator[str]:
    yield from _number_differences("loss", _flat(expected.losses), _flat(got.losses), tolerance)
    yield from _number_differences("gradient norm", expected.grad_norms, got.grad_norms, tolerance)
    yield from _tensor_differences("parameter", expected.parameters, got.parameters, tolerance)
    yield from _tensor_differences("buffer", expected.buffers, got.buffers, tolerance)


def _flat(losses: list[list[float]]) -> list[float]:
    return [loss for step in losses for loss in step]


def _number_differences(what: str, expected: list[float], got: list[float], tolerance: float) -> Iterator[str]:
    if len(expected) != len(got):
        yield f"{what}: {len(got)} values, expected {len(expected)}"
    for number, (wanted, seen) in enumerate(zip(expected, got, strict=False)):
        error = _error(torch.tensor(wanted, dtype=torch.float64), torch.tensor(seen, dtype=torch.float64))
        if not error <= tolerance:
            yield f"{what} {number}: {seen!r}, expected {wanted!r} (relative error {error:.2g})"


def _tensor_differences(
    what: str, expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float
) -> Iterator[str]:
    if list(expected) != list(got):
        yield f"{what}s: names {list(got)}, expected {list(expected)}"
    for name in [name for name in expected if name in got]:
        wanted, seen = expected[name], got[name]
        if (wanted.shape, wanted.dtype) != (seen.shape, seen.dtype):
            kinds = f"{tuple(seen.shape)} {seen.dtype}, expected {tuple(wanted.shape)} {wanted.dtype}"
            yield f"{what} {name!r}: {kinds}"
        elif not (error := _error(wanted, seen)) <= tolerance:
            count = int((wanted != seen).sum())
            yield f"{what} {name!r}: {count} of {wanted.numel()} elements differ (relative error {error:.2g})"


def _error(expected: Tensor, got: Tensor) -> float:
    """The greatest difference over the greatest value; 0 only if all is equal, NaN where only one side is."""
    if expected.numel() == 0 or torch.equal(expected, got):
        return 0.0
    expected, got = expected.double(), got.double()
    unequal = ~((expected == got) | (expected.isnan() & got.isnan()))
    if not unequal.any():
        return 0.0
    scale = expected.abs().nan_to_num(posinf=0.0).max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((expected - got).abs()[unequal].max() / scale)
