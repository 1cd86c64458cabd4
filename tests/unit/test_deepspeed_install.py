"""`import deepspeed` means zeropage: found by every way in which libraries look, in any order that can work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zeropage.deepspeed
from zeropage.deepspeed.alias import look_up
from zeropage.deepspeed.names import MODULES, public_names

SOURCE = str(Path(zeropage.deepspeed.__file__).parents[2])


def python(code: str, *, path: str = SOURCE, **variables: str) -> str:
    """What a fresh interpreter prints for `code`; its error instead if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZEROPAGE")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def real_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which something installed is called deepspeed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed/__init__.py").write_text("__version__ = '0.1'\n")
    about = folder / "deepspeed-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")
    return os.pathsep.join([SOURCE, str(folder)])


# -- names


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_module_is_there(module: str) -> None:
    for name in public_names(module):
        look_up(module, name)


def test_modules_hang_below_their_parents() -> None:
    for name in MODULES:
        assert name == "deepspeed" or name.rpartition(".")[0] in MODULES


def test_it_works_by_itself() -> None:
    """Without `install`, and without ever importing a module called deepspeed."""
    code = """
import sys
import zeropage.deepspeed as deepspeed
from zeropage.deepspeed.initialization import initialize
assert deepspeed.initialize is initialize
assert deepspeed.zero.Init is deepspeed.runtime.zero.partition_parameters.Init
assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[0] == "LRRangeTest"
assert deepspeed.utils.logger.name and deepspeed.checkpointing.configure and deepspeed.comm.get_rank() == 0
assert "initialize" in dir(deepspeed) and "ops" in dir(deepspeed)
print(deepspeed.__version__, "deepspeed" in sys.modules)
"""
    assert python(code) == "0.19.8+zeropage False"


# -- installed


def test_import_find_spec_and_metadata_answer() -> None:
    code = """
import importlib.metadata as metadata, importlib.util, sys
import zeropage.deepspeed
zeropage.deepspeed.install()
zeropage.deepspeed.install()
assert sum(type(finder).__name__ == "AliasFinder" for finder in sys.meta_path) == 1
assert importlib.util.find_spec("deepspeed").loader is not None
assert metadata.version("DeepSpeed") == "0.19.8+zeropage" and metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert "deepspeed" in {d.metadata["Name"] for d in metadata.distributions()}
import deepspeed
from deepspeed.runtime.zero import partition_parameters
from deepspeed import comm as dist
import deepspeed.ops.adam as adam
assert deepspeed.zero.Init is partition_parameters.Init and dist is deepspeed.comm
assert importlib.util.find_spec("deepspeed.zero").name == "deepspeed.zero"
assert "deepspeed" in metadata.packages_distributions()["deepspeed"]
assert all(m.__spec__.name == name for name, m in sys.modules.items() if name.split(".")[0] == "deepspeed")
assert importlib.util.find_spec("deepspeed.compression") is None
try:
    deepspeed.no_such_name
except AttributeError as error:
    print(error)
"""
    assert python(code).startswith("module 'deepspeed' has no attribute 'no_such_name'")


@pytest.mark.slow
def test_every_module_can_be_imported() -> None:
    imports = "\n".join(f"import {name}" for name in MODULES)
    assert python(f"import zeropage.deepspeed; zeropage.deepspeed.install()\n{imports}\nprint('all')") == "all"


def test_the_version_satisfies_what_libraries_ask() -> None:
    from packaging.version import parse

    assert parse("0.18.2") <= parse(zeropage.deepspeed.__version__) < parse("0.20")


@pytest.mark.slow
def test_uninstall_leaves_nothing() -> None:
    code = """
import importlib.metadata, importlib.util, sys
import zeropage.deepspeed
zeropage.deepspeed.install()
import deepspeed.runtime.engine
zeropage.deepspeed.uninstall()
assert not zeropage.deepspeed.installed()
assert not [name for name in sys.modules if name.split(".")[0] == "deepspeed"]
assert importlib.util.find_spec("deepspeed") is None
try:
    importlib.metadata.version("deepspeed")
except importlib.metadata.PackageNotFoundError:
    print("gone")
"""
    assert python(code) == "gone"


@pytest.mark.slow
def test_what_is_out_of_scope_imports_and_raises_when_used() -> None:
    code = """
import zeropage.deepspeed
zeropage.deepspeed.install()
import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils.groups import _get_sequence_parallel_group
class Mine(PipelineModule): pass
assert not isinstance(1, MoE)
for use in (MoE, Mine, deepspeed.tp_model_init, _get_sequence_parallel_group, lambda: LayerSpec(int, 3)):
    try:
        use()
    except NotImplementedError as error:
        print(str(error).split(" has no")[0], end=" ")
"""
    names = "moe.layer.MoE pipe.PipelineModule tp_model_init utils.groups._get_sequence_parallel_group pipe.LayerSpec"
    assert python(code) == " ".join(f"deepspeed.{name}" for name in names.split())


