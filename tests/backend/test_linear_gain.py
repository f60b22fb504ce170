"""Which linears of few rows a compiled float model keeps in float on Hopper, and what explain says of them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qframework import numerics
from qframework.backend import keep_quantize, linear_gain, lower_depthwise
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.kernels.linear.tile_costs import half_us, int8_us

RESULTS = Path(__file__).parents[2] / "benchmarks/results/other"
STORED = RESULTS / "2026-11-30-h200-tile-costs.json"


class Mlp(nn.Module):
    def __init__(self, width: int, norm: bool = True, shared: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.first = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(shared))
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm(x)
        hidden = [F.gelu(each(normed)) for each in self.first]
        return x + self.fc2(hidden[0] if len(hidden) == 1 else torch.stack(hidden).mean(0))


class Readers(nn.Module):
    """Layers that read the same input, which no kernel of Inductor computes."""

    def __init__(self, count: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, outputs) for _ in range(count))

    def forward(self, x):
        return [each(x) for each in self.layers]


class Behind(nn.Module):
    """A linear behind attention, which no kernel of Inductor computes."""

    def __init__(self, width: int, outputs: int | None = None) -> None:
        super().__init__()
        self.proj = nn.Linear(width, outputs or width)

    def forward(self, x):
        return self.proj(F.scaled_dot_product_attention(x, x, x))


class Channels(nn.Module):
    """A norm behind a convolution, as in ConvNeXt."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)

    def forward(self, x):
        return self.fc1(self.norm(self.mix(x.transpose(1, 2)).transpose(1, 2)))


class Depthwise(nn.Module):
    """The second linear of PVT's MLP."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, x):
        side = int(x.shape[1] ** 0.5)
        image = x.transpose(1, 2).view(x.shape[0], x.shape[2], side, side)
        return self.fc2(F.gelu(self.conv(image).flatten(2).transpose(1, 2)))


class GateOverTokens(nn.Module):
    """The product in front of the last linear of gMLP's blocks, which ``turned`` reads by columns."""

    def __init__(self, width: int, tokens: int, turned: bool) -> None:
        super().__init__()
        self.mix, self.out, self.turned = (
            nn.Linear(tokens if turned else width, tokens),
            nn.Linear(width, width),
            turned,
        )

    def forward(self, x):
        gate = self.mix(x.transpose(1, 2)).transpose(1, 2) if self.turned else self.mix(x).mean(-1, keepdim=True)
        return self.out(x * gate)


