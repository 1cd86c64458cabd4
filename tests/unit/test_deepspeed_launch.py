"""Programs run with `import deepspeed` meaning zeropage, and what they start does too; where the ranks are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zeropage.deepspeed
from zeropage.deepspeed.running import find_command, prepare
from zeropage.errors import ConfigError
from zeropage.launching.hosts import first_host, parse_hostfile, select, trim
from zeropage.launching.options import LAUNCHER_OPTIONS, parse
from zeropage.launching.run import plan

SOURCE = Path(zeropage.deepspeed.__file__).parents[2]
DOCS = Path(__file__).parents[2] / "docs"


def command(*arguments: str, cwd: Path, python_path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` without anything of the launcher that runs these tests."""
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    path = os.pathsep.join(part for part in (str(SOURCE), python_path) if part)
    environment = {**keep, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


# -- python -m zeropage.deepspeed

SHOW = """
import importlib.metadata, json, multiprocessing, subprocess, sys

def version(_):
    import deepspeed
    return deepspeed.__version__

if __name__ == "__main__":
    child = subprocess.run(
        [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"], capture_output=True, text=True
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(version, [0])
    print(json.dumps({
        "argv": sys.argv[1:], "here": version(0), "metadata": importlib.metadata.version("deepspeed"),
        "child": child.stdout.strip(), "spawned": spawned[0], "name": __name__, "path": sys.path[0],
    }))
"""


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_and_its_children_see_it(tmp_path: Path, as_module: bool) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    what = ["-m", "show"] if as_module else ["programs/show.py"]
    done = command("-m", "zeropage.deepspeed", *what, "--x", "-m", cwd=folder if as_module else tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    version = zeropage.deepspeed.__version__
    assert {found["here"], found["metadata"], found["child"], found["spawned"]} == {version}
    assert (found["argv"], found["name"], found["path"]) == (["--x", "-m"], "__main__", str(folder))


def test_a_command_of_this_environment_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before one of the same name elsewhere, which would run another Python."""
    for folder, name in (("ours", "torchrun"), ("other", "torchrun"), ("other", "mpirun")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("#!/bin/sh\n")
        (tmp_path / folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "ours/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert find_command("torchrun") == str(tmp_path / "ours/torchrun")
    assert find_command("mpirun") == str(tmp_path / "other/mpirun")
    assert find_command("no-such-thing") is None


def test_a_folder_named_like_a_command_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments often lie in a folder `accelerate`. One with a __main__.py is a program, as for Python."""
    for name in ("PYTHONPATH", "ZEROPAGE_AS_DEEPSPEED", "ZEROPAGE_REPLACE_DEEPSPEED"):
        monkeypatch.setenv(name, "")  # `prepare` sets them
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accelerate").mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    with pytest.raises(ConfigError, match="accelerate: no such file, and no command"):
        prepare(["accelerate", "launch"])


@pytest.mark.slow
def test_the_deepspeed_command_is_our_launcher(tmp_path: Path) -> None:
    """Also where the script of DeepSpeed's own package calls it."""
    (tmp_path / "script_of_deepspeed").write_text("from deepspeed.launcher.runner import main\nmain()\n")
    (tmp_path / "p.py").write_text("import deepspeed, sys; print(deepspeed.__version__, sys.argv[1:])")
    for launcher in ("deepspeed", "script_of_deepspeed"):
        done = command("-m", "zeropage.deepspeed", launcher, "--num_gpus", "1", "p.py", "--x", cwd=tmp_path)
        assert done.stdout.split() == [zeropage.deepspeed.__version__, "['--local_rank=0',", "'--x']"], done.stderr
        refused = command("-m", "zeropage.deepspeed", launcher, "--autotuning", "run", "p.py", cwd=tmp_path)
        assert refused.returncode == 1 and refused.stderr.startswith("zeropage: --autotuning"), refused.stderr


@pytest.mark.slow
def test_a_process_that_needs_no_torch_gets_none(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, 'zeropage' in sys.modules)"
    (tmp_path / "p.py").write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])")
    assert command("-m", "zeropage.deepspeed", "p.py", cwd=tmp_path).stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_the_programs_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.customized = True\n")
    code = "import deepspeed; print(customized, deepspeed.__version__)"
    (tmp_path / "p.py").write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])")
    done = command("-m", "zeropage.deepspeed", "p.py", cwd=tmp_path, python_path=str(own))
    assert done.stdout.split() == ["True", zeropage.deepspeed.__version__]


