"""``import qframework`` is fast and has no side effects, and ``torch.compile`` finds the backend without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OPERATORS = {"quantize", "dynamic_quantize", "dequantize", "int8_linear"}
HEAVY = (
    "torchao",
    "timm",
    "torchvision",
    "sklearn",
    "torch._inductor",
    "typer",
    "rich",
    "transformers",
    "diffusers",
    "matplotlib",
)

NEW_MODULES = """
import json, sys
import torch
before = set(sys.modules)
import qframework
print(json.dumps(sorted(set(sys.modules) - before)))
"""

SIDE_EFFECTS = """
import json, os, warnings
import torch, torch._dynamo.config, torch._inductor.config

def state():
    return {
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "functorch": torch._functorch.config.get_config_copy(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
    }

before = state()
import qframework
after = state()
print(json.dumps({
    "changed": sorted(key for key in before if before[key] != after[key]),
    "cuda": torch.cuda.is_initialized(),
    "operators": [name for name in %r if hasattr(torch.ops.qframework, name)],
}))
"""

COMPILE = """
import json, sys
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
x = torch.randn(3, 8)
before = "qframework" in sys.modules
with torch.no_grad():
    compiled = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"})
    y, expected = compiled(x), model(x)
print(json.dumps({
    "imported before": before,
    "imported after": "qframework" in sys.modules,
    "error": (y - expected).abs().max().item(),
    "largest": expected.abs().max().item(),
}))
"""

BACKEND = """
import json, sys
import torch
def has_inductor():
    return "torch._inductor.compile_fx" in sys.modules
import qframework.backend
imported = has_inductor()
torch.compile(torch.nn.Linear(8, 16), backend="qframework")
print(json.dumps({"imported": imported, "compiled": has_inductor()}))
"""

NAME_GONE = """
import json, logging
messages = []
logging.getLogger("qframework.kernels.runtime.gluon").addFilter(lambda record: messages.append(record.getMessage()))
from triton.experimental.gluon.language.nvidia import hopper
del hopper.warpgroup_mma
import qframework, torch
from qframework.kernels.runtime import gluon
print(json.dumps({"gluon": gluon.HAS_GLUON, "messages": messages}))
"""


WITHOUT_TORCH = """
import json, sys
sys.argv = ["/usr/bin/qframework"]
import qframework.cli
from typer.testing import CliRunner
commands = [[], *[[command.callback.__name__.replace("_", "-")] for command in qframework.cli.app.registered_commands]]
exits = [CliRunner().invoke(qframework.cli.app, [*arguments, "--help"]).exit_code for arguments in commands]
imported = "torch" in sys.modules
CliRunner().invoke(qframework.cli.app, ["benchmark", "nothing"])
import torch
print(json.dumps({"exits": exits, "torch": imported, "operators": hasattr(torch.ops.qframework, "int8_linear")}))
"""

ATTRIBUTES = """
import json, sys
import qframework
before = [name for name in qframework.__all__ if name not in vars(qframework)]
kinds = {name: type(getattr(qframework, name)).__name__ for name in qframework.__all__}
print(json.dumps({"lazy": before, "kinds": kinds}))
"""


def run_python(source: str, cwd: Path) -> Any:
    """Run ``source`` in a fresh interpreter and return the JSON of its last line."""
    result = subprocess.run([sys.executable, "-c", source], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_is_lean(tmp_path: Path) -> None:
    modules = run_python(NEW_MODULES, tmp_path)
    assert "qframework" in modules
    heavy = [module for module in modules if any(module == name or module.startswith(f"{name}.") for name in HEAVY)]
    assert not heavy


def test_every_public_name_is_an_attribute_that_loads_at_first_use(tmp_path: Path) -> None:
    report = run_python(ATTRIBUTES, tmp_path)
    rooms = {"attention", "backend", "conversion", "evaluation", "export", "quantizer", "serialization"}
    rooms |= {"training", "tuning"}
    assert rooms | {"Plan", "explain", "sensitivity", "tune"} <= set(report["lazy"])
    assert {name for name, kind in report["kinds"].items() if kind == "module"} == {
        *rooms, "errors", "kernels", "numerics",
    }  # fmt: skip
    assert report["kinds"]["tune"] == report["kinds"]["sensitivity"] == "function"


def test_import_only_registers_operators(tmp_path: Path) -> None:
    report = run_python(SIDE_EFFECTS % sorted(OPERATORS), tmp_path)
    assert report["changed"] == []
    assert not report["cuda"]
    assert set(report["operators"]) == OPERATORS


def test_help_needs_no_torch(tmp_path: Path) -> None:
    report = run_python(WITHOUT_TORCH, tmp_path)
    assert len(report["exits"]) == 9
    assert set(report["exits"]) == {0}
    assert not report["torch"]
    assert report["operators"]


def test_packages_that_run_as_modules_get_the_operators(tmp_path: Path) -> None:
    """While Python looks for the module of ``-m``, the program has no name yet."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from qframework.numerics import sqnr_db\nimport torch\n")
    (package / "__main__.py").write_text("import torch\nprint(hasattr(torch.ops.qframework, 'int8_linear'))\n")
    command = [sys.executable, "-m", "package"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result.stderr


def test_the_entry_point_registers_the_backend(tmp_path: Path) -> None:
    report = run_python(COMPILE, tmp_path)
    assert not report["imported before"]
    assert report["imported after"]
    # A float result would be equal; a small difference shows that INT8 ran correctly.
    assert 0 < report["error"] < 0.05 * report["largest"]


def test_torch_compile_imports_inductor_before_the_first_call(tmp_path: Path) -> None:
    """Inductor starts processes, which takes seconds: too long for an import, and too late in the first call."""
    assert run_python(BACKEND, tmp_path) == {"imported": False, "compiled": True}


def test_a_missing_name_of_gluon_disables_only_its_kernels(tmp_path: Path) -> None:
    """Gluon is experimental: the next release of Triton may rename something."""
    pytest.importorskip("triton.experimental.gluon")
    report = run_python(NAME_GONE, tmp_path)
    assert not report["gluon"]
    (message,) = report["messages"]
    assert "warpgroup_mma" in message


_COST = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import qframework
print(middle - start, time.process_time() - start)
"""


def test_importing_takes_less_than_one_and_a_half_times_torch() -> None:
    """In processor time, the least of three processes each, with compiled bytecode, since the machine may be busy."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _COST]
    outputs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(3)]
    torch_alone, both = (min(float(run.stdout.split()[index]) for run in outputs) for index in range(2))
    assert both < 1.5 * torch_alone
