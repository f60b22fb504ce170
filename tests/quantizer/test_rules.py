"""Rules as JSON: a restored quantizer quantizes the same layers in the same way."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from torch.fx import Node

from qframework.errors import UnsupportedError
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    dynamic_attention,
    dynamic_int8,
    qattn_paper,
    static_attention,
    static_int8,
)
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.quantizer import layer_name


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


def quantizer() -> QFrameworkQuantizer:
    both = QuantizationConfig(dynamic_int8(), dynamic_attention("sage2_int8", smooth_k=False))
    return (
        QFrameworkQuantizer()
        .set_global(static_int8(observer="percentile", percentile=99.9))
        .set_global(static_attention("per_head"))
        .set_module_type(MLP, qattn_paper())
        .set_module_name("0.fc1", both)
        .set_module_name("*.fc2", None)
    )


def read(description: dict) -> QFrameworkQuantizer:
    return QFrameworkQuantizer.from_dict(json.loads(json.dumps(description)))


def test_from_dict_is_the_inverse_of_to_dict() -> None:
    assert read(quantizer().to_dict()).rules == quantizer().rules


def test_restored_rules_select_the_same_layers() -> None:
    graph = torch.export.export(nn.Sequential(MLP(), MLP()), (torch.randn(2, 8),)).module().graph
    linears = {layer_name(node): node for node in graph.nodes if is_linear(node)}
    configs = {name: read(quantizer().to_dict()).config_for(node) for name, node in linears.items()}
    assert configs == {"0.fc1": dynamic_int8(), "0.fc2": None, "1.fc1": qattn_paper(), "1.fc2": None}


def is_head(node: Node) -> bool:
    return layer_name(node) == "head"


def rules(*each: dict) -> dict:
    return {"quantizer": "QFrameworkQuantizer", "rules": list(each)}


NAMED = {"kind": "module_name", "selector": "fc1", "config": None}
REFUSED = {
    "a filter": (QFrameworkQuantizer().set_filter(is_head, None).to_dict(), ["'filter'", "is_head", "set_filter"]),
    "a type nobody imported": (rules(NAMED | {"kind": "module_type", "selector": "timm.no.Such"}), ["'timm.no.Such'"]),
    "a type that is a function": (rules(NAMED | {"kind": "module_type", "selector": "os.system"}), ["'os.system'"]),
    "a type without a name": (rules(NAMED | {"kind": "module_type", "selector": None}), ["None"]),
    "an empty pattern": (rules(NAMED | {"selector": ""}), ["set_module_name", "''"]),
    "an unknown kind": (rules(NAMED | {"kind": "layer"}), ["'global', 'module_type'", "got 'layer'"]),
    "an unknown field": (rules(NAMED | {"bits": 8}), ["'kind', 'selector', 'config', got 'bits'"]),
    "a config of no kind": (rules(NAMED | {"config": {"bits": 8}}), ["one of LinearConfig", "got 'bits'"]),
    "a config of several kinds": (
        rules(NAMED | {"config": {"output": "always"}}),
        ["one of LinearConfig", "got 'output'"],
    ),
    "a config that is no mapping": (rules(NAMED | {"config": "int8"}), ["'int8'", "to_dict"]),
    "a rule that is no mapping": (rules("fc1"), ["'fc1'", "to_dict"]),  # type: ignore[arg-type]
    "another quantizer": ({"quantizer": "Other", "rules": []}, ["'Other'", "QFrameworkQuantizer"]),
    "no rules": ({"quantizer": "QFrameworkQuantizer"}, ["to_dict"]),
    "no mapping": ([], ["[]", "to_dict"]),
}


@pytest.mark.parametrize(("description", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(description, words) -> None:
    with pytest.raises(UnsupportedError) as error:
        QFrameworkQuantizer.from_dict(description)
    for word in words:
        assert word in str(error.value)


def test_reading_imports_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "unseen_module.py").write_text("class Layer: pass")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=r"whose module is imported, got 'unseen_module.Layer'"):
        QFrameworkQuantizer.from_dict(rules(NAMED | {"kind": "module_type", "selector": "unseen_module.Layer"}))
    assert "unseen_module" not in sys.modules
