"""The rules of CONTRIBUTING.md that a program can check: layers, sizes, names, docstrings, and what may never be called."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "shared": {"shared"},
    "cache": {"shared", "cache"},
    "services": {"shared", "cache", "services"},
    "loadgen": {"shared", "cache", "loadgen"},
}
ROLES = {"encoder", "prefill", "decode"}
STAGES = ROLES | {"router", "preprocess", "scaler"}
PURE = ["shared/policies/**/*.py", "shared/cost_model/*.py", "cache/*keys.py", "cache/prefix_tree.py", "cache/pool.py"]
IMPURE = {"asyncio", "fastapi", "nats", "redis", "torch", "time", "random", "os", "socket", "httpx", "aiohttp", "threading"}
TORCH_FREE = [  # the control plane, and what emulated instances run: the very roles and stores of real ones
    "services/cli.py",
    "services/router/**/*.py",
    "services/preprocess/**/*.py",
    "services/encoder/*.py",
    "services/prefill/*.py",
    "services/decode/*.py",
    "services/scaler/**/*.py",
    "services/instance.py",
    "services/emulated_host.py",
    "shared/cost_model/*.py",
    "shared/engine/emulated.py",
    "shared/fleet.py",
    "shared/transport/emulated.py",
]
BANNED_FILES = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec"}
BANNED_OPTIONS = {"allow_pickle", "trust_remote_code"}  # unless they are False
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_DOCSTRING_LINES = 6
TRIVIAL_METHOD_LINES = 8  # a shorter method of a documented class may explain itself by its name

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    path: Path
    tree: ast.Module
    text: str

    @property
    def where(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        """Dotted import name, such as triptych.shared.engine."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(("triptych", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _load(path: Path) -> Module:
    text = path.read_text()
    return Module(path, ast.parse(text), text)


MODULES = [_load(path) for layer in MAY_IMPORT for path in sorted((ROOT / layer).rglob("*.py"))]
BY_NAME = {module.name: module for module in MODULES}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not _is_type_checking(child):
            yield from _walk_runtime(child)


def _imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """Dotted names that are imported and their lines; `from a import b` gives a.b where that is a module of ours."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import on line {node.lineno}: write the whole name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in BY_NAME else str(node.module)), node.lineno


def _all_imports(module: Module) -> list[tuple[str, int]]:
    return list(_imports(_walk_runtime(module.tree)))


def _functions(module: Module) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(module.tree) if isinstance(node, FunctionNode))


def _tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_there_is_something_to_check() -> None:
    assert {module.path.relative_to(ROOT).parts[0] for module in MODULES} == set(MAY_IMPORT)
    assert "triptych.shared.messages" in BY_NAME


def test_layers() -> None:
    wrong = []
    for module in MODULES:
        layer = module.path.relative_to(ROOT).parts[0]
        for name, line in _all_imports(module):
            parts = name.split(".")
            if parts[0] == "triptych" and parts[1] not in MAY_IMPORT[layer]:
                wrong.append(f"{module.where}:{line} ({layer}) imports {name}")
            if parts[0] in MAY_IMPORT:
                wrong.append(f"{module.where}:{line} imports {name} without `triptych.`")
    assert not wrong, "\n".join(wrong)


def _stage_import_allowed(importer: Module, stage: str, at_top_level: bool) -> bool:
    parts = importer.path.relative_to(ROOT).parts
    if parts[:2] == ("services", stage):
        return True
    if parts == ("services", "instance.py"):
        return stage in ROLES
    return parts == ("services", "cli.py") and not at_top_level


def test_services_never_import_each_other() -> None:
    wrong = []
    for module in MODULES:
        top_level = {line for _, line in _imports(iter(module.tree.body))}
        for name, line in _all_imports(module):
            parts = name.split(".")
            if parts[:2] != ["triptych", "services"] or len(parts) < 3 or parts[2] not in STAGES:
                continue
            if not _stage_import_allowed(module, parts[2], line in top_level):
                wrong.append(
                    f"{module.where}:{line} imports {name}: services talk by message, cli.py imports a stage when asked"
                )
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    """Imports inside functions count: they may save memory or time, not hide a cycle."""
    graph = {
        module.name: {name for name, _ in _all_imports(module) if name in BY_NAME and name != module.name} for module in MODULES
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_pure_modules_do_no_input_or_output() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for pattern in PURE
        for path in sorted(ROOT.glob(pattern))
        for name, line in _all_imports(_load(path))
        if name.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_module_size_and_name() -> None:
    wrong = [f"{m.where}: {n} lines" for m in MODULES if (n := m.text.count("\n")) > MAX_MODULE_LINES]
    wrong += [f"{m.where}: name it by what it does" for m in MODULES if m.path.name in BANNED_FILES]
    assert not wrong, "\n".join(wrong)


def test_function_size() -> None:
    wrong = []
    for module in MODULES:
        for node in _functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                wrong.append(f"{module.where}:{node.lineno} {node.name}: {lines} lines")
            is_command = any(".command" in ast.unparse(decorator) for decorator in node.decorator_list)
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in arguments if name not in {"self", "cls"}])
            if count > MAX_PARAMETERS and not is_command:
                wrong.append(f"{module.where}:{node.lineno} {node.name}: {count} parameters, a dataclass is missing")
    assert not wrong, "\n".join(wrong)


def _num_prose_lines(docstring: str) -> int:
    """Drawings (indented, or with bars) don't count."""
    return len([line for line in docstring.splitlines() if line.strip() and "|" not in line and not line.startswith("  ")])


