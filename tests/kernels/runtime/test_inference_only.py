"""inference_only.py: backward passes that raise when they run, and scales that depend on their input for autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.linear.int8_linear import int8_linear
from qframework.kernels.quantize import dynamic_quantize
from qframework.kernels.runtime.inference_only import scale_of

WEIGHT, WEIGHT_SCALE = torch.randint(-127, 128, (16, 16), dtype=torch.int8), torch.full((16,), 0.01)
REFUSED = r"int8_linear: inference only, without a gradient. Run the model under torch.no_grad\(\)"


def residual(x: Tensor, bias: Tensor | None = None, weight_scale: Tensor = WEIGHT_SCALE) -> Tensor:
    """A sum whose first summand alone has a gradient."""
    return x + int8_linear(*dynamic_quantize(x), WEIGHT, weight_scale, bias, "relu")


@pytest.mark.parametrize(("backend", "dynamic"), [(None, None), ("aot_eager", False), ("aot_eager", True)])
@pytest.mark.filterwarnings("error:.*autograd kernel was not registered")
@pytest.mark.parametrize("operand", ["x", "bias", "weight_scale"])
def test_a_backward_pass_raises_when_it_runs(operand, backend, dynamic):
    torch._dynamo.reset()
    f = residual if backend is None else torch.compile(residual, backend=backend, fullgraph=True, dynamic=dynamic)
    operands = {"x": torch.randn(3, 5, 16), "bias": torch.randn(16), "weight_scale": torch.full((1,), 0.01)}
    expected = residual(**operands)
    needed = operands[operand].requires_grad_()
    y = f(**operands)
    torch.testing.assert_close(y, expected)
    with pytest.raises(QFrameworkError, match=REFUSED):
        y.sum().backward()
    assert needed.grad is None


def test_the_gradient_of_a_fake_has_the_shape_of_its_result():
    x = torch.randn(3, 5, device="meta").t()
    refused = torch.ops.qframework.refuse_gradient(x, "int8_linear")
    assert (refused.shape, refused.stride(), refused.dtype) == (x.shape, x.stride(), x.dtype)


def test_scale_of():
    scale, x = torch.rand(5, 1), torch.randn(3, 5, 4, dtype=torch.float64)
    torch.library.opcheck(torch.ops.qframework.scale_of, (scale, x))
    assert scale_of(scale, x) is scale
    x.requires_grad_()
    linked = scale_of(scale, x)
    assert linked.requires_grad
    assert linked.data_ptr() == scale.data_ptr()
    assert torch.equal(linked, scale)
    with pytest.raises(QFrameworkError, match=REFUSED):
        linked.sum().backward()
    with torch.no_grad():
        assert scale_of(scale, x) is scale


def test_derivatives_of_torch_func_are_refused():
    with pytest.raises(UnsupportedError, match="int8_linear: the call must be a plain one, got a transform"):
        torch.func.grad(lambda x: residual(x).sum())(torch.randn(3, 16))
