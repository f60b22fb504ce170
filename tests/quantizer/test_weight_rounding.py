"""GPTQ: against NumPy, the reduction of the error, and that convert_pt2e yields exactly its integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantizer_models import Mlp, exported, linears
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.errors import CalibrationError, UnsupportedError
from qframework.numerics import dequantize, quantize_weight, sqnr_db, weight_scale
from qframework.quantizer import LinearConfig, QFrameworkQuantizer, WeightConfig, calibrate, dynamic_int8, static_int8
from qframework.quantizer.config import ActivationConfig
from qframework.quantizer.layerwise import LayerwiseRun, quantized_linears, take_batches
from qframework.quantizer.weight_rounding import DAMPING, gptq, round_weights


def gptq_twin(weight, scale, hessian):
    """Optimal brain surgeon, column by column, inverting the remaining matrix again each time."""
    order = np.argsort(-np.diag(hessian), kind="stable")
    damped = hessian + DAMPING * np.diag(hessian).mean() * np.eye(len(hessian))
    w, q = weight.astype(np.float64), np.zeros(weight.shape)
    for done, j in enumerate(order):
        left = order[done:]
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        q[:, j] = np.clip(np.rint(w[:, j] / scale[:, 0]), -127, 127)
        w[:, left] -= np.outer((w[:, j] - q[:, j] * scale[:, 0]) / inverse[0, 0], inverse[0])
    return q


def correlated(samples, channels, seed=0):
    """Inputs with a rank of about a quarter of their channels, plus a little noise."""
    rank, generator = max(1, channels // 4), torch.Generator().manual_seed(1 + seed)
    mix = torch.randn(rank, channels, generator=torch.Generator().manual_seed(0))  # the same for every seed
    noise = 0.1 * torch.randn(samples, channels, generator=generator)
    return torch.randn(samples, rank, generator=generator) @ mix + noise


def rounded(model, data, config=None, **options):
    """A model prepared, calibrated and rounded."""
    quantizer = QFrameworkQuantizer().set_global(config or dynamic_int8())
    prepared = prepare_pt2e(exported(model, data[0]), quantizer)
    calibrate(prepared, data)
    round_weights(prepared, data, **options)
    return prepared


def int8_weights(converted):
    """The folded integers of each linear, by graph order."""
    return [getattr(converted, node.args[1].args[0].target) for node in linears(converted)]


def weight_steps(converted, linear):
    """The scale of a linear's weight, ``(N,)`` or ``(1,)``."""
    step = linear.args[1].args[1]
    return torch.tensor([step]) if isinstance(step, float) else getattr(converted, step.target)


def output_error(weight, other, x):
    return (x.double() @ (weight.double() - other.double()).T).square().sum()


@pytest.mark.parametrize("channels", [1, 7, 48, 300])  # within a block of columns, and three of them
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_gptq_matches_numpy(channels, granularity):
    torch.manual_seed(0)
    weight, x = torch.randn(5, channels), correlated(64, channels).double()
    scale = weight_scale(weight, granularity).reshape(-1, 1)
    got = gptq(weight, scale, x.T @ x)
    expected = gptq_twin(weight.numpy(), scale.expand(5, 1).double().numpy(), (x.T @ x).numpy())
    assert got.dtype == torch.int8
    # a value next to a tie may fall on either side, and what follows it with it
    assert (got.numpy() != expected).mean() < 0.002


def test_inputs_without_correlation_round_to_nearest():
    weight = torch.randn(6, 40)
    q, scale = quantize_weight(weight)
    assert torch.equal(gptq(weight, scale[:, None], torch.eye(40, dtype=torch.float64) * 3), q)