@pytest.mark.slow
def test_transformers_can_put_its_wrapper_in_place() -> None:
    """It replaces a name of a module for the time of `zero.Init`, and puts the old object back."""
    code = """
import zeropage.deepspeed
zeropage.deepspeed.install()
from transformers.integrations.deepspeed import prevent_arange_dtype_change
from deepspeed.runtime.zero import partition_parameters
before = partition_parameters.zero_wrapper_for_fp_tensor_constructor
with prevent_arange_dtype_change():
    pass
print(partition_parameters.zero_wrapper_for_fp_tensor_constructor is before)
"""
    assert python(code) == "True"


# -- order


LOOKS = {
    "transformers": "import transformers.integrations.deepspeed as m; print(m.HfDeepSpeedConfig.__mro__[1].__module__)",
    "accelerate": "import accelerate.accelerator as m; print(m.DeepSpeedEngineWrapper.__module__)",
    "trl": "import trl.import_utils as m; print(m.is_deepspeed_available())",
    "lightning": "import lightning.fabric.strategies.deepspeed as m; print(bool(m._DEEPSPEED_GREATER_EQUAL_0_16))",
}


@pytest.mark.parametrize(
    ("library", "sees"),
    [
        ("transformers", "accelerate.utils.deepspeed"),
        ("accelerate", "accelerate.utils.deepspeed"),
        ("trl", "True"),
        ("lightning", "True"),
    ],
)
@pytest.mark.slow
def test_libraries_find_it(library: str, sees: str) -> None:
    assert python(f"import zeropage.deepspeed; zeropage.deepspeed.install(); {LOOKS[library]}") == sees


@pytest.mark.parametrize(
    ("imports", "named"),
    [
        ("import transformers.integrations.deepspeed", "transformers.integrations.deepspeed"),
        ("from transformers import Trainer", "transformers.integrations.deepspeed"),
        ("import accelerate", "accelerate.accelerator"),
    ],
)
@pytest.mark.slow
def test_a_call_that_comes_too_late_is_an_error(imports: str, named: str) -> None:
    told = python(f"import zeropage.deepspeed\n{imports}\nzeropage.deepspeed.install()")
    assert told.startswith(f"zeropage.errors.ConfigError: {named} was imported before and has concluded")
    assert "python -m zeropage.deepspeed" in told


@pytest.mark.slow
def test_importing_a_library_alone_is_not_too_late() -> None:
    """transformers itself looks only when its parts are used."""
    code = f"import transformers, zeropage.deepspeed; zeropage.deepspeed.install(); {LOOKS['transformers']}"
    assert python(code) == "accelerate.utils.deepspeed"


# -- beside a real one

SHOW = "import deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))"


@pytest.mark.slow
def test_one_that_is_installed_asks_for_a_choice(real_deepspeed: str) -> None:
    told = python("import zeropage.deepspeed; zeropage.deepspeed.install()", path=real_deepspeed)
    assert "DeepSpeed itself is installed (" in told and "install(replace=True)" in told
    assert "ZEROPAGE_REPLACE_DEEPSPEED=1" in told


@pytest.mark.parametrize(("call", "variable"), [("replace=True", "0"), ("", "1")])
@pytest.mark.slow
def test_the_choice_is_an_argument_or_a_variable(real_deepspeed: str, call: str, variable: str) -> None:
    code = f"import zeropage.deepspeed; zeropage.deepspeed.install({call}); {SHOW}"
    seen = python(code, path=real_deepspeed, ZEROPAGE_REPLACE_DEEPSPEED=variable)
    assert seen == "0.19.8+zeropage 0.19.8+zeropage"


@pytest.mark.slow
def test_without_the_choice_it_stays_what_it_is(real_deepspeed: str) -> None:
    assert python(f"import zeropage.deepspeed; {SHOW}", path=real_deepspeed) == "0.1 0.1"


@pytest.mark.slow
def test_one_that_is_imported_already_is_never_mixed(real_deepspeed: str) -> None:
    code = "import deepspeed, zeropage.deepspeed; zeropage.deepspeed.install(replace=True)"
    told = python(code, path=real_deepspeed)
    assert "DeepSpeed itself is imported already" in told and "half of each would be neither" in told


@pytest.mark.slow
def test_a_folder_of_that_name_is_no_installation(tmp_path: Path) -> None:
    """Programs keep their JSON files in a folder called deepspeed."""
    (tmp_path / "deepspeed").mkdir()
    path = os.pathsep.join([SOURCE, str(tmp_path)])
    assert python(f"import zeropage.deepspeed; zeropage.deepspeed.install(); {SHOW}", path=path).startswith("0.19.8")
