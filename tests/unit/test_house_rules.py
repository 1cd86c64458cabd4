"""Rules of the code itself, kept by reading it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeropage as zp

SOURCE = Path(zp.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_examples" not in path.parts)
ROOT = SOURCE.parent.parent
TORCHRUN = {"torch.distributed", "torch.distributed.run", "torch.distributed.elastic.multiprocessing.errors"}


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_all_is_true(path: Path) -> None:
    """(The order is ruff's to check.)"""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = ast.literal_eval(node.value)
            defined = {
                name
                for other in ast.walk(tree)
                for name in (
                    [other.name] if isinstance(other, (ast.ClassDef, ast.FunctionDef))
                    else [alias.asname or alias.name for alias in other.names]
                    if isinstance(other, (ast.Import, ast.ImportFrom))
                    else [t.id for t in other.targets if isinstance(t, ast.Name)]
                    if isinstance(other, ast.Assign)
                    else [other.target.id] if isinstance(other, ast.AnnAssign) and isinstance(other.target, ast.Name)
                    else []
                )
            }  # fmt: skip
            assert set(names) <= defined


def test_every_public_name_is_documented() -> None:
    assert zp.__all__ == sorted(zp.__all__)
    for name in zp.__all__:
        assert getattr(zp, name).__doc__, name


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_the_transports_talk_to_other_ranks(path: Path) -> None:
    """Checkpoints use torch's file format, which lives under the same name; the tensor face describes itself to it.

    `zeropage run` is torchrun with more options. The face of DeepSpeed shows programs `torch.distributed` under
    DeepSpeed's names, and `zeropage bench` measures it beside the transports.
    """
    if path.parent.name in ("transport", "deepspeed", "bench"):
        return
    used = [module for module in _imports(ast.parse(path.read_text())) if module.startswith("torch.distributed")]
    if path.parent.name == "launching":
        used = [module for module in used if module not in TORCHRUN]
    assert all(module.startswith("torch.distributed.checkpoint") for module in used)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_the_tensor_face_knows_operators(path: Path) -> None:
    if path.parent.name != "tensor":
        assert "torch.ops" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_the_pager_and_its_nodes_change_residency(path: Path) -> None:
    if path.name in ("pager.py", "page.py"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        assert not any(isinstance(t, ast.Attribute) and t.attr == "live" for t in targets)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_is_probed_and_nothing_is_global(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", f"line {node.lineno}"


def test_imports_go_downwards() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)})
    assert result.returncode == 0, result.stdout


def test_importing_loads_no_integration() -> None:
    """A clean import brings no training library along."""
    heavy = {"transformers", "deepspeed", "lightning", "matplotlib", "mpi4py"}
    code = f"import sys, zeropage; print(*(set(sys.modules) & {heavy}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert result.stdout.strip() == "", result.stderr