class Stem(nn.Module):
    """Blocks behind a convolution, whose result is where the residual stream begins."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv1d(width, width, 3, padding=1), nn.Conv1d(width, width, 1)
        self.norm, self.fc1 = nn.LayerNorm(width), nn.Linear(width, 4 * width)

    def forward(self, x):
        x = self.stem(x.transpose(1, 2))
        return self.fc1(self.norm((x + self.mix(x)).transpose(1, 2)))


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: 132)


def _listed(outputs):
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def reports_of(model, shape, *, frozen=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model, x, found = model.eval().to(dtype), torch.randn(shape, dtype=dtype), []

    def backend(gm, example_inputs):
        found.extend(lower(gm, example_inputs, BackendOptions(linear="int8_dynamic", freeze_weights=frozen)))
        return gm.forward

    with torch.no_grad():
        outputs = torch.compile(model, backend=backend, fullgraph=True)(x)
        for expected, y in zip(_listed(model(x)), _listed(outputs), strict=True):
            assert numerics.sqnr_db(expected.float(), y.float()) > 25
    return {report.name: report for report in found if report.kind == "linear"}


def lowered(model, shape, **options):
    return {name for name, report in reports_of(model, shape, **options).items() if report.lowered}


@pytest.mark.usefixtures("fresh_dynamo")
class TestFewRows:
    def test_a_layer_behind_a_norm_is_quantized(self):
        assert "first.0" in lowered(Mlp(64), (1, 128, 64))

    def test_a_short_layer_behind_another_stays_in_float(self):
        assert "fc2" not in lowered(Mlp(64), (1, 128, 64))

    def test_a_long_layer_behind_another_is_quantized(self):
        assert "fc2" in lowered(Mlp(1024), (1, 100, 1024))

    def test_a_small_layer_behind_attention_stays_in_float(self):
        assert lowered(Behind(128), (1, 2, 100, 128)) == set()

    def test_a_large_layer_behind_attention_is_quantized(self):
        assert lowered(Behind(2048, 4096), (1, 1, 100, 2048)) == {"proj"}

    def test_layers_with_the_same_input_share_its_quantization(self):
        assert lowered(Readers(1, 128, 128), (1, 100, 128)) == set()
        assert lowered(Readers(3, 128, 128), (1, 100, 128)) == {"layers.0", "layers.1", "layers.2"}

    def test_a_norm_of_rearranged_channels(self):
        assert lowered(Channels(), (1, 200, 64)) == set()

    def test_a_residual_stream_that_begins_with_a_convolution(self):
        assert lowered(Stem(), (1, 400, 256)) == {"fc1"}

    def test_weights_that_each_call_quantizes_cost_more_than_few_rows_save(self):
        assert "fc2" in lowered(Mlp(1024), (1, 128, 1024))
        torch._dynamo.reset()
        reason = reports_of(Mlp(1024), (1, 128, 1024), frozen=False)["fc2"].reason
        assert "options={'freeze_weights': True}" in reason

    @pytest.mark.parametrize("rows", [1, 16, 64])
    def test_decoding_from_frozen_weights_is_quantized(self, rows):
        assert lowered(Behind(1024, 4096), (1, 1, rows, 1024)) == {"proj"}

    @pytest.mark.parametrize("rows", [1, 64])
    def test_decoding_from_weights_that_each_call_quantizes_is_not(self, rows):
        assert lowered(Behind(1024, 4096), (1, 1, rows, 1024), frozen=False) == set()

    def test_the_reason_has_the_estimates(self):
        report = reports_of(Behind(128), (1, 2, 100, 128))["proj"]
        times = [float(x) for x in re.findall(r"(\d+\.\d) us", report.reason)]
        in_float, in_int8, quantizing = times
        assert in_float < in_int8 + quantizing + 0.1
        assert not report.fallback

    def test_many_rows_float32_and_other_chips_are_not_estimated(self, monkeypatch):
        assert lowered(Operations(128), (2, 100, 128)) == set()
        monkeypatch.setattr(keep_quantize, "MANY_ROWS", 200)
        monkeypatch.setattr(linear_gain, "_FEW_VALUES", 200 * 128)
        monkeypatch.setattr(linear_gain, "_FEW_OF_ACTIVATIONS", 200)
        torch._dynamo.reset()
        assert lowered(Operations(128), (2, 100, 128)) == {"fc"}
        monkeypatch.undo()
        monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: 132)
        assert lowered(Behind(128), (1, 2, 100, 128), dtype=torch.float32) == {"proj"}
        monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: None)
        torch._dynamo.reset()
        assert lowered(Behind(128), (1, 2, 100, 128)) == {"proj"}


class Operations(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 64)

    def forward(self, x):
        return self.fc(torch.tanh(x))


@pytest.mark.usefixtures("fresh_dynamo")
class TestEstimates:
    @pytest.fixture
    def gains(self, monkeypatch):
        """The estimates of a model's layers, in order; None for layers without one."""
        found, estimate = [], linear_gain._gain

        def keep(linear, call, frozen):
            found.append(estimate(linear, call, frozen))
            return found[-1]

        def of(model, shape, **options):
            found.clear()
            monkeypatch.setattr(linear_gain, "_gain", keep)
            reports_of(model, shape, **options)
            return found

        return of

    def test_layers_that_become_one_product(self, gains):
        frozen = gains(Readers(3, 128, 128), (1, 100, 128))[0]
        assert frozen.int8_us == pytest.approx(int8_us(100, 3 * 128, 128, 132))
        torch._dynamo.reset()
        live = gains(Readers(3, 128, 128), (1, 100, 128), frozen=False)[0]
        assert live.int8_us == pytest.approx(3 * int8_us(100, 128, 128, 132))
        assert live.float_us == frozen.float_us == pytest.approx(3 * half_us(100, 128, 128))

    def test_what_follows_a_float_product_counts(self, gains):
        first, second = gains(Mlp(1024), (1, 100, 1024))
        assert first.float_us - half_us(100, 4096, 1024) == pytest.approx(1.9)  # the kernel of GELU
        assert second.float_us - half_us(100, 1024, 4096) == pytest.approx(4 * 100 * 1024 / 2.5e6)  # the sum

    @pytest.mark.parametrize(("rows", "width", "us"), [(100, 512, 1.0 + 100 / 2200), (100, 2048, 4.5), (16, 2048, 2.0)])
    def test_operations_are_computed_twice_for_long_rows(self, gains, rows, width, us):
        (gain,) = gains(Operations(width), (1, rows, width))
        assert gain.quantize_us == pytest.approx(us)

    @pytest.mark.parametrize(("turned", "us"), [(True, 5.9), (False, 1.0 + 100 / 2200)])
    def test_rows_that_are_columns_take_as_long_as_rearranged_channels(self, gains, turned, us):
        gain = gains(GateOverTokens(256, 100, turned), (1, 100, 256))[-1]
        assert gain.quantize_us == pytest.approx(us)

    @pytest.mark.parametrize(
        ("rows", "width", "estimated"),
        [(16000, 1024, True), (17000, 1024, False), (17000, 128, True), (33000, 128, False), (4000, 2048, True)],
    )
    def test_more_rows_of_few_values_are_estimated(self, gains, rows, width, estimated):
        """In the first stage of EdgeNeXt at batch 1, 4,096 rows of 320 values."""
        (gain,) = gains(Operations(width), (1, rows, width))
        assert (gain is not None) == estimated

    @pytest.mark.parametrize(("rows", "estimated"), [(4000, True), (5000, False)])
    def test_products_of_many_rows_are_not(self, gains, rows, estimated):
        gain = gains(GateOverTokens(1024, 100, turned=False), (1, rows, 1024))[-1]
        assert (gain is not None) == estimated

    @pytest.mark.parametrize(("rows", "estimated"), [(5000, True), (33000, False)])
    def test_rearranged_channels_are_estimated_for_more_rows(self, gains, rows, estimated):
        (gain,) = gains(Channels(32), (1, rows, 32))
        assert (gain is not None) == estimated

    @pytest.mark.parametrize(("side", "inputs", "outputs", "pays"), [(200, 64, 32, False), (50, 1024, 4096, True)])
    def test_a_convolution_with_a_kernel_of_our_own_is_estimated_for_any_number_of_rows(
        self, gains, monkeypatch, side, inputs, outputs, pays
    ):
        """It writes floats; what quantizes them moves three bytes for each that a product in INT8 reads less."""
        monkeypatch.setattr(lower_depthwise, "capability_of", lambda device: (9, 0))
        (gain,) = gains(Depthwise(inputs, outputs), (2, side**2, inputs))
        rows = 2 * side**2
        assert gain.quantize_us == pytest.approx(1.4 + 3 * rows * inputs / 2.8e6)
        assert gain.float_us >= 2 * rows * (inputs + outputs) / 2.8e6  # the time of its traffic
        assert gain.pays == pays


