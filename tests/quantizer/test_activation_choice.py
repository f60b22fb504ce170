"""The choice of observers and of dynamic inputs by the error of the model's output."""

from __future__ import annotations

import copy

import pytest
import torch
from quantizer_models import exported, linears, quantized_layers
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.errors import CalibrationError
from qframework.numerics import dynamic_scale, scale_from_amax, sqnr_db
from qframework.quantizer import QFrameworkQuantizer, calibrate, dynamic_int8, layer_costs, static_int8
from qframework.quantizer.activation_choice import choose_activations
from qframework.quantizer.layer_costs import costs_on
from qframework.quantizer.output_error import Errors, OutputError, Parameters, Run, Snapshot, fake_quantized, held_out

DIM = 16
QUANTIZER = QFrameworkQuantizer().set_global(static_int8())


class Layers(nn.Module):
    """Two layers that read tokens of which a few are large. The output of the first is only used for the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.idle, self.vital = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        ordinary = (x.abs().amax(-1, keepdim=True) < 50).to(x.dtype)
        return self.idle(x) * ordinary + self.vital(x / 100) * (1 - ordinary)


class Stages(nn.Module):
    """The input of the second layer has tokens a hundred times as large as others, which the last norm equalizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, size: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x) * size))


def data(seed: int = 0, batches: int = 3) -> list[Tensor]:
    """Batches of 32768 values, one of which is 100: fewer than the percentile keeps."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(batches):
        x = torch.randn(4, 512, DIM, generator=generator)
        x[0, 5, 0] = 100.0
        found.append(x)
    return found


def sized(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    size = torch.ones(4, 64, 1)
    size[:, ::9] = 100.0
    return [(torch.randn(4, 64, DIM, generator=generator), size) for _ in range(3)]


def converted(graph, batches) -> torch.fx.GraphModule:
    prepared = prepare_pt2e(graph, QUANTIZER)
    calibrate(prepared, batches, progress=False)
    return convert_pt2e(prepared)


def test_a_layer_clips_where_the_output_does_not_depend_on_its_extremes() -> None:
    graph = exported(Layers(), data()[0], dynamic_batch=True)
    chosen = choose_activations(graph, QUANTIZER, data())
    assert chosen["idle"] in ("mse", "percentile")
    assert "vital" not in chosen


def test_the_choice_reaches_the_converted_model_and_helps_on_other_data() -> None:
    model, graph = Layers().eval(), exported(Layers(), data()[0], dynamic_batch=True)
    plain = converted(copy.deepcopy(graph), data())
    choose_activations(graph, QUANTIZER, data())
    chosen, (x,) = converted(graph, data()), data(7, 1)
    assert sqnr_db(model(x), chosen(x)) > sqnr_db(model(x), plain(x)) - 0.1
    ordinary = x.abs().amax(-1) < 50
    rows = [each(x)[ordinary] for each in (model, chosen, plain)]
    assert sqnr_db(rows[0], rows[1]) > sqnr_db(rows[0], rows[2]) + 6


def test_the_most_harmful_input_gets_scales_per_token_within_the_budget() -> None:
    graph = exported(Stages(), *sized()[0])
    assert choose_activations(copy.deepcopy(graph), QUANTIZER, sized(), observers=False, dynamic_share=0.4) == {}
    again = copy.deepcopy(graph)
    chosen = choose_activations(again, QUANTIZER, sized(), observers=False, dynamic_share=0.5)
    assert chosen == {"second": "dynamic"}
    model, batch = Stages().eval(), sized(9)[0]
    gain = sqnr_db(model(*batch), converted(again, sized())(*batch)) - sqnr_db(
        model(*batch), converted(graph, sized())(*batch)
    )
    assert gain > 10


class Two(nn.Module):
    """Two layers of one width; a norm may compute the first one's input."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = norm, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x)))


def loud_tokens() -> list[Tensor]:
    """Some have one channel left after their norm."""
    x = torch.nn.functional.layer_norm(torch.randn(3, 8, 64, DIM, generator=torch.Generator().manual_seed(1)), (DIM,))
    x[..., ::9, 0] += 1000
    return list(torch.nn.functional.layer_norm(x, (DIM,)))


