"""Operators that a saved program may not call: anything that touches more than tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_changes import check_refused, node

TARGETS = (
    "torch.hub.load",
    "torch.load",
    "torch.ops.load_library",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.save.default",
    "torch.ops.aten.save",
    "torch.ops.aten.add",
    "torch.ops.aten._reshape_alias.default",
    "torch.ops.aten._print.default",
    "torch.ops.aten.add.__call__",
    "torch.ops.aten.add.__class__",
    "torch.ops.aten.__class__.__name__",
    "torch.ops.aten.add.Tensor.__call__",
    "torch.ops.higher_order.triton_kernel_wrapper_mutation",
    "torch.ops.higher_order.run_and_save_rng_state",
    "torch.ops.prims.device_put.default",
    "torch.ops.profiler._record_function_enter.default",
    "torch._C._functorch.vmap",
    "torch.utils.cpp_extension.load",
    "torch.ops.qframework.none.default",
    "_operator.methodcaller",
    "_operator.attrgetter",
    "_operator.getitem",
    "_operator.call",
    "math.factorial",
    "#canary:canary_module.A",
    "canary_module.A",
    "builtins.eval",
    "eval",
    "",
)


@pytest.mark.usefixtures("canary_module")
@pytest.mark.parametrize("target", TARGETS)
def test_operators_that_touch_more_than_tensors_are_refused(tmp_path: Path, target: str) -> None:
    check_refused(tmp_path, lambda program: node(program).update(target=target))
