"""Saves that are killed, fail, overlap or are damaged: what `load` finds is whole, and what it was at its step."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import zeropage as zp
from tests.harness import run
from tests.harness.allocations import allocations
from zeropage.checkpoint.folder import Lock, Manifest, find, tags
from zeropage.cli import app
from zeropage.errors import CheckpointError

WIDTH = 64
TRANSPORTS = ["shared", "collective"]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _engine(transport: str, model: nn.Module | None = None, **config: Any) -> zp.Engine:
    model = _model() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return zp.Engine(model, optimizer, {"transport": transport, "timeout_s": 10, **config})


def _train(engine: zp.Engine, steps: int = 1) -> None:
    """Every rank has the same batch: any number of ranks goes the same way."""
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_step)
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).square().mean())
        engine.step()


def _weights(engine: zp.Engine) -> list[torch.Tensor]:
    return [zp.full(parameter) for parameter in engine.module.parameters()]


def _reference(steps: int) -> list[torch.Tensor]:
    engine = _engine("local")
    _train(engine, steps)
    return _weights(engine)


def _close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _loads_as(folder: Path, tag: str | None, step: int) -> None:
    """The checkpoint is whole, and that of so many steps."""
    engine = _engine("local")
    assert engine.load(folder, tag).global_step == step
    _close(_weights(engine), _reference(step))


# -- beside training


def _saves_beside_training(transport: str, folder: str) -> None:
    engine = _engine(transport)
    _train(engine, 2)
    engine.save(folder, wait=False)
    saving = engine._saving
    _train(engine, 3)
    assert engine.save(folder, tag="later", wait=False) == "later"
    assert saving is not engine._saving, "one save after the other"
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_save_beside_training_holds_its_own_step(transport: str, tmp_path: Path) -> None:
    run(2, _saves_beside_training, transport, str(tmp_path))
    for tag, step in (("step2", 2), ("later", 5)):
        engine = _engine("local")
        assert engine.load(tmp_path, tag).global_step == step
        _close(_weights(engine), _reference(step))
        _train(engine)
        _close(_weights(engine), _reference(step + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "later", "latest", "step2"]


def _edits_while_saving(folder: str) -> None:
    """Writes of the program's own wait for the save as well."""
    engine = _engine("shared")
    before = _weights(engine)
    engine.save(folder, tag="before", wait=False)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load(folder, "before")
    engine.save(folder, tag="again", wait=False)
    with zp.gather(engine.module, writer=1):
        for parameter in engine.module.parameters():
            parameter.data.fill_(3.0)
    engine.load(folder, "again")
    assert all(torch.equal(one, other) for one, other in zip(_weights(engine), before, strict=True))
    engine.close()


def test_edits_wait_for_a_save(tmp_path: Path) -> None:
    run(2, _edits_while_saving, str(tmp_path))


# -- a full disk