@pytest.mark.usefixtures("fresh_dynamo")
class TestBehindAKernel:
    """Many rows that no kernel of Inductor computes."""

    @pytest.mark.parametrize(("width", "outputs", "int8"), [(256, 256, False), (512, 256, False), (512, 2048, True)])
    def test_traffic_decides(self, width, outputs, int8):
        assert lowered(Behind(width, outputs), (4, 8, 784, width)) == ({"proj"} if int8 else set())

    def test_a_residual_that_the_epilogue_adds_pays(self):
        class WithResidual(Behind):
            def forward(self, x, residual=1.0):
                return x + super().forward(x)

        assert lowered(WithResidual(256), (4, 8, 784, 256)) == {"proj"}

    @pytest.mark.parametrize("copied", [False, True])
    def test_heads_that_are_copied_are_quantized_by_the_copy(self, copied):
        class Heads(Behind):
            def forward(self, x):
                q = x if copied else x.transpose(1, 2).contiguous().transpose(1, 2)
                return self.proj(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))

        assert lowered(Heads(256), (8, 4, 3136, 64)) == ({"proj"} if copied else set())

    def test_a_norm_whose_rows_move_is_none(self):
        class Windows(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.qkv = nn.LayerNorm(256), nn.Linear(256, 256)

            def forward(self, x):
                windows = self.norm(x).roll(3, 1).unflatten(1, (112, 28)).transpose(1, 2)
                return self.qkv(windows.flatten(0, 2))

        assert lowered(Windows(), (8, 3136, 256)) == {"qkv"}

    def test_long_rows_are_not_estimated(self):
        assert lowered(Behind(1088, 64), (4, 8, 160, 1088)) == {"proj"}

    def test_a_faster_memory_favours_int8(self, monkeypatch):
        shape = (4, 8, 784, 768)
        assert lowered(Behind(768), shape) == set()
        monkeypatch.setattr(linear_gain, "memory_rate_of", lambda device: 9.6e6)
        torch._dynamo.reset()
        assert lowered(Behind(768), shape) == {"proj"}

    @pytest.mark.parametrize("kind", ["Plain", "Alone", "Hard"])
    def test_estimates_agree_with_measurements(self, kind):
        """Of layers whose input a kernel of its own quantizes, on an H200: what is decided wrongly costs little."""
        memory, lost = 0.84 * 4.9e6, []
        for each in json.loads((RESULTS / "2026-11-29-h200-dynamic-linears.json").read_text())["runs"][1]["rows"]:
            (name, m, k, n), times = each["case"], {mode: sorted(us)[1] for mode, us in each["us"].items()}
            if name != kind or each["sqnr"] > 100:  # was left in float
                continue
            in_float = half_us(m, n, k, memory) + (4 * m * n / 2.5e6 if kind == "Alone" else 0.0)
            in_int8 = int8_us(m, n, k, 132, memory) + 1.4 + 3 * m * k / memory
            lost.append(times["dynamic" if in_int8 < in_float else "float"] / min(times.values()))
        assert len(lost) >= 12
        assert sum(ratio > 1.1 for ratio in lost) <= 3
        assert statistics.geometric_mean(lost) < 1.03


QKV, UP = (768, 768, 768), (8192, 8192)


class TestJoining:
    """Layers that need a copy of their weights to become one product."""

    def pays(self, rows, outputs, inputs):
        return linear_gain.pays_to_join(torch.empty(rows, inputs, dtype=torch.int8, device="meta"), outputs)

    @pytest.mark.parametrize("rows", [1, 64, 128, 512, 2048])
    def test_short_projections_are_joined(self, rows):
        assert self.pays(rows, QKV, 768)

    def test_many_rows_save_too_little(self):
        assert not self.pays(16384, QKV, 768)

    @pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, (4096, 1024, 1024), 4096), (128, UP, 2048)])
    def test_long_weights_would_take_too_much_memory(self, rows, outputs, inputs):
        assert not self.pays(rows, outputs, inputs)
        assert self.pays(rows, tuple(each // 8 for each in outputs), inputs)

    def test_grouped_heads_of_a_small_language_model(self):
        assert self.pays(1, (2048, 512, 512), 2048)
        assert self.pays(512, (2048, 512, 512), 2048)

    def test_without_estimates_none_are_joined(self, monkeypatch):
        assert not self.pays(0, QKV, 768)
        monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: None)
        assert not self.pays(128, QKV, 768)

    def test_estimates_agree_with_measurements(self):
        fastest: dict[tuple[int, int, int], float] = {}
        for each in json.loads(STORED.read_text())["records"]:
            shape = each["m"], each["n"], each["k"]
            fastest[shape] = min(fastest.get(shape, 1e9), *(tile["us"] for tile in each["tiles"]))
        triples = [(m, n, k) for m, n, k in fastest if (m, 3 * n, k) in fastest]
        measured = [1 - fastest[m, 3 * n, k] / (3 * fastest[m, n, k]) for m, n, k in triples]
        estimated = [1 - int8_us(m, 3 * n, k, 132) / (3 * int8_us(m, n, k, 132)) for m, n, k in triples]
        assert len(triples) == 64
        assert 0.11 < min(measured) < max(measured) < 0.7
        errors = [guess - share for guess, share in zip(estimated, measured, strict=True)]
        assert -0.11 < min(errors) < max(errors) < 0.08
        joined = [share for (m, n, k), share in zip(triples, measured, strict=True) if self.pays(m, (n, n, n), k)]
        assert len(joined) == 59
        assert min(joined) > 0.14
