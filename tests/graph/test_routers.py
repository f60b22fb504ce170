"""Linear layers that choose experts stay in float, those whose values are only seen or pooled do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import qframework
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph.routers import MOST_OUTPUTS
from qframework.quantizer import QFrameworkQuantizer, static_int8


class Experts(nn.Module):
    """A linear layer that mixes, and one of few outputs in front of what ``choose`` does with them."""

    def __init__(self, choose, outputs: int = 16) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.gate = nn.Linear(64, outputs)
        self.choose = choose

    def forward(self, x):
        x = self.mix(x)
        return self.choose(self.gate(x)), x


def softmax_topk(scores):
    weights, chosen = torch.topk(scores.float().softmax(-1), 2)
    return weights / weights.sum(-1, keepdim=True), chosen


def biased_topk_in_groups(scores):
    """As DeepSeek-V3 does: a bias for the choice alone, and groups of experts that are masked first."""
    scores = scores.sigmoid()
    choice = scores + torch.linspace(0, 0.1, scores.shape[-1])
    groups = choice.view(*choice.shape[:-1], 4, -1).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(groups).scatter(-1, groups.topk(2, dim=-1)[1], 1.0)
    mask = mask.unsqueeze(-1).expand(*mask.shape, scores.shape[-1] // 4).reshape(scores.shape)
    chosen = choice.masked_fill(mask == 0, 0.0).topk(2, dim=-1)[1]
    return scores.gather(-1, chosen)


CHOICES = {
    "topk": softmax_topk,
    "groups": biased_topk_in_groups,
    "argmax": lambda scores: scores.argmax(-1),
    "max": lambda scores: scores.softmax(-1).max(dim=-1).indices,
    "sort": lambda scores: scores.sort(dim=-1, descending=True)[1][..., :2],
}
OTHERS = {
    "values": lambda scores: scores.relu(),
    "the largest value": lambda scores: scores.max(dim=-1).values,
    "max over tokens": lambda scores: scores.max(dim=1).values,
    "topk over tokens": lambda scores: scores.topk(2, dim=1)[1],
    "behind another layer": lambda scores: nn.functional.linear(scores, torch.ones(16, scores.shape[-1])).argmax(-1),
    "behind a sum": lambda scores: scores.view(*scores.shape[:-1], 4, -1).sum(-1).argmax(-1),
}


def dynamic(model, x) -> dict[str, str]:
    reports = []

    def backend(gm, example_inputs):
        reports.extend(lower(gm, example_inputs, BackendOptions(linear="int8_dynamic")))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return {each.name: each.reason for each in reports if each.kind == "linear"}


@pytest.mark.parametrize("name", [*CHOICES, *OTHERS])
def test_what_chooses_stays_in_float(name: str) -> None:
    model, x = Experts((CHOICES | OTHERS)[name]).eval(), torch.randn(2, 160, 64)
    reasons = dynamic(model, x)
    assert reasons["mix"] == ""
    assert ("it chooses" in reasons["gate"]) == (name in CHOICES)


@pytest.mark.parametrize("name", [*CHOICES, *OTHERS])
def test_static(name: str) -> None:
    model, x = Experts((CHOICES | OTHERS)[name]).eval(), torch.randn(2, 160, 64)
    reports = {each.name: each for each in qframework.quantize(model, x, "static_int8", [x]).explain().layers}
    assert reports["mix"].lowered
    assert reports["gate"].lowered == (name not in CHOICES)
    assert ("it chooses" in reports["gate"].reason) == (name in CHOICES)
    assert not reports["gate"].fallback


class CastGate(Experts):
    """Casts the weight of the gate in each call, as DeepSeek types do."""

    def forward(self, x):
        x = self.mix(x)
        return self.choose(nn.functional.linear(x.float(), self.gate.weight.type(torch.float32).clone())), x


def test_a_choice_with_a_weight_that_is_cast() -> None:
    model, x = CastGate(softmax_topk).eval(), torch.randn(2, 160, 64)
    reports = qframework.quantize(model, x, "static_int8", [x]).explain().layers
    assert [(each.lowered, "it chooses" in each.reason) for each in reports] == [(True, False), (False, True)]


def test_choices_are_those_of_the_float_model() -> None:
    torch.manual_seed(0)
    model = Experts(softmax_topk).eval()
    model.mix = nn.Identity()
    x = torch.randn(8, 500, 64)
    with torch.no_grad():
        chosen = model(x)[0][1]
        quantized = copy.deepcopy(model)
        compiled = torch.compile(quantized, backend="qframework", options={"linear": "int8_dynamic"})
        assert torch.equal(compiled(x)[0][1], chosen)


def test_a_number_of_tokens_that_varies_is_not_compared() -> None:
    """That would be a guard of the shape environment, on sizes that the graph does not depend on."""
    seen = []

    def backend(gm, example_inputs):
        sizes = next(x.fake_mode.shape_env for x in fakes(gm) if x.fake_mode.shape_env)
        before = len(sizes.guards)
        lower(gm, example_inputs, BackendOptions(linear="int8_dynamic"))
        seen.append(len(sizes.guards) - before)
        return gm.forward

    model, x = Experts(lambda scores: scores.topk(2, dim=1)[1]).eval(), torch.randn(2, 160, 64)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    assert seen == [0]


def fakes(gm):
    return [value for node in gm.graph.nodes if isinstance(value := node.meta.get("example_value"), FakeTensor)]


def test_a_vocabulary_is_no_choice() -> None:
    """A head of many outputs is most of a small model's time."""
    model, x = Experts(lambda scores: scores.argmax(-1), outputs=MOST_OUTPUTS + 8).eval(), torch.randn(1, 160, 64)
    assert dynamic(model, x)["gate"] == ""


def test_a_rule_that_names_the_layer_quantizes_it() -> None:
    x = torch.randn(2, 160, 64)
    model = Experts(softmax_topk).eval()
    exported = torch.export.export(model, (x,)).module()
    linears = [node for node in exported.graph.nodes if node.target is torch.ops.aten.linear.default]
    (gate,) = (node for node in linears if node.meta["val"].shape[-1] == 16)
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    assert quantizer.config_for(gate) is None
    named = QFrameworkQuantizer().set_global(static_int8()).set_module_name("gate", static_int8())
    assert named.config_for(gate) is not None