@pytest.mark.parametrize("scale", ["minmax", "per_tensor", "mse"])
def test_convert_finds_the_integers_on_the_observers_grid(scale):
    torch.manual_seed(0)
    granularity = "per_tensor" if scale == "per_tensor" else "per_channel"
    config = LinearConfig(ActivationConfig(), WeightConfig(granularity, "mse" if scale == "mse" else "minmax"))
    model, data = Mlp(16, 32), [correlated(64, 16)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nearest = prepare_pt2e(exported(model, data[0]), QFrameworkQuantizer().set_global(config))
    calibrate(nearest, data)
    nearest = convert_pt2e(nearest)
    prepared = rounded(model, data, config)
    chosen = [quantize_weight(p.float_weight)[0] for _, *_, p in quantized_linears(prepared)]
    grid = [prepared.get_parameter(f"{name}.weight").detach() for name in ("fc1", "fc2")]
    calibrate(prepared, data)  # once more does not bring the old integers back
    converted = convert_pt2e(prepared)
    for node, reference, kept, q in zip(
        linears(converted), linears(nearest), grid, int8_weights(converted), strict=True
    ):
        steps = weight_steps(converted, node)
        assert torch.equal(steps, weight_steps(nearest, reference))
        assert torch.equal(dequantize(q, steps.unsqueeze(-1)), kept)
    assert any((q != c).any() for q, c in zip(int8_weights(converted), chosen, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # the user's model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_reduces_the_error(dtype):
    """With inputs of a quarter of the rank, the error of the output is less than half, on data never seen as well."""
    torch.manual_seed(0)
    model, data = nn.Linear(64, 32).to(dtype), [correlated(256, 64).to(dtype) for _ in range(2)]
    converted = convert_pt2e(rounded(model, data))
    [node] = linears(converted)
    scale = weight_steps(converted, node)
    [q] = int8_weights(converted)
    nearest, _ = quantize_weight(model.weight)
    for x in (data[0], correlated(256, 64, seed=1).to(dtype)):
        ours = output_error(model.weight, dequantize(q, scale[:, None]), x)
        assert ours < 0.5 * output_error(model.weight, dequantize(nearest, scale[:, None]), x)


def test_no_row_is_worse_than_nearest():
    """Weights whose rounding error can only be clipped away from: greedy rounding alone makes some rows worse."""
    torch.manual_seed(1)
    x = correlated(32, 12)
    model = nn.Linear(12, 400, bias=False)
    converted = convert_pt2e(rounded(model, [x], static_int8()))
    [q] = int8_weights(converted)
    nearest, scale = quantize_weight(model.weight)
    step = x.abs().max() / 127
    seen = torch.round(x / step).clamp(-127, 127) * step
    errors = [
        (seen.double() @ (model.weight.double() - dequantize(w, scale[:, None]).double()).T).square().sum(0)
        for w in (q, nearest)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
    assert errors[0].sum() < errors[1].sum()


def test_a_layer_sees_the_rounded_layers_before_it():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), [correlated(64, 16), correlated(64, 16, seed=1)]
    converted = convert_pt2e(rounded(model, data))
    first, _ = linears(converted)
    hidden = [converted_until(converted, first)(x) for x in data]
    scales = [h.abs().amax(1, keepdim=True) / 127 for h in hidden]
    seen = torch.cat([torch.round(h * (1 / s)) * s for h, s in zip(hidden, scales, strict=True)]).double()
    weight = model[1].weight.detach()
    scale = weight_scale(weight)[:, None]
    expected = gptq_twin(weight.numpy(), scale.double().numpy(), (seen.T @ seen).numpy())
    nearest = quantize_weight(weight)[0]
    kept = (int8_weights(converted)[1] != nearest).any(1)  # rows where nearest was no better
    assert kept.float().mean() > 0.5
    assert (int8_weights(converted)[1][kept].numpy() == expected[kept.numpy()]).mean() > 0.99


def converted_until(converted, node):
    graph = torch.fx.Graph()
    copies = {}
    for each in converted.graph.nodes:
        copies[each] = graph.node_copy(each, copies.__getitem__)
        if each is node:
            break
    graph.output(copies[node])
    return torch.fx.GraphModule(converted, graph)


class Twice(nn.Module):
    """One linear called twice, and a linear that shares its weight with an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.fc, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.fc(self.fc(self.embedding(tokens)).relu()))


def test_shared_weights():
    torch.manual_seed(0)
    model, tokens = Twice(), torch.randint(0, 12, (4, 16))
    prepared = rounded(model, [tokens])
    embedding = next(n for n in prepared.graph.nodes if n.target == torch.ops.aten.embedding.default)
    table = prepared.get_parameter(embedding.args[0].target)
    assert torch.equal(table, model.embedding.weight)
    converted = convert_pt2e(prepared)
    first, second, head = int8_weights(converted)
    assert torch.equal(first, second)
    assert not torch.equal(head, quantize_weight(model.head.weight)[0])
    assert sqnr_db(model(tokens), converted(tokens)) > 30


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("case", ["zero inputs", "zero weights", "one sample", "constant", "tiny", "denormal squares"])
def test_degenerate_layers(case, centered):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), correlated(16, 8)
    cases = {"zero inputs": x * (torch.arange(8) < 3), "one sample": x[:1], "constant": x[:1].expand(100, 8)}
    x = {**cases, "tiny": x * 1e-30, "denormal squares": x * 1e-22}.get(case, x)
    if case == "zero weights":
        nn.init.zeros_(model.weight)
    converted = convert_pt2e(rounded(model, [x, x], centered=centered))
    [q] = int8_weights(converted)
    assert torch.isfinite(converted(x)).all()
    if case == "zero inputs":
        assert torch.equal(q[:, 3:], quantize_weight(model.weight)[0][:, 3:])
    if case == "zero weights":
        assert not q.any()


def test_float16_below_its_normal_range_keeps_rows_it_cannot_write():
    """2 ** -24 is the smallest step of float16: multiples of a scale below it cannot all be written."""
    torch.manual_seed(0)
    model, data = nn.Linear(16, 40).half(), [correlated(32, 16).half()]
    nn.init.uniform_(model.weight, -5e-6, 5e-6)
    nearest, scale = quantize_weight(model.weight)
    assert (scale < 2**-24).all()
    prepared = rounded(model, data)
    [linear] = quantized_linears(prepared)
    run = LayerwiseRun(prepared, take_batches(prepared, data, None, "a test"), quantized=True)
    run.advance(linear.node)
    seen = next(run.values(linear.input)).double()
    chosen = gptq(model.weight, scale[:, None], seen.T @ seen)
    [q] = int8_weights(convert_pt2e(prepared))
    assert ((q == nearest).all(1) | (q == chosen).all(1)).all()


def test_errors():
    model, x = Mlp(), torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match="method must be 'gptq', got 'adaround'"):
        rounded(model, [x], method="adaround")
    with pytest.raises(CalibrationError, match=r"batches must be .*, got -1"):
        rounded(model, [x], batches=-1)
    prepared = prepare_pt2e(exported(model, x), QFrameworkQuantizer().set_global(dynamic_int8()))
    with pytest.raises(CalibrationError, match="round_weights: data must hold at least one batch"):
        round_weights(prepared, [])
    with pytest.raises(CalibrationError, match="layer 'fc1': the inputs and their squares must be finite"):
        round_weights(prepared, [x * 1e30])