@pytest.mark.parametrize(("norm", "chosen"), [(nn.LayerNorm(DIM), {"first": "dynamic"}), (nn.Identity(), {})])
def test_an_input_behind_a_norm_costs_a_quarter(norm: nn.Module, chosen: dict[str, str]) -> None:
    """Of two inputs of one width, a share of 0.2 pays for the one behind a norm, if there is one, and no other."""
    batches = loud_tokens()
    graph = exported(Two(norm), batches[0])
    options = {"observers": False, "device": "cuda"}
    assert choose_activations(copy.deepcopy(graph), QUANTIZER, batches, dynamic_share=0.19, **options) == {}
    assert choose_activations(graph, QUANTIZER, batches, dynamic_share=0.2, **options) == chosen


class OneLoudChannel(nn.Module):
    """The input of the second layer has a channel a thousand times as large as others, which its weights hardly read.

    A scale per token hardly helps.
    """

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        with torch.no_grad():
            self.second.weight[:, 0] = 0

    def forward(self, x: Tensor) -> Tensor:
        loud = torch.ones(x.shape[-1]).index_fill(0, torch.tensor(0), 1000.0).to(x.dtype)
        return self.second(self.first(x) * loud)


def tokens(width: int = DIM) -> list[Tensor]:
    return [torch.randn(4, 64, width, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def test_a_layer_that_no_scale_helps_stays_in_float_if_the_budget_pays_for_its_product() -> None:
    model, x = OneLoudChannel().eval(), tokens()[0]
    graph = exported(model, x)
    rows = x.numel() // DIM
    costs = costs_on("cuda", torch.float16)
    share = costs.in_float(rows, DIM, DIM) / (2 * costs.per_token(rows, DIM, behind_norm=False))
    for given, allowed in ((share - 0.01, True), (share + 0.01, False)):
        again = copy.deepcopy(graph)
        options = {"observers": False, "dynamic_share": given, "float_layers": allowed, "device": "cuda"}
        assert "float" not in choose_activations(again, QUANTIZER, tokens(), **options).values()
    chosen = choose_activations(
        graph, QUANTIZER, tokens(), observers=False, dynamic_share=share + 0.01, float_layers=True, device="cuda"
    )
    assert chosen == {"second": "float"}
    first, second = linears(graph)
    assert QUANTIZER.config_for(first) == static_int8()
    assert QUANTIZER.config_for(second) is None
    int8 = converted(graph, tokens())
    assert quantized_layers(int8) == {"first"}
    assert sqnr_db(model(x), int8(x)) > 30 > sqnr_db(model(x), converted(exported(model, x), tokens())(x)) + 10


def test_float_layers_depend_on_where_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_costs, "_instructions", lambda: "amx")

    def chosen(device: str | None, dtype: torch.dtype = torch.float32) -> set[str]:
        batches = [batch.to(dtype) for batch in tokens(256)]
        graph = exported(OneLoudChannel(256).to(dtype).eval(), batches[0])
        options = {"observers": False, "dynamic_share": 0.9, "float_layers": True, "device": device}
        found = choose_activations(graph, QUANTIZER, batches, **options)
        return {layer for layer, name in found.items() if name == "float"}

    assert chosen("cuda") == {"second"}
    assert chosen("cpu") == chosen(None) == set()
    assert chosen(None, torch.bfloat16) == {"second"}  # AMX multiplies half as fast as INT8


def test_a_layer_behind_a_norm_does_not_stay_in_float() -> None:
    batches = loud_tokens()
    options = {"observers": False, "dynamic_share": 1.0, "float_layers": True, "device": "cuda"}
    assert choose_activations(exported(Two(nn.LayerNorm(DIM)), batches[0]), QUANTIZER, batches, **options) == {
        "first": "dynamic",
        "second": "float",
    }


def test_the_quantizer_and_other_layers_do_not_change() -> None:
    graph, quantizer = exported(Stages(), *sized()[0]), QFrameworkQuantizer().set_global(static_int8())
    before = quantizer.to_dict()
    choose_activations(graph, quantizer, sized(), dynamic_share=0.5, observers=False)
    assert quantizer.to_dict() == before
    dynamic = [n for n in graph.graph.nodes if n.target == torch.ops.aten.linear.default]
    assert [quantizer.config_for(node).activation.dynamic for node in dynamic] == [False, True]
    assert QFrameworkQuantizer().set_global(None).config_for(dynamic[1]) is None  # float stays float


class Activated(nn.Module):
    """A layer behind GELU, and one whose input is symmetric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def normal(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, DIM, generator=generator) for _ in range(3)]


def test_a_lopsided_input_gets_a_zero_point_and_others_none() -> None:
    model, graph = Activated().eval(), exported(Activated(), normal()[0], dynamic_batch=True)
    judge = OutputError(graph, QUANTIZER, normal(), normal()).errors
    before = judge().typical
    chosen = choose_activations(graph, QUANTIZER, normal(), observers=False, zero_points=True, judge=judge)
    assert chosen == {"fc2": "zero_point"}
    assert judge().typical < before
    plain = converted(exported(Activated(), normal()[0], dynamic_batch=True), normal())
    (x, *_), better = normal(7), converted(graph, normal())
    assert {node.args[2] for node in better.graph.nodes if "quantize_per_tensor" in str(node.target)} > {0}
    gains = [sqnr_db(model(x), each(x)) for each in (better, plain)]
    assert gains[0] > gains[1] + 1


def test_zero_points_are_used_only_where_the_output_gains() -> None:
    graph = exported(Activated(), normal()[0], dynamic_batch=True)
    assert choose_activations(graph, QUANTIZER, normal(), observers=False) == {}
    errors = iter([1.0, 2.0, 2.0, 2.0])  # of nothing, and of each proposal
    judge = lambda: Errors(next(errors), 1.0)  # noqa: E731
    assert choose_activations(graph, QUANTIZER, normal(), zero_points=True, judge=judge) == {}
    assert converted(graph, normal())(normal()[0]).isfinite().all()


def test_nothing_to_choose() -> None:
    graph = exported(Layers(), data()[0])
    assert choose_activations(graph, QFrameworkQuantizer().set_global(dynamic_int8()), data()) == {}
    with pytest.raises(CalibrationError, match="at least one batch"):
        choose_activations(graph, QUANTIZER, [])


def test_one_batch_is_divided_or_leaves_observers_alone() -> None:
    fixed, (x,) = exported(Layers(), data()[0]), data(0, 1)
    assert held_out(fixed, [x], None) == ([], [x])
    assert choose_activations(fixed, QUANTIZER, [x]) == {}
    (judged,), (fitted,) = held_out(exported(Layers(), x, dynamic_batch=True), [x], None)
    assert torch.equal(torch.cat([judged, fitted]), x)
    judged, fitted = held_out(fixed, [x, x + 1, x + 2], 2)
    assert (len(judged), len(fitted)) == (1, 1)


# The error of the output


def test_the_error_is_that_of_the_converted_model() -> None:
    model, batches = Layers().eval(), data()
    graph = exported(Layers(), batches[0], dynamic_batch=True)
    error = OutputError(graph, QUANTIZER, batches, batches).measure()
    first = batches[0]
    actual = converted(graph, batches)(first)
    wanted = model(first).detach()
    tokens = (actual - wanted).square().sum(-1) / wanted.square().sum(-1)
    assert error == pytest.approx(float(tokens.log().mean().exp()), rel=1e-3)


def test_a_run_stops_and_is_finished_several_times() -> None:
    graph, (x,) = exported(Layers(), data()[0]), data(0, 1)
    linear = next(n for n in graph.graph.nodes if n.target == torch.ops.aten.linear.default)
    run = Run(graph).start([x])
    run.advance(linear)
    assert torch.equal(run.value(linear.args[0]), x)
    changed = run.finish({linear: torch.zeros(4, 512, DIM)})[0]
    same = run.finish({})[0]
    assert torch.equal(same, graph(x))
    assert not torch.equal(changed, same)


def test_a_snapshot_undoes_new_nodes_and_parameters() -> None:
    graph, (x,) = exported(Layers(), data()[0]), data(0, 1)
    before, expected = Snapshot(graph), graph(x)
    graph.idle.weight = nn.Parameter(torch.zeros(DIM, DIM))
    output = next(iter(reversed(graph.graph.nodes)))
    with graph.graph.inserting_before(output):
        negative = graph.graph.call_function(torch.ops.aten.neg.default, (output.args[0][0],))
    output.args = ((negative,),)
    graph.recompile()
    assert not torch.equal(graph(x), expected)
    before.restore()
    assert torch.equal(graph(x), expected)


def test_fake_quantization_rounds_to_the_grid() -> None:
    x = torch.tensor([[1.0, -0.4, 300.0], [0.2, 0.1, 0.0]])
    scale = scale_from_amax(torch.tensor(127.0))
    assert fake_quantized(x, Parameters(scale)).tolist() == [[1.0, 0.0, 127.0], [0.0, 0.0, 0.0]]
    per_token = fake_quantized(x, Parameters(dynamic_scale(x, "per_token")))
    assert float((per_token - x)[1].abs().max()) <= 0.2 / 127 / 2 * 1.001
    shifted = fake_quantized(x, Parameters(scale, torch.tensor(-126, dtype=torch.int32)))
    assert shifted.tolist() == [[1.0, 0.0, 253.0], [0.0, 0.0, 0.0]]


# Margins


class Even(nn.Module):
    """All channels end at the same value in the data that ranges come from, and go beyond in other data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)


