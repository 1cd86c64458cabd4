"""The harness itself: it returns, reports, and never lets a fault pass as a success."""

import copy
import os
import signal
import threading
import time
import warnings
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.harness import Hang, RankDied, RankError, TrainingMismatch, assert_same_training, run
from tests.harness.models import (
    build_lm,
    build_mlp,
    build_moe,
    build_tied_lm,
    build_two_tower,
    lm_batch,
    mlp_batch,
    moe_batch,
    next_token,
    two_tower_batch,
)
from tests.harness.training import Record, assert_same_records, train_plain
from tests.harness.training import Training as _Training


def describe(value, factor=1):
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), value * factor, total.item(), os.environ["LOCAL_RANK"]


def process_id():
    return os.getpid()


def draw():
    return torch.rand(3)


def fail_on(rank):
    if dist.get_rank() == rank:
        raise FileNotFoundError(f"rank {rank} says so")
    return "fine"


def die_on(rank, how):
    if dist.get_rank() == rank:
        print("last words", flush=True)
        how()
    return "fine"


def exit_at_once():
    os._exit(7)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_here_for_ever():
    time.sleep(1000)


def hang_on(rank):
    if dist.get_rank() == rank:
        sleep_here_for_ever()
    return "fine"


def take_the_signal():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def wait_for_dead_peer():
    """A collective with a peer that never comes: gloo itself must end it."""
    if dist.get_rank() == 0:
        os._exit(1)
    dist.barrier()


def warn():
    warnings.warn("mind the step", UserWarning, stacklevel=1)
    return "fine"


def lose_an_exception_in_a_thread():
    def work():
        raise ValueError("lost in a thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def leave_a_thread():
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def leave_traces():
    os.environ["TRACE_OF_A_CASE"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def look_for_traces():
    return "TRACE_OF_A_CASE" in os.environ, torch.get_default_dtype(), torch.is_grad_enabled()


def start_own_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()


def fail_to_start_own_group():
    """Rank 1 never comes: the others give up, with torch's count of groups raised."""
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_the_order_of_ranks(world):
    results = run(world, describe, 5, factor=2)
    assert results == [(rank, world, 10, sum(range(world)), str(rank)) for rank in range(world)]


def test_workers_are_reused_and_a_case_costs_little():
    before = run(2, process_id)
    start = time.perf_counter()
    for _ in range(5):
        assert run(2, process_id) == before
    assert time.perf_counter() - start < 5
    assert os.getpid() not in before


def test_every_case_starts_from_the_same_seed():
    first, second = run(2, draw), run(2, draw)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0])


def test_an_exception_is_raised_with_the_traceback_of_its_rank():
    with pytest.raises(RankError, match=r"(?s)rank 1 raised FileNotFoundError.*in fail_on.*rank 1 says so") as caught:
        run(2, fail_on, 1)
    assert list(caught.value.failures) == [1]


def test_an_expected_exception_is_a_result():
    good, bad = run(2, fail_on, 1, expect_errors=True)
    assert good == "fine"
    assert (bad.rank, bad.type, bad.message) == (1, "FileNotFoundError", "rank 1 says so")
    assert bad.is_a("OSError") and not bad.is_a("ValueError")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"), [(exit_at_once, "exited with status 7"), (kill_itself, "killed by SIGKILL")]
)
def test_a_dead_rank_is_reported_and_replaced(how, reason):
    dead, alive = run(2, die_on, 0, how, expect_errors=True)
    assert isinstance(dead, RankDied) and dead.rank == 0 and dead.reason == reason
    assert "last words" in dead.output
    assert alive == "fine"
    with pytest.raises(RankError, match=reason):
        run(2, die_on, 0, how)
    assert run(2, fail_on, 5) == ["fine", "fine"]


def test_the_peers_of_a_dead_rank_end_with_an_error():
    dead, alive = run(2, wait_for_dead_peer, expect_errors=True, timeout=30)
    assert isinstance(dead, RankDied)
    assert alive.is_a("RuntimeError")


@pytest.mark.slow
def test_a_hang_fails_with_the_stack_of_the_rank_that_hangs():
    run(2, take_the_signal)  # which is of no consequence; and starting the workers is not part of it
    start = time.perf_counter()
    with pytest.raises(Hang, match=r"(?s)ranks \[1\]; done: ranks \[0\].*sleep_here_for_ever") as caught:
        run(2, hang_on, 1, timeout=3, expect_errors=True)
    assert time.perf_counter() - start < 10
    assert list(caught.value.stacks) == [1]
    assert run(2, fail_on, 5) == ["fine", "fine"]


def test_a_warning_on_a_rank_is_an_error():
    assert run(1, warn, expect_errors=True)[0].type == "UserWarning"


@pytest.mark.filterwarnings("ignore:mind the step")
def test_a_warning_that_the_test_ignores_is_none():
    assert run(1, warn) == ["fine"]


def test_an_exception_lost_in_a_thread_fails_the_case():
    with pytest.raises(RankError, match="lost in a thread"):
        run(1, lose_an_exception_in_a_thread)


@pytest.mark.slow
def test_a_worker_with_a_thread_left_is_replaced():
    (before,) = run(1, process_id)
    run(1, leave_a_thread)
    assert run(1, process_id) != [before]


def test_a_case_leaves_no_traces():
    run(1, leave_traces)
    assert run(1, look_for_traces) == [(False, torch.float32, True)]


def test_a_case_may_start_its_own_process_group():
    assert run(2, start_own_group, process_group=False) == [2, 2]
    assert run(3, start_own_group, process_group=False) == [3, 3, 3]


