"""Only ``qframework/compat/`` uses private or unstable names of other libraries."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import qframework
from qframework.compat.names import NAMES

PACKAGE = Path(qframework.__file__).parent
ROOM = PACKAGE / "compat"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents)
LIBRARIES = ("torch", "triton", "torchao", "transformers", "diffusers")
# Spelled like public names, but not promised to be stable. All of torchao, which makes no such promise.
UNSTABLE = (
    "diffusers.hooks.layerwise_casting",
    "diffusers.quantizers",
    "diffusers.models.attention_dispatch",
    "torch.ao",
    "torch.fx.experimental",
    "torchao",
    "transformers.models",
    "triton.backends",
    "triton.compiler",
    "triton.experimental",
    "triton.language.core",
    "triton.language.extra",
    "triton.runtime",
    "triton.tools",
)
# Libraries that modules import from another module of the package, by the name that they get there.
OWN_NAMES = {"triton": "triton", "tl": "triton.language"}
# Methods of NamedTuple.
PYTHON = {"_asdict", "_exit", "_field_defaults", "_fields", "_make", "_replace"}
# Names of operators in saved files.
SAVED = {"torch._sym_sqrt"}
# Last parts of paths in the table, and its keys.
LISTED = {last for path in NAMES if (last := path.rpartition(".")[2]).startswith("_") and not last.endswith("__")}
META_KEYS = {"example_value", "grapharg", "tensor_dict"}
DOTTED = re.compile(rf"({'|'.join(LIBRARIES)})(\.\w+)+")


def is_private(path: str) -> bool:
    """Whether a dotted path that begins with a library contains a private or unstable part."""
    if path.partition(".")[0] not in LIBRARIES:
        return False
    hidden = any(part.startswith("_") and not part.endswith("__") for part in path.split("."))
    return hidden or any(path == each or path.startswith(f"{each}.") for each in UNSTABLE)


def own_attributes(trees: list[ast.Module]) -> set[str]:
    """Private names that the package itself defines: methods, fields, and what is set on ``self`` or ``cls``."""
    own = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        own.add(each.name)
                    elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        own.add(each.target.id)
                    elif isinstance(each, ast.Assign):
                        own |= {target.id for target in each.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {
                    node.attr for owner in [node.value] if isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                }
    return own - LISTED


def violations(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names in a module, with their lines."""
    names = dict(OWN_NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names |= {path.partition(".")[0]: path.partition(".")[0] for path in paths}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("qframework"):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {alias.asname or alias.name: path for alias, path in zip(node.names, paths, strict=True)}
        else:
            continue
        yield from (f"{node.lineno}: {path}" for path in paths if is_private(path))

    def chain(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            before = chain(node.value)
            return f"{before}.{node.attr}" if before else ""
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in own | PYTHON
            if private or is_private(chain(node)):
                yield f"{node.lineno}: {chain(node) or node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in LISTED:
            yield f"{node.value.lineno}: {node.arg}="
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            key = node.value in LISTED | META_KEYS and not _is_operator_table(tree, node)
            path = DOTTED.fullmatch(node.value) and is_private(node.value) and node.value not in SAVED
            if key or path:
                yield f"{node.lineno}: {node.value!r}"


def _is_operator_table(tree: ast.Module, text: ast.Constant) -> bool:
    """Whether a string is in a set, dictionary or tuple at the top of a module: names of operators in saved files."""
    tops = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return any(text is each for node in tops if node.value is not None for each in ast.walk(node.value))


TREES = {path: ast.parse(path.read_text()) for path in MODULES}
OWN = own_attributes(list(TREES.values()))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_names_are_reached_through_compat(module: Path) -> None:
    assert not sorted(set(violations(TREES[module], OWN)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._set_grad_enabled",
        "import torch._dynamo",
        "import torch\nwith torch._dynamo.config.patch(): pass",
        "from torch._ops import OpOverload",
        "from torch import _guards",
        "from torch.utils import _pytree as pytree",
        "from torch.fx.experimental import symbolic_shapes",
        "import torch.ao.quantization as quantization",
        "def f():\n    from torchao.quantization.pt2e import ObserverBase",
        "from transformers.models.sam import modeling_sam",
        "from qframework.kernels.runtime.triton import triton\ntriton.runtime.driver.active",
        "from qframework.kernels.runtime.triton import tl\n@tl.core.builtin\ndef f(): pass",
        "func._schema.arguments",
        "model._modules['x'] = None",
        "class A:\n    def f(self):\n        return self._parameters",
        "Annotation(_annotated=True)",
        "getattr(model, '_orig_mod', model)",
        "node.meta.get('example_value')",
        "probe.__dict__['_parameters'] = {}",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "import logging\nlogging.getLogger('torch.utils._pytree')",
    ],
)
def test_a_private_name_is_detected(source: str) -> None:
    assert list(violations(ast.parse(source), OWN))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compiler.reset()",
        "from torch.fx import GraphModule, Node",
        "tile._replace(block_m=1)",
        "class A:\n    def f(self):\n        return self._launch()",
        "from qframework.compat.dispatch import FakeTensor",
        "SAME = {'_to_copy': 'to'}",
        "x.__dict__.update(y)",
    ],
)
def test_public_names_are_allowed(source: str) -> None:
    tree = ast.parse(source)
    assert not list(violations(tree, OWN | {"_launch"}))


def test_every_name_in_compat_is_in_the_table() -> None:
    trees = [ast.parse(path.read_text()) for path in ROOM.glob("*.py") if path.name != "names.py"]
    own = own_attributes(trees)
    known = {part for path in NAMES for part in path.split(".")}
    known |= {name.older for name in NAMES.values()} | {"_buffers["}
    used = set()
    for tree in trees:
        for found in violations(tree, own):
            path = found.partition(": ")[2].strip("'").removesuffix(".default")
            used |= {path.rpartition(".")[2]} if path.startswith(LIBRARIES) else {path}
    assert len(used) > 60
    assert sorted(used - known) == []


def test_every_name_of_the_table_is_used() -> None:
    sources = "\n".join(path.read_text() for path in ROOM.glob("*.py") if path.name != "names.py")
    sources += (PACKAGE / "training" / "block_tensor.py").read_text()  # the methods that AOTAutograd calls
    lasts = {path: re.split(r"[. ]", path)[-1] for path in NAMES if not path.startswith("has_torch_function")}
    special = {"__dict__", "__getitem__", "cache_clear"}
    unused = [path for path, last in lasts.items() if last not in special and not re.search(rf"\b{last}\b", sources)]
    assert not unused


def test_exports_are_recognized_through_compat() -> None:
    """Dynamo of PyTorch 2.11, with which few tests run, answers ``is_exporting()`` with True in every compilation."""
    assert [path for path in MODULES if "compiler.is_exporting" in path.read_text()] == []