def ending_at(*ends: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(2 * torch.rand(8, 64, DIM, generator=generator) - 1) * end for end in ends]


def test_ranges_get_a_margin_where_other_data_exceeds_them() -> None:
    batches = ending_at(1.4, 1.0, 1.0)  # the first is what is judged
    graph = exported(Even(), batches[0], dynamic_batch=True)
    assert choose_activations(copy.deepcopy(graph), QUANTIZER, batches, observers=False) == {}
    chosen = choose_activations(graph, QUANTIZER, batches, observers=False, margins=True)
    assert chosen["read"] in ("+ 0.3", "+ 0.5")
    prepared = prepare_pt2e(graph, QUANTIZER)
    calibrate(prepared, batches[1:], progress=False)
    scales = [n.args[1] for n in convert_pt2e(prepared).graph.nodes if "quantize_per_tensor" in str(n.target)]
    margin = float(chosen["read"].removeprefix("+ "))
    assert scales[0] == pytest.approx(float(torch.cat(batches[1:]).abs().amax()) * (1 + margin) / 127, rel=1e-6)


def test_margins_are_small_where_nothing_exceeds_ranges_and_others_observers_have_none() -> None:
    within = ending_at(0.99, 1.0, 1.0)
    graph = exported(Even(), within[0], dynamic_batch=True)
    assert choose_activations(graph, QUANTIZER, within, observers=False, margins=True) == {"read": "+ 0.2"}
    beyond = ending_at(1.25, 1.0, 1.0)
    other = QFrameworkQuantizer().set_global(static_int8(observer="mse"))
    assert choose_activations(graph, other, beyond, observers=False, margins=True) == {}
    single = exported(Even(), beyond[0])  # nothing can be held out
    assert choose_activations(single, QUANTIZER, beyond[:1], observers=False, margins=True) == {}