@pytest.mark.slow
def test_a_group_that_failed_to_start_spoils_no_later_case():
    assert run(2, fail_to_start_own_group, process_group=False, expect_errors=True)[0].is_a("RuntimeError")
    assert run(2, fail_on, 5) == ["fine", "fine"]


@pytest.mark.slow
def test_cases_that_end_at_once_do_not_disturb_each_other():
    for _ in range(40):
        assert len(set(run(4, process_id))) == 4


def test_what_cannot_be_sent_is_refused_with_advice():
    with pytest.raises(TypeError, match="top level"):
        run(1, lambda: 1)


# --- the reference training and the comparison ------------------------------------------------------


def plain(build, batches, **changes):
    values = dict.fromkeys((f.name for f in fields(_Training)), None)
    values |= {"build": build, "batches": batches, "world": 2, "steps": 3, "accumulate": 1}
    values |= {"optimizer": torch.optim.AdamW, "loss": plain_loss, "config": {}, "engine": True}
    return train_plain(_Training(**(values | changes)))


def plain_loss(model, batch):
    return model(batch).float().square().mean()


@pytest.mark.parametrize(
    ("build", "batches"),
    [
        (build_mlp, mlp_batch),
        (build_lm, lm_batch),
        (build_tied_lm, lm_batch),
        (build_moe, moe_batch),
        (build_two_tower, two_tower_batch),
    ],
)
def test_the_toy_models_train(build, batches):
    def same_each_step(step, micro, rank):
        return batches(0, micro, rank)

    loss = next_token if batches is lm_batch else plain_loss
    records = plain(build, same_each_step, steps=30, loss=loss)
    assert len(records) == 2 and len(records[0].losses) == 30
    for record in records:
        assert sum(record.losses[-1]) < sum(record.losses[0])
    assert records[0].losses != records[1].losses


class Noisy(torch.nn.Module):
    """Has what is each rank's own: buffers and random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(7, 7)
        self.norm = torch.nn.BatchNorm1d(7)

    def forward(self, x):
        return torch.nn.functional.dropout(self.norm(self.linear(x)), 0.5)


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning")
def test_the_reference_equals_ddp():
    """Dropout, batch norm's buffers, accumulation and clipping, against torch's own data parallelism."""
    assert_same_records(run(2, train_ddp), plain(Noisy, mlp_batch, accumulate=2, clip=0.1), tolerance=1e-6)


def train_ddp():
    torch.manual_seed(0)
    model = Noisy()
    ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    record = Record()
    for step in range(3):
        record.losses.append([])
        for micro in range(2):
            loss = plain_loss(ddp, mlp_batch(step, micro, dist.get_rank()))
            record.losses[step].append(loss.item())
            (loss / 2).backward()
        record.grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    record.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    record.buffers = {name: b.clone() for name, b in model.named_buffers()}
    return record


def spoil_a_loss(record):
    record.losses[1][0] *= 1 + 1e-5


def spoil_a_parameter(record):
    record.parameters["second.weight"][3, 4] += 1e-5


def spoil_a_dtype(record):
    record.parameters["second.weight"] = record.parameters["second.weight"].double()


def spoil_with_nan(record):
    record.parameters["third.bias"][0] = float("nan")


def lose_a_parameter(record):
    del record.parameters["third.bias"]


def lose_a_step(record):
    record.losses.pop()


def spoil_a_norm(record):
    record.grad_norms[2] += 1e-3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_a_loss, "rank 1: loss 1:"),
        (spoil_a_parameter, "rank 1: parameter 'second.weight': 1 of 289 elements differ"),
        (spoil_a_dtype, "rank 1: parameter 'second.weight': .*float64, expected .*float32"),
        (spoil_with_nan, "rank 1: parameter 'third.bias'"),
        (lose_a_parameter, "rank 1: parameters: names"),
        (lose_a_step, "rank 1: loss: 2 values, expected 3"),
        (spoil_a_norm, "rank 1: gradient norm 2"),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_a_difference_on_one_rank_is_reported(spoil, message, tolerance):
    reference = plain(build_mlp, mlp_batch, clip=1.0)
    ranks = copy.deepcopy(reference)
    assert_same_records(reference, ranks, tolerance=tolerance)
    spoil(ranks[1])
    with pytest.raises(TrainingMismatch, match=message) as caught:
        assert_same_records(reference, ranks, tolerance=tolerance)
    assert "rank 0" not in str(caught.value)


def test_one_bit_counts_when_equality_is_exact():
    reference = plain(build_mlp, mlp_batch)
    ranks = copy.deepcopy(reference)
    weight = ranks[0].parameters["first.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    assert_same_records(reference, ranks, tolerance=1e-6)
    with pytest.raises(TrainingMismatch, match=r"rank 0: parameter 'first.weight': 1 of 119"):
        assert_same_records(reference, ranks, tolerance=0.0)


# --- both sides together ----------------------------------------------------------------------------


def build_drifting():
    """Not the same model on the ranks as in the reference."""
    model = build_mlp()
    if "RANK" in os.environ:
        with torch.no_grad():
            model.third.bias[0] += 1e-4
    return model


def name_types(model, engine):
    return type(model).__name__, engine is None


@pytest.mark.parametrize("engine", [False, True])
def test_a_sharded_training_equals_the_plain_one(engine):
    same = assert_same_training(build_mlp, mlp_batch, engine=engine, inspect=name_types)
    assert [record.extra for record in same.ranks] == [("MLP", not engine)] * 2
    assert [len(record.losses) for record in same.reference] == [5, 5]


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_sharded_training_that_differs_is_reported(engine, exact):
    with pytest.raises(TrainingMismatch, match=r"(?s)rank 0: loss 0.*rank 0: parameter 'third.bias'.*rank 1"):
        assert_same_training(build_drifting, mlp_batch, engine=engine, exact=exact)