def test_module_docstrings() -> None:
    wrong = []
    for module in MODULES:
        docstring = ast.get_docstring(module.tree) or ""
        if not docstring and module.text.strip():
            wrong.append(f"{module.where}: no module docstring")
        elif _num_prose_lines(docstring) > MAX_DOCSTRING_LINES:
            wrong.append(f"{module.where}: module docstring over {MAX_DOCSTRING_LINES} lines")
    assert not wrong, "\n".join(wrong)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in node.bases)


@functools.cache
def _protocol_methods() -> set[str]:
    """Methods whose contract is documented once, in their Protocol."""
    protocols = (n for m in MODULES for n in m.tree.body if isinstance(n, ast.ClassDef) and _is_protocol(n))
    return {n.name for protocol in protocols for n in protocol.body if isinstance(n, FunctionNode) and ast.get_docstring(n)}


def _needs_docstring(node: FunctionNode, is_method: bool) -> bool:
    if node.name.startswith("_") or (is_method and node.name in _protocol_methods()):
        return False
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return not is_method or lines > TRIVIAL_METHOD_LINES


def test_public_functions_of_shared_and_cache_have_docstrings() -> None:
    wrong = []
    for module in (m for m in MODULES if m.where.startswith(("shared/", "cache/"))):
        for owner in [module.tree, *(n for n in module.tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_")]:
            for node in (n for n in owner.body if isinstance(n, FunctionNode)):
                if _needs_docstring(node, isinstance(owner, ast.ClassDef)) and not ast.get_docstring(node):
                    wrong.append(f"{module.where}:{node.lineno} {node.name}")
    assert not wrong, "no docstring:\n" + "\n".join(wrong)


def _dangers(module: Module) -> Iterator[tuple[int, str]]:
    for name, line in _imports(ast.walk(module.tree)):
        if name.split(".")[0] in BANNED_MODULES:
            yield line, name
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            yield node.lineno, f"{node.func.id}()"
        elif isinstance(node, ast.Attribute):
            if node.attr == "load" and ast.unparse(node.value) == "torch":
                yield node.lineno, "torch.load"
            if re.search(r"_object(_list)?$|_pyobj$", node.attr) or node.attr in BANNED_MODULES:
                yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg in BANNED_OPTIONS and ast.unparse(node.value) != "False":
            yield node.value.lineno, f"{node.arg}="


def test_nothing_runs_code_from_data() -> None:
    """No pickle in any form, no torch.load, no eval: peers and files are not trusted with code."""
    wrong = [f"{module.where}:{line} {what}" for module in MODULES for line, what in _dangers(module)]
    assert not wrong, "\n".join(wrong)


def test_the_danger_check_sees_dangers() -> None:
    samples = [
        "import pickle",
        "from torch import distributed\ndistributed.all_gather_object([], 1)",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "socket.recv_pyobj()",
        "numpy.load('x', allow_pickle=True)",
    ]
    harmless = ["model.eval()", "json.load(f)", "numpy.load('x', allow_pickle=False)", "is_object = 1"]
    for text in samples:
        assert list(_dangers(Module(ROOT / "x.py", ast.parse(text), text))), text
    for text in harmless:
        assert not list(_dangers(Module(ROOT / "x.py", ast.parse(text), text))), text


def test_nothing_listens_on_all_interfaces() -> None:
    every = {".".join("0000"), "::", "[::]"}
    wrong = [
        f"{module.where}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node.value in every
    ]
    deployed = [ROOT / "docker-compose.yml", *(p for p in (ROOT / "deploy").rglob("*") if p.suffix in {"", ".yml", ".yaml"})]
    wrong += [str(p.relative_to(ROOT)) for p in deployed if p.is_file() and ".".join("0000") in p.read_text()]
    assert not wrong, "\n".join(wrong)


def test_no_absolute_machine_paths() -> None:
    """Nothing may depend on where the checkout or a home folder is."""
    pattern = re.compile("|".join([re.escape(str(ROOT)) + r"\b", *("/" + name + "/" for name in ("home", "root", "Users"))]))
    wrong = []
    for path in _tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_control_plane_never_imports_torch() -> None:
    """Torch costs a process 340 MB and 6 seconds; the router, the scaler and the command line have no use for it."""
    names = sorted({_load(path).name for pattern in TORCH_FREE for path in ROOT.glob(pattern)})
    assert "triptych.services.router" in names
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