def test_margins_do_not_trust_channels_that_were_scaled_with_the_judged_data() -> None:
    """Every channel ends at 1 in all data, as smoothing leaves it, but half of them only in the judged batch."""
    batches = ending_at(1.0, 1.0, 1.0)
    for batch in batches[1:]:
        batch[..., ::2] *= 0.6
    graph = exported(Even(), batches[0], dynamic_batch=True)
    chosen = choose_activations(graph, QUANTIZER, batches, observers=False, margins=True)
    assert chosen["read"] == "+ 0.5"


def test_clipping_is_dropped_where_it_ruins_few_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, DIM))
    batches = [torch.randn(4, 75, 512) for _ in range(3)]
    for x in batches:
        x[:, 5, 0] = 100.0  # fewer values than the percentile keeps, in one token of 75
    found = []
    for judged in (False, True):
        graph = exported(model, batches[0], dynamic_batch=True)
        errors = OutputError(graph, QUANTIZER, batches[1:], batches[:1]).errors
        found.append((choose_activations(graph, QUANTIZER, batches, judge=errors if judged else None), errors()))
    (clips, clipped), (keeps, kept) = found
    assert clips["0"] in ("mse", "percentile")
    assert keeps == {}
    assert clipped.typical < kept.typical
    assert clipped.worst > 2 * kept.worst
