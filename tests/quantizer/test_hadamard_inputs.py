"""Hadamard transforms of dynamic inputs: same function, less error behind activations, what is left alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from quantizer_models import exported
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, calibrate, dynamic_int8, static_int8
from qframework.quantizer.hadamard_inputs import Transform, turn_dynamic_inputs

DIM = 64
HADAMARD = torch.ops.qframework.hadamard.default


class Mlp(nn.Module):
    """A pre-norm MLP, plain or gated, with a few large hidden channels, in float32 or another dtype."""

    def __init__(self, activation: str = "gelu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation = activation
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.gate = nn.Linear(DIM, 4 * DIM)
        with torch.no_grad():
            self.fc1.weight[::16] *= 6

    def forward(self, x: Tensor) -> Tensor:
        h, n = self.fc1(self.norm(x)), self.norm(x)
        h = F.silu(self.gate(n)) * h if self.activation == "gated" else getattr(F, self.activation)(h)
        return x + self.fc2(h)


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 9, DIM, generator=generator).to(dtype) for _ in range(3)]


def quantizer(config=None) -> QFrameworkQuantizer:
    return QFrameworkQuantizer().set_global(config or dynamic_int8())


def transforms(gm) -> int:
    return sum(node.target is HADAMARD for node in gm.graph.nodes)


def converted(gm, with_recipe: Recipe | None = None, config=None):
    gm, q = copy.deepcopy(gm), quantizer(config)
    done = with_recipe.before_prepare(gm, q, batches()) if with_recipe else {}
    prepared = prepare_pt2e(gm, q)
    calibrate(prepared, batches())
    return convert_pt2e(prepared), done


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "gated"])
def test_the_function_stays_and_the_error_falls(activation, dtype):
    x = batches(dtype)
    gm = exported(Mlp(activation).to(dtype).eval(), x[0])
    before = gm(x[0])
    assert turn_dynamic_inputs(gm, quantizer(), x) == {"fc2": 64}
    assert transforms(gm) == 1
    assert sqnr_db(before, gm(x[0])) > (120 if dtype == torch.float32 else 55)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "gated"])
def test_the_quantized_output_gains(activation):
    gm = exported(Mlp(activation).eval(), batches()[0])
    for node in list(gm.graph.nodes):  # the output is that of fc2 alone
        if node.op == "output":
            node.args = ((next(n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor).args[1],),)
    gm.recompile()
    plain, _ = converted(gm)
    turned, done = converted(gm, Recipe(hadamard=True))
    assert done == {"hadamard": {"fc2": 64}}
    gains = [sqnr_db(gm(x)[0], turned(x)[0]) - sqnr_db(gm(x)[0], plain(x)[0]) for x in batches()]
    assert min(gains) > 1.0


def test_only_dynamic_inputs_behind_activations():
    gm = exported(Mlp().eval(), batches()[0])
    assert turn_dynamic_inputs(copy.deepcopy(gm), quantizer(static_int8()), batches()) == {}
    only_fc1 = quantizer(static_int8()).set_module_name("fc1", dynamic_int8())
    assert turn_dynamic_inputs(copy.deepcopy(gm), only_fc1, batches()) == {}


def test_a_norm_written_as_products_is_left_to_rotation():
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.fc = nn.Parameter(torch.rand(4 * DIM) + 0.5), nn.Linear(4 * DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([x, x.exp(), x.abs(), -x], -1)
            return self.fc(self.gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)))

    gm = exported(Written().eval(), batches()[0])
    assert turn_dynamic_inputs(gm, quantizer(), batches()) == {}


def test_channels_that_no_block_divides():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(DIM, 120), nn.Linear(120, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.gelu(self.fc1(x)))

    gm = exported(Odd().eval(), batches()[0])
    assert turn_dynamic_inputs(gm, quantizer(), batches()) == {}


def test_a_product_of_channel_scales_becomes_part_of_it():
    recipe = Recipe(channel_scales=True, hadamard=True)
    gm = exported(Mlp().eval(), batches()[0])
    expected = gm(batches()[0])
    done = recipe.before_prepare(gm, quantizer(), batches())
    assert "fc2" in done["channel_scales"]
    assert done["hadamard"] == {"fc2": 64}
    factors = [n for n in gm.graph.nodes if n.op == "get_attr" and "channel_scale" in str(n.target) and n.users]
    assert not factors
    assert sqnr_db(expected, gm(batches()[0])) > 120


def test_a_constant_that_helps_nothing_is_not_inserted():
    class Even(nn.Module):
        """Inputs without mean or large values: signs."""

        def __init__(self) -> None:
            super().__init__()
            self.fc2 = nn.Linear(4 * DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(torch.sign(torch.cat([x, x.flip(-1), -x, x.roll(1, -1)], -1)))

    gm = exported(Even().eval(), batches()[0])
    assert turn_dynamic_inputs(gm, quantizer(), batches()) == {}


def test_transform_of_rows():
    rows = F.gelu(3 * torch.randn(500, 128, generator=torch.Generator().manual_seed(0)))
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    found = Transform.fit(rows, [weight])
    with_mean = found._replace(offset=torch.zeros(128))
    quality, worse = (sqnr_db(rows @ weight.T, each.fake_quantized(rows) @ weight.T) for each in (found, with_mean))
    assert found.block_size == 64
    assert quality > 36
    assert quality > worse + 1.5


def test_saved_and_loaded():
    gm = exported(Mlp().eval(), batches()[0])
    quantized, _ = converted(gm, Recipe(hadamard=True))
    program = torch.export.export(quantized, (batches()[0],))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert torch.equal(again(batches()[1][:4]), quantized(batches()[1][:4]))


def test_compiled():
    gm = exported(Mlp().eval(), batches()[0])
    quantized, _ = converted(gm, Recipe(hadamard=True))
    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(quantized, backend="qframework")(batches()[0])
    assert sqnr_db(quantized(batches()[0]), y) > 45
