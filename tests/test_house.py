"""The rules of the house that a machine can hold: who may import whom, and what may be asked where."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "sharding", "kv", "jaxserve", "server")  # each may import those before it
OTHERS = ("bench", "tests")  # may import anything; nothing imports them
COMMAND_LINE = ("server/cli.py", "server/chat.py", "server/generate.py")  # what speaks to a terminal
UNWELCOME = ("utils", "helpers", "common", "misc", "torch", "transformers")
LIBTPU = "jaxserve/plan/slices.py"  # whose compiler is told by environment variables that there is no TPU


def broken_rules(path: str, source: str) -> Iterator[str]:
    """Every rule that this module breaks, as `path:line: rule`."""
    tree = ast.parse(source)
    package = path.split("/")[0]
    if not ast.get_docstring(tree) and source.strip():
        yield f"{path}:1: the first line says what the file is for"
    if Path(path).stem in UNWELCOME:
        yield f"{path}:1: a file is named after its one job"
    for node in ast.walk(tree):
        for problem in _problems(path, package, node):
            yield f"{path}:{getattr(node, 'lineno', 1)}: {problem}"


def _problems(path: str, package: str, node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (p for alias in names for p in _import(package, alias.name))
        case ast.ImportFrom(module=str(module), level=0):
            yield from _import(package, module)
        case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if path != LIBTPU:
            yield "no environment variables of ours; a setting is a field of a config"
        case ast.Attribute(value=owner, attr="default_backend" | "platform") if (
            path != "pallas_kernels/op.py"
        ):
            if not (isinstance(owner, ast.Name) and owner.id == "sys"):
                yield "only pallas_kernels/op.py asks for the platform"
        case ast.keyword(arg="interpret") | ast.arg(arg="interpret"):
            yield "no interpret= argument; wrap the call in pltpu.force_tpu_interpret_mode()"
        case ast.Call(func=ast.Name(id="print")) if path not in COMMAND_LINE:
            yield "only the command line prints"


def _import(package: str, module: str) -> Iterator[str]:
    target = module.split(".")[0]
    if target in UNWELCOME:
        yield f"imports {target}, which is not in this environment"
    if target in OTHERS:
        yield f"nothing imports {target}"
    if target in PACKAGES and PACKAGES.index(target) > PACKAGES.index(package):
        yield f"{package} imports {target}; imports point down only: {' <- '.join(PACKAGES)}"


def test_every_module_keeps_the_rules():
    files = [path.relative_to(ROOT).as_posix() for p in PACKAGES for path in sorted((ROOT / p).rglob("*.py"))]
    assert files
    assert [rule for path in files for rule in broken_rules(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    "path, line, words",
    [
        ("kv/pages.py", "import jaxserve.config", "point down"),
        ("server/app.py", "from bench import serve", "nothing imports bench"),
        ("jaxserve/llm.py", "import torch", "not in this environment"),
        ("jaxserve/engine.py", "backend = jax.default_backend()", "asks for the platform"),
        ("jaxserve/engine.py", "name = device.platform", "asks for the platform"),
        ("jaxserve/engine.py", "path = os.environ['X']", "environment"),
        ("pallas_kernels/op.py", "def f(interpret): pass", "interpret="),
        ("kv/pages.py", "print(1)", "prints"),
        ("kv/utils.py", "x = 1", "one job"),
    ],
)
def test_a_broken_rule_is_named_with_its_file(path, line, words):
    assert [rule for rule in broken_rules(path, f'"""Doc."""\n{line}') if words in rule and path in rule]


def test_a_module_without_a_docstring_is_named():
    assert list(broken_rules("kv/pages.py", "x = 1")) == [
        "kv/pages.py:1: the first line says what the file is for"
    ]


def test_every_op_has_a_definition_a_cost_and_cases():
    op_module = importlib.import_module("pallas_kernels.op")
    package = importlib.import_module("pallas_kernels")
    for info in pkgutil.iter_modules(package.__path__):
        if not info.ispkg:
            continue
        module = importlib.import_module(f"pallas_kernels.{info.name}")
        ops = [value for value in vars(module).values() if isinstance(value, op_module.Op)]
        assert ops, f"pallas_kernels/{info.name} holds no Op"
        assert all(op.reference.__doc__ for op in ops), (
            f"pallas_kernels/{info.name}: the reference is the documentation"
        )
        assert callable(importlib.import_module(f"{module.__name__}.reference").cost)
        assert importlib.import_module(f"{module.__name__}.cases")