@pytest.mark.slow
def test_a_command_on_the_path_is_run(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport deepspeed, sys; print(deepspeed.__version__, *sys.argv[1:])\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    other = tmp_path / "elsewhere"
    other.mkdir()
    done = command("-m", "zeropage.deepspeed", "program", "a", cwd=other, PATH=path)
    assert done.stdout.split() == [zeropage.deepspeed.__version__, "a"], done.stderr


@pytest.mark.slow
def test_a_program_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("from zeropage.errors import ConfigError\nraise ConfigError('mine')\n")
    done = command("-m", "zeropage.deepspeed", "p.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "zeropage.errors.ConfigError: mine" and "p.py" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-thing"], "zeropage: no-such-thing: no such file, and no command of that name"),
        (["-m"], "zeropage: -m needs the name of a module"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_run_is_told_without_a_traceback(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = command("-m", "zeropage.deepspeed", *arguments, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(told)


@pytest.mark.slow
def test_a_real_deepspeed_is_replaced_with_a_word_about_it(tmp_path: Path) -> None:
    real = tmp_path / "site/deepspeed"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("__version__ = '0.1'\n")
    (tmp_path / "p.py").write_text("import deepspeed; print(deepspeed.__version__)")
    arguments = ("-m", "zeropage.deepspeed", "p.py")
    done = command(*arguments, cwd=tmp_path, python_path=str(real.parent))
    assert done.stdout.strip() == zeropage.deepspeed.__version__
    assert done.stderr.strip() == f"zeropage: `import deepspeed` means zeropage now, and not {real / '__init__.py'}"
    done = command(*arguments, cwd=tmp_path, python_path=str(real.parent), ZEROPAGE_REPLACE_DEEPSPEED="0")
    assert done.returncode == 1 and "DeepSpeed itself is installed" in done.stderr


@pytest.mark.slow
def test_the_report_shows_what_is_here(tmp_path: Path) -> None:
    done = command("-m", "zeropage.deepspeed.env_report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("torch", "collective", zeropage.deepspeed.__version__, "configuration keys: honoured", "cpu_adam"):
        assert word in done.stdout


# -- zeropage run

RUN = ("-c", "from zeropage.cli import app; app(prog_name='zeropage')", "run")
RANK = """
import json, os, pathlib, sys
import deepspeed
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
found = {"argv": sys.argv[2:], "version": deepspeed.__version__, **{name: os.environ[name] for name in names}}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_ranks_are_started(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(RANK)
    arguments = (*RUN, "--ranks", "2", "--deepspeed", "p.py", str(tmp_path), "--ranks", "7", "-m")
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        assert json.loads((tmp_path / rank).read_text()) == {
            "argv": ["--ranks", "7", "-m"],
            "version": zeropage.deepspeed.__version__,
            "RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_RANK": rank,
        }


@pytest.mark.slow
def test_a_rank_that_fails_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("raise SystemExit(3)")
    done = command(*RUN, "p.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "p.py FAILED" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_inside_srun_a_task_becomes_the_rank(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(RANK)
    done = command(
        *RUN, "--deepspeed", "p.py", str(tmp_path), "x", cwd=tmp_path,
        SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NUM_NODES="2", SLURM_STEP_NODELIST="a[3-4]", SLURM_PROCID="3",
        SLURM_LOCALID="1", SLURM_JOB_ID="12", SLURM_STEP_TASKS_PER_NODE="2(x2)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "3").read_text())
    assert (found["argv"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == (["x"], "4", "1")


def test_the_options_of_a_plan_on_one_host() -> None:
    environment: dict[str, str] = {}
    settings = plan(["--ranks", "3", "p.py", "--ranks", "5"], environment)
    assert (settings.nproc_per_node, settings.nnodes, settings.is_rank) == ("3", "1:1", False)
    assert settings.training_script_args == ["--ranks", "5"]
    assert "ZEROPAGE_AS_DEEPSPEED" not in environment


def test_torchruns_own_options_stay() -> None:
    arguments = ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--rdzv-id", "7"]
    settings = plan([*arguments, "--max-restarts", "2", "-m", "package.module", "x"], {})
    assert (settings.nproc_per_node, settings.nnodes, settings.node_rank) == ("4", "2", 1)
    assert (settings.master_addr, settings.rdzv_id, settings.max_restarts, settings.module) == ("h", "7", 2, True)
    assert plan(["--nproc-per-node", "auto", "p.py"], {}).nproc_per_node == "auto"


def test_scripts_of_the_deepspeed_launcher_get_their_local_rank() -> None:
    """A script that goes by `--local_rank` would take itself for a single process without it."""
    assert plan(["--num_gpus", "2", "p.py", "a"], {}).training_script_args == ["--local_rank=${local_rank}", "a"]
    assert plan(["--num_gpus", "2", "--no_local_rank", "p.py", "a"], {}).training_script_args == ["a"]
    assert plan(["--ranks", "2", "p.py", "a"], {}).training_script_args == ["a"]


def test_ranks_log_to_files_of_their_own() -> None:
    settings = plan(["--enable_each_rank_log", "logs", "p.py"], {})
    assert (settings.log_dir, settings.redirects) == ("logs", "3")


def test_several_hosts_take_the_same_command(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("one slots=4\ntwo slots=4 # the other\n")
    arguments = ["--hostfile", str(hostfile), "--num_gpus", "2", "--node_rank", "1", "p.py"]
    settings = plan(arguments, {})
    assert (settings.nnodes, settings.nproc_per_node, settings.node_rank) == ("2", "2", 1)
    assert (settings.master_addr, settings.master_port) == ("one", 29500)
    settings = plan(["--hosts", "a,b,c", "--ranks", "2", "--node_rank", "2", "--master_port", "3", "p.py"], {})
    assert (settings.nnodes, settings.node_rank, settings.master_addr, settings.master_port) == ("3", 2, "a", 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--num_gpus", "2", "--include", "localhost:0", "p.py"], "cannot be given together"),
        (["--num_nodes", "2", "p.py"], "name the hosts, with --hostfile or --hosts"),
        (["--hostfile", "no-such-file", "p.py"], "no such file"),
        (["--hosts", "x.invalid,y.invalid", "p.py"], "is none of x.invalid, y.invalid; start the same command"),
        (["--hosts", "a,b", "--node_rank", "2", "p.py"], "--node_rank 2: there are 2 hosts"),
        (["--launcher", "openmpi", "p.py"], "start the ranks with it yourself"),
        (["--save_pid", "p.py"], "--save_pid of the deepspeed launcher is not available here"),
        (["--bind_cores_to_rank", "p.py"], "taskset"),
        (["--autotuning", "run", "p.py"], "nothing to tune"),
        (["--launcher_args", "-v", "p.py"], "no other launcher is started"),
        (["--venv_script", "a", "p.py"], "activate the environment on each host"),
        (["--ssh_port", "22", "p.py"], "start the same command on each host"),
    ],
)
def test_what_cannot_be_done_is_told_with_the_way_round(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(arguments, {})


SRUN = {"SLURM_STEP_NODELIST": "gpu[07-09,11],login", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "8042"}


def test_inside_srun_one_task_a_host_starts_the_ranks_of_the_host() -> None:
    environment = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2"}
    settings = plan(["--ranks", "8", "p.py"], environment)
    assert (settings.nnodes, settings.nproc_per_node, settings.node_rank) == ("4", "8", 2)
    assert (settings.master_addr, settings.master_port) == ("gpu07", 29542)
    assert not settings.is_rank


def test_inside_srun_one_task_a_rank_is_the_rank() -> None:
    per_node = {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
    environment = {**SRUN, **per_node, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "4"}
    assert plan(["p.py"], environment).is_rank
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["5", "8", "1", "2", "gpu07", "29542"]
    with pytest.raises(ConfigError, match="--ranks 3 does not agree"):
        plan(["--ranks", "3", "p.py"], environment)


def test_every_option_of_the_deepspeed_launcher_is_known() -> None:
    parser_knows = set(vars(parse(["p.py"])))
    for option in LAUNCHER_OPTIONS:
        assert {option.removeprefix("--"), "num_gpus"} & parser_knows
    page = (DOCS / "deepspeed.md").read_text()
    for option, note in LAUNCHER_OPTIONS.items():
        assert f"| `{option}` | {note} |" in page


# -- hosts

HOSTS = {"one": [0, 1, 2, 3], "two": [0, 1]}


def test_a_hostfile_lists_hosts_and_slots() -> None:
    assert parse_hostfile("# hosts\n\none slots=4\ntwo   slots=2 # small\n") == HOSTS


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "no host"), ("one", "line 1: expected"), ("one slots=x", "line 1"), ("a slots=1\na slots=2", "listed twice")],
)
def test_a_hostfile_that_is_none_is_told_by_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_hostfile(text)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("two", "", {"two": [0, 1]}),
        ("two@one:1,3", "", {"one": [1, 3], "two": [0, 1]}),
        ("one:3@one:1", "", {"one": [1, 3]}),
        ("", "one", {"two": [0, 1]}),
        ("", "one:0,2", {"one": [1, 3], "two": [0, 1]}),
        ("", "two:0,1", {"one": [0, 1, 2, 3]}),
    ],
)
def test_filters_leave_what_they_say(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    assert select(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "told"),
    [
        ("one", "two", "together"),
        ("three", "", "host 'three' is not one of one, two"),
        ("two:2", "", "host 'two' has no slot 2, only 0, 1"),
        ("", "one@two", "leaves no host"),
        ("one:x", "", "slots are numbers"),
    ],
)
def test_filters_that_do_not_fit_are_told(include: str, exclude: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        select(HOSTS, include, exclude)


def test_the_first_hosts_and_slots_are_taken() -> None:
    assert trim(HOSTS, 1, None) == {"one": [0, 1, 2, 3]}
    assert trim(HOSTS, None, 2) == {"one": [0, 1], "two": [0, 1]}
    with pytest.raises(ConfigError, match="the hostfile lists 2"):
        trim(HOSTS, 3, None)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("a[03-05,9],b1", "a03"), ("gpu-2[1,3]-ib,x", "gpu-21-ib"), ("n[7]", "n7")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
