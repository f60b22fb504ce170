"""QAttn's Algorithm 1 with this package's names, at each of its granularities, against FP64.

The paper's call and ours::

    get_default_qattn_quantization_config(per_channel, is_dynamic, input_per_channel)
    qattn_paper(weight, dynamic, activation)

The oracle below is written from the paper's equations 1-3 and 6-10 with the range narrowed to [-127, 127]; it shares no
code with the package. Its scales are rounded to float32, as stored ones are; all else is FP64.
"""

import math

import numpy as np
import pytest
import torch
from quantizer_models import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNEL,
    LINEAR,
    OUR_DEQUANTIZE,
    OUR_DYNAMIC_QUANTIZE,
    OUR_QUANTIZE,
    QUANTIZE,
    Mlp,
    count,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.quantizer import QFrameworkQuantizer, calibrate, qattn_paper

BATCH, TOKENS, DIM, HIDDEN = 3, 5, 16, 24
erf = np.vectorize(math.erf)


def scale_of(x, axes):
    """Equation 2: the largest magnitude over ``axes`` on 127."""
    return (np.abs(x).max(axis=axes, keepdims=True) / 127).astype(np.float32).astype(np.float64)


def quantize(x, scale):
    """Equation 1; NumPy rounds halves to even."""
    return np.clip(np.round(x / scale), -127, 127)


class Oracle:
    def __init__(self, model, data, per_channel, input_per_channel, is_dynamic):
        self.parameters = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
        self.per_channel, self.is_dynamic = per_channel, is_dynamic
        # A static scale of "per channel" inputs belongs to a position: all but the token axis are reduced.
        static = (0, 2) if input_per_channel else (0, 1, 2)
        self.axes = ((2,) if input_per_channel else (0, 1, 2)) if is_dynamic else static
        self.static_scales = self.calibrate(data.double().numpy())

    def linear(self, name, x):
        return x @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]

    @staticmethod
    def gelu(x):
        return x * 0.5 * (1 + erf(x / math.sqrt(2)))

    def calibrate(self, x):
        """Scales of the four tensors of the float model that static quantization rounds."""
        hidden = self.linear("fc1", x)
        active = self.gelu(hidden)
        tensors = {"fc1.in": x, "fc1.out": hidden, "fc2.in": active, "fc2.out": self.linear("fc2", active)}
        return {name: scale_of(tensor, self.axes) for name, tensor in tensors.items()}

    def scale(self, name, x):
        return scale_of(x, self.axes) if self.is_dynamic else self.static_scales[name]

    def quantized_linear(self, name, x):
        """Equations 6 and 7 where static, 9 and 10 where dynamic: INT8 operands, exact sums, one rescale."""
        weight = self.parameters[f"{name}.weight"]
        weight_scale = scale_of(weight, (1,) if self.per_channel else (0, 1))
        scale = self.scale(f"{name}.in", x)
        product = quantize(x, scale) @ quantize(weight, weight_scale).T
        y = product * scale * weight_scale.T + self.parameters[f"{name}.bias"]
        if self.is_dynamic:
            return y
        return quantize(y, self.static_scales[f"{name}.out"]) * self.static_scales[f"{name}.out"]

    def __call__(self, x):
        return self.quantized_linear("fc2", self.gelu(self.quantized_linear("fc1", x.double().numpy())))


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("input_per_channel", [False, True], ids=["input_scalar", "input_per_channel"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["weight_scalar", "weight_per_channel"])
def test_algorithm_1(per_channel, input_per_channel, is_dynamic):
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    model = Mlp(DIM, HIDDEN).eval()
    sample = torch.randn(BATCH, TOKENS, DIM, generator=generator)
    data = torch.randn(4 * BATCH, TOKENS, DIM, generator=generator)

    quantizer = QFrameworkQuantizer()
    quantizer.set_module_type(
        torch.nn.Linear,
        qattn_paper(
            weight="per_channel" if per_channel else "per_tensor",
            activation="per_token" if input_per_channel else "per_tensor",
            dynamic=is_dynamic,
        ),
    )
    exported_model = torch.export.export(model, (sample,)).module()
    prepared_model = prepare_pt2e(exported_model, quantizer)
    calibrate(prepared_model, data.split(BATCH))
    converted_model = convert_pt2e(prepared_model, fold_quantize=True)

    assert count(converted_model) == expected_nodes(per_channel, input_per_channel, is_dynamic)
    oracle = Oracle(model, data, per_channel, input_per_channel, is_dynamic)
    expected = oracle(sample)
    actual = converted_model(sample).detach().double().numpy()
    # Integers agree (no value of this seed lies within float32 rounding of a tie), so only float32 rounding is left:
    # HIDDEN products summed, a rescale, a bias.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=(HIDDEN + 4) * 2.0**-24 * np.abs(expected).max())
    stored = [p for p in converted_model.state_dict().values() if p.dtype == torch.int8]
    for name, int8 in zip(("fc1", "fc2"), stored, strict=True):
        weight = oracle.parameters[f"{name}.weight"]
        assert np.array_equal(int8.numpy(), quantize(weight, scale_of(weight, (1,) if per_channel else (0, 1))))


def expected_nodes(per_channel, input_per_channel, is_dynamic):
    """Two linears; static ones round their outputs as well (equation 6), dynamic ones do not (equation 9)."""
    activations = 2 if is_dynamic else 4
    nodes = dict.fromkeys((LINEAR, DEQUANTIZE_CHANNEL if per_channel else DEQUANTIZE), 2)
    nodes |= {torch.ops.aten.gelu.default: 1, torch.ops.aten.dropout.default: 1, torch.ops.aten.detach.default: 1}
    if is_dynamic:
        import operator

        return nodes | {
            OUR_DYNAMIC_QUANTIZE: activations,
            OUR_DEQUANTIZE: activations,
            operator.getitem: 2 * activations,
        }
    if input_per_channel:
        return nodes | {OUR_QUANTIZE: activations, OUR_DEQUANTIZE: activations}
    return nodes | {QUANTIZE: activations, DEQUANTIZE: nodes.get(DEQUANTIZE, 0) + activations}