def _runs_out_of_room(transport: str, folder: str, room: int, wait: bool) -> list[str]:
    """Rank 1's files may not grow beyond `room` bytes: to a program it looks like a full disk."""
    engine = _engine(transport)
    _train(engine, 1)
    engine.save(folder)
    _train(engine, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    told = []
    try:
        engine.save(folder, wait=wait)
        engine._saving.join() if engine._saving is not None and dist.get_rank() == 1 else None
        dist.barrier()
        _train(engine, 1)
    except CheckpointError as error:
        told.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _train(engine, 5 - engine.global_step)
    engine.save(folder, tag="after")
    engine.close()
    return told


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_full_disk_is_an_error_on_all_ranks(transport: str, wait: bool, tmp_path: Path) -> None:
    room = random.Random(f"{transport}{wait}").randrange(1, 60_000)
    for told in run(2, _runs_out_of_room, transport, str(tmp_path), room, wait):
        assert len(told) == 1 and "rank 1" in told[0] and "__1_0.distcp" in told[0] and "File too large" in told[0]
    assert tags(tmp_path) == ["step1", "after"]
    for tag, step in (("step1", 1), ("after", 5)):
        engine = _engine("local")
        engine.load(tmp_path, tag)
        _close(_weights(engine), _reference(step))


# -- killed


def _saves_until_killed(rank: int, meeting_place: str, folder: str, wait: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2)
    engine = _engine("shared")
    if (Path(folder) / "latest").exists():
        engine.load(folder)
    Path(f"{meeting_place}.{rank}").touch()
    while True:
        _train(engine)
        engine.save(folder, wait=wait, keep=2)


def _kill(tmp_path: Path, number: int) -> None:
    """Two ranks save without end; one of them, the other, or both are killed at some moment."""
    chance = random.Random(number)
    folder, meeting_place = tmp_path / "saves", tmp_path / f"meet{number}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", __name__])
    ranks = [
        context.Process(target=_saves_until_killed, args=(rank, str(meeting_place), str(folder), bool(number % 2)))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    ends = time.monotonic() + 60
    while not all(Path(f"{meeting_place}.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < ends and all(rank.is_alive() for rank in ranks)
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.3))
    for victim in [[0], [1], [0, 1]][number % 3]:
        ranks[victim].kill()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode not in (None, 0), "it was killed, or ends with an error"
    if not (folder / "latest").exists():
        return
    engine = _engine("local")
    step = engine.load(folder).global_step
    _close(_weights(engine), _reference(step))
    engine.save(folder, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "latest", f"step{step}"], "leftovers"


def test_killed_at_any_moment(tmp_path: Path) -> None:
    for number in range(6):
        _kill(tmp_path, number)


@pytest.mark.slow
def test_killed_at_thirty_moments(tmp_path: Path) -> None:
    for number in range(6, 36):
        _kill(tmp_path, number)


# -- readers, other jobs, old ones


def _replaces(folder: str, times: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    engine = zp.Engine(model, None, {"transport": "shared"})
    for value in range(times):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(value))
        engine.save(folder, tag="same")
    engine.close()


def test_a_reader_never_sees_a_mixture(tmp_path: Path) -> None:
    ends, seen, mixed = threading.Event(), [], []

    def read() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        engine = zp.Engine(model, None, {"transport": "local"})
        while not ends.is_set():
            try:
                engine.load(tmp_path)
            except CheckpointError:  # it was replaced meanwhile: told, not mixed
                continue
            values = {float(v) for weight in _weights(engine) for v in (weight.min(), weight.max())}
            seen.append(max(values))
            if len(values) > 1:
                mixed.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run(2, _replaces, str(tmp_path), 30)
    finally:
        ends.set()
        reader.join()
    assert seen and not mixed


def _saves_once(folder: str) -> str:
    engine = _engine("shared")
    try:
        engine.save(folder, tag="one")
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_two_jobs_do_not_save_to_one_folder(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    for told in run(2, _saves_once, str(tmp_path)):
        assert "another job is saving" in told and str(tmp_path) in told
    assert tags(tmp_path) == []
    lock.release()
    assert run(2, _saves_once, str(tmp_path)) == ["", ""]


def test_old_ones_go_when_the_new_one_is_there(tmp_path: Path) -> None:
    engine = _engine("local")
    for _ in range(4):
        _train(engine)
        engine.save(tmp_path, keep=2)
    assert tags(tmp_path) == ["step3", "step4"]
    with pytest.raises(CheckpointError, match="keep=0"):
        engine.save(tmp_path, keep=0)
    assert tags(tmp_path) == ["step3", "step4"] and find(tmp_path, None).name == "step4"


def test_what_a_dead_program_left_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = tmp_path / ".saving-step7-12345678"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    _engine("local").save(tmp_path)
    assert not left.exists() and str(left) in caplog.text


@pytest.mark.parametrize("tag", ["", "a/b", "..", "latest", ".hidden"])
def test_tags_that_name_nothing(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        _engine("local").save(tmp_path, tag=tag)
    assert list(tmp_path.iterdir()) == []


# -- damage


def _flip(path: Path) -> str:
    data = bytearray((path / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__1_0.distcp").write_bytes(data)
    return r"__1_0\.distcp is damaged"


def _truncate(path: Path) -> str:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    return r"__0_0\.distcp has [\d,]+ bytes"


def _lose(path: Path) -> str:
    (path / "__1_0.distcp").unlink()
    return r"__1_0\.distcp is missing"


def _spoil_metadata(path: Path) -> str:
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data[:-1] + b"x")
    return r"\.metadata is damaged"


def _lead_outside(path: Path, name: str) -> str:
    values = json.loads((path / "manifest.json").read_text())
    values["files"][name] = {"nbytes": 1, "crc32": 0}
    (path / "manifest.json").write_text(json.dumps(values))
    return "not a file of this checkpoint"


def _cut_manifest(path: Path) -> str:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-20])
    return r"manifest\.json is damaged"


DAMAGE = {
    "flipped byte": _flip,
    "truncated": _truncate,
    "missing": _lose,
    "metadata": _spoil_metadata,
    "parent": lambda path: _lead_outside(path, "../latest"),
    "absolute": lambda path: _lead_outside(path, "/etc/hostname"),
    "manifest": _cut_manifest,
}


def _loads_damaged(folder: str) -> str:
    engine = _engine("shared")
    _train(engine)
    before = _weights(engine)
    with pytest.raises(CheckpointError) as raised:
        engine.load(folder)
    assert engine.global_step == 1
    assert all(torch.equal(one, other) for one, other in zip(_weights(engine), before, strict=True))
    engine.close()
    return str(raised.value)


def _saves_two_steps(folder: str) -> None:
    engine = _engine("shared")
    _train(engine, 2)
    engine.save(folder)
    engine.close()


def test_damage_is_refused_and_named(tmp_path: Path) -> None:
    run(2, _saves_two_steps, str(tmp_path / "good"))
    for name, spoil in DAMAGE.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        expected = spoil(folder / "step2")
        for told in run(2, _loads_damaged, str(folder)):
            with pytest.raises(CheckpointError, match=expected):
                raise CheckpointError(told)


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def _unlink(file: Path) -> None:
    file.unlink()


def _goes_bad(transport: str, folder: str, spoil: Callable[[Path], None], moment: str) -> str:
    """Rank 1 finds a file spoilt: after the checksums were right, or when the model is about to be written."""
    engine = _engine(transport)
    _train(engine)
    before = _weights(engine)
    owner: Any = Manifest if moment == "checked" else engine.pagers[0].transport
    name = "check" if moment == "checked" else "open_writes"
    original = getattr(owner, name)

    def hooked(*args: Any) -> Any:
        found = original(*args)
        if moment == "checked" or args[0] == "load step2":
            dist.barrier()
            if dist.get_rank() == 1:
                spoil(Path(folder) / "step2" / "__1_0.distcp")
            dist.barrier()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, hooked)
        with pytest.raises(CheckpointError) as raised:
            engine.load(folder, "step2")
    if moment == "checked":
        assert engine.global_step == 1
        assert all(torch.equal(one, other) for one, other in zip(_weights(engine), before, strict=True))
    assert engine.load(folder, "good").global_step == 2
    _train(engine)
    engine.save(folder, tag="after")
    engine.close()
    return str(raised.value)


@pytest.mark.parametrize("moment", ["checked", "written"])
@pytest.mark.parametrize("spoil", [_cut_short, _unlink])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_file_that_goes_bad_after_the_check(
    transport: str, spoil: Callable[[Path], None], moment: str, tmp_path: Path
) -> None:
    """All ranks are told which file, and whether the model is partly new; a whole checkpoint puts it right."""
    run(2, _saves_two_steps, str(tmp_path))
    shutil.copytree(tmp_path / "step2", tmp_path / "good")
    told = run(2, _goes_bad, transport, str(tmp_path), spoil, moment)
    assert all(("step2" in text) and ("partly new" in text) is (moment == "written") for text in told), told
    _loads_as(tmp_path, "after", 3)
    if moment == "written":
        assert told[0] == told[1] and "__1_0.distcp" in told[0] and "load" in told[0]


# -- orders of use, and what belongs to ranks


class _Loader:
    """Counts; knows where it stands."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def _own_state(folder: str, save: bool) -> tuple[Any, ...]:
    engine = _engine("shared", nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    loader = _Loader()
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    if save:
        torch.rand(3)
        random.random()
        loader.place = 10 + rank
        engine.save(folder, data_loader=loader)
        restored = True
    else:
        restored = engine.load(folder, data_loader=loader).restored_ranks
    found = torch.rand(2).tolist(), random.random(), loader.place
    engine.close()
    return restored, *found


def test_generators_and_loaders_go_on_where_they_stood(tmp_path: Path) -> None:
    saved = run(2, _own_state, str(tmp_path), True)
    assert saved[0] != saved[1] and saved[1][3] == 11
    assert run(2, _own_state, str(tmp_path), False) == saved
    others = run(3, _own_state, str(tmp_path), False)
    assert [(restored, place) for restored, _, _, place in others] == [(False, 0)] * 3


def _any_order(folder: str) -> None:
    engine = _engine("shared")
    engine.save(folder, tag="first")  # before any step
    _train(engine, 2)
    engine.save(folder)
    _train(engine, 1)
    expected = _weights(engine)
    engine.load(folder, "step2")
    engine.save(folder, tag="again")
    _train(engine, 1)
    assert all(torch.equal(one, other) for one, other in zip(_weights(engine), expected, strict=True))
    engine.load(folder, "first")
    assert engine.global_step == 0
    engine.load(folder, "step2", weights_only=True)
    assert engine.global_step == 0, "weights only"
    engine.save(folder, tag="again")  # the same tag once more
    engine.close()
    inference = zp.Engine(_model(), None, {"transport": "shared"})
    assert inference.load(folder).tag == "again"
    inference.close()


def test_any_order_of_saves_and_loads(tmp_path: Path) -> None:
    run(2, _any_order, str(tmp_path))


def _by_name(folder: str) -> None:
    """Some tensors are left out; loading leaves those of the model alone."""
    engine = _engine("shared", _model())
    _train(engine, 2)
    engine.save(folder, tag="part", leave_out=["0.weight"])
    trained = _weights(engine)
    with pytest.raises(CheckpointError, match=r"0\.wieght: the model has no such tensors"):
        engine.save(folder, tag="typo", leave_out=["0.wieght"])
    engine.close()

    other = _engine("shared", _model())
    with torch.no_grad():
        other.module[0].weight.fill_(7.0)
    other.load(folder, "part")
    assert bool((zp.full(other.module[0].weight) == 7.0).all())
    assert all(torch.equal(zp.full(p), t) for p, t in list(zip(other.module.parameters(), trained, strict=True))[1:])


def test_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    run(2, _by_name, str(tmp_path))


def _adapter(folder: str) -> None:
    """Only the last layer is trained."""
    model = _model()
    model[0].requires_grad_(False)
    engine = _engine("shared", model)
    _train(engine, 2)
    engine.save(folder, tag="adapter", trainable_only=True)
    engine.save(folder, tag="whole")
    trained = _weights(engine)
    engine.close()

    base = _model()
    with torch.no_grad():
        base[0].weight.fill_(7.0)
    base[0].requires_grad_(False)
    other = _engine("shared", base)
    other.load(folder, "adapter")
    assert other.global_step == 2 and bool((zp.full(base[0].weight) == 7.0).all()), "the base stays"
    assert torch.equal(zp.full(base[2].weight), trained[2])
    other.load(folder, "whole")
    assert torch.equal(zp.full(base[0].weight), trained[0]), "frozen weights are restored"
    other.close()


def test_frozen_weights_are_saved_or_left_out(tmp_path: Path) -> None:
    run(2, _adapter, str(tmp_path))
    sizes = {
        tag: sum(file.nbytes for name, file in Manifest.read(tmp_path / tag).files.items() if name.endswith("distcp"))
        for tag in ("adapter", "whole")
    }
    frozen = 4 * (WIDTH * WIDTH + WIDTH)
    assert sizes["whole"] - sizes["adapter"] == pytest.approx(frozen, rel=0.2)


# -- other readers, other formats


def _into_fsdp(folder: str) -> list[torch.Tensor]:
    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fully_shard(model)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    load(state, checkpoint_id=folder)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_a_model_of_fsdp_loads_it(tmp_path: Path) -> None:
    run(3, _saves_two_steps, str(tmp_path))
    for found in run(2, _into_fsdp, str(tmp_path / "step2")):
        _close(found, _reference(2))


def test_format_one_loads() -> None:
    from safetensors.torch import load_file

    folder = Path(__file__).parents[1] / "fixtures" / "checkpoint_v1"
    expected = load_file(folder / "expected.safetensors")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = zp.Engine(model, optimizer, {"precision": "bf16", "cast_frozen": True})
    found = engine.load(folder)
    assert (found.tag, found.client_state, found.restored_ranks) == ("step2", {"note": "format 1"}, False)
    for name, parameter in model.named_parameters():
        assert torch.equal(zp.full(parameter), expected[name]), name
        if parameter in optimizer.state:
            assert torch.equal(zp.full(optimizer.state[parameter]["exp_avg"]), expected[f"moment.{name}"])


def test_the_time_of_saves_orders_them(tmp_path: Path) -> None:
    engine = _engine("local")
    for tag in ("b", "a", "c"):
        engine.save(tmp_path, tag=tag)
        time.sleep(0.01)
    assert tags(tmp_path) == ["b", "a", "c"]


# -- inspect


def test_inspect_shows_what_is_inside(tmp_path: Path) -> None:
    run(2, _saves_two_steps, str(tmp_path))
    plain = CliRunner().invoke(app, ["inspect", str(tmp_path), "--verify"])
    assert plain.exit_code == 0, plain.output
    assert "every byte" in plain.output and "optimizer.2.weight.exp_avg" in plain.output
    found = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "step2"), "--json"]).output)
    assert (found["tag"], found["step"], found["world"], found["verified"]) == ("step2", 2, 2, False)
    weights = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert found["bytes_on_ranks"]["1"] == 3 * weights + 4 * 4  # weights, two moments, and four step counters
    assert found["bytes_on_ranks"]["2"] == pytest.approx(found["bytes_on_ranks"]["1"] / 2, rel=0.03)
    assert found["groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_inspect_names_what_is_damaged(tmp_path: Path) -> None:
    run(2, _saves_two_steps, str(tmp_path))
    _flip(tmp_path / "step2")
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 0, "sizes are right"
    broken = CliRunner().invoke(app, ["inspect", str(tmp_path), "--verify"])
    assert broken.exit_code == 1 and "__1_0.distcp is damaged" in broken.output
    nothing = CliRunner().invoke(app, ["inspect", str(tmp_path / "nowhere")])
    assert nothing.exit_code == 1 and "holds no checkpoint" in nothing.output


# -- memory


def _peaks(transport: str, folder: str) -> tuple[int, int, int]:
    """Bytes beside the state: at most while saving, while loading; and the largest part that this rank writes."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters()), {"transport": transport, "timeout_s": 10})
    engine.backward(engine(torch.ones(2, 512)).sum())
    engine.step()
    engine.save(folder, tag="warm")
    engine.load(folder)
    with allocations() as saving:
        engine.save(folder, tag="measured")
    with allocations() as loading:
        engine.load(folder)
    engine.close()
    return saving.peak, loading.peak, 4 * 512 * 512 // dist.get_world_size()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_part_at_a_time_is_in_memory(transport: str, tmp_path: Path) -> None:
    for saving, loading, part in run(2, _peaks, transport, str(tmp_path)):
        assert saving <= part / 4, "values are written from where they lie"
        # the profiler does not see that the moments of before, 16 parts, go before those that are read come
        assert loading <= (16 + 2) * part + 100_000, "of 24 parts that are read"
