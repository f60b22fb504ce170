"""The state dict of a quantized model: scales that the graph holds as numbers are loaded with the tensors."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from quantized_models import MLP
from torch import Tensor, nn
from torch.fx import GraphModule

import qframework
from qframework.conversion.quantized_model import QuantizedModel
from qframework.errors import UnsupportedError
from qframework.graph.activation_scales import KEY
from qframework.quantizer import QuantizationConfig, dynamic_int8, static_int8


def quantized(seed: int, scale: float, config: QuantizationConfig) -> tuple[QuantizedModel, Tensor]:
    """An MLP drawn from a seed and calibrated on inputs of this size, and these inputs."""
    torch.manual_seed(seed)
    model, x = MLP().eval(), torch.randn(4, 16)
    return qframework.quantize(model, x, config, [x * scale]), x


def saved(model: nn.Module) -> dict[str, Tensor]:
    """The state dict behind a file that holds nothing but tensors."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("config", [static_int8(), static_int8(symmetric=False), dynamic_int8()])
def test_a_model_calibrated_on_other_data_takes_the_scales(config: QuantizationConfig) -> None:
    (trained, x), (fresh, _) = quantized(0, 1.0, config), quantized(1, 0.01, config)
    assert not torch.equal(fresh(x), trained(x))
    fresh.load_state_dict(saved(trained))
    assert torch.equal(fresh(x), trained(x))
    assert list(fresh.state_dict()) == list(trained.state_dict())


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_takes_them_too() -> None:
    (trained, x), (fresh, _) = quantized(0, 1.0, static_int8()), quantized(1, 0.01, static_int8())
    compiled, wanted = (torch.compile(model, backend="qframework") for model in (fresh, trained))
    with torch.no_grad():
        assert not torch.equal(compiled(x), wanted(x))
        fresh.load_state_dict(trained.state_dict())
        assert torch.equal(compiled(x), wanted(x))


def in_file(model: QuantizedModel, path: Path) -> GraphModule:
    """The model as it comes back from a file."""
    model.save(path)
    return qframework.load(path)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("config", [static_int8(), dynamic_int8()])
def test_loaded_models_take_them_from_each_other_and_from_quantized_ones(
    config: QuantizationConfig, tmp_path: Path
) -> None:
    (trained, x), (fresh, _) = quantized(0, 1.0, config), quantized(1, 0.01, config)
    wanted, path = trained(x), tmp_path / "model.pt2"
    loaded, read = in_file(trained, path), in_file(fresh, path)
    compiled = torch.compile(read, backend="qframework")
    with torch.no_grad():
        assert not torch.equal(compiled(x), wanted)
        read.load_state_dict(saved(loaded))
        assert torch.equal(read(x), wanted)
        torch.testing.assert_close(compiled(x), torch.compile(trained, backend="qframework")(x), rtol=0, atol=0)
    copied = copy.deepcopy(in_file(fresh, path))
    copied.load_state_dict(saved(trained))
    assert torch.equal(copied(x), wanted)
    fresh.load_state_dict(saved(loaded))
    assert torch.equal(fresh(x), wanted)
    assert torch.equal(in_file(fresh, path)(x), wanted)


def test_loaded_models_check_their_inputs_and_stay_in_evaluation(tmp_path: Path) -> None:
    model, x = quantized(0, 1.0, static_int8())
    for read in (in_file(model, tmp_path / "model.pt2"), copy.deepcopy(in_file(model, tmp_path / "model.pt2"))):
        with pytest.raises((AssertionError, RuntimeError), match=r"size\(\)\[1\] == 16|shape\[1\] to be equal to 16"):
            read(x[:, :-1])
        assert read.eval() is read
        assert not read.training
        with pytest.raises(UnsupportedError, match="load: mode must be False, got True"):
            read.train()
    with pytest.raises(ValueError, match="exported input tree spec"):
        in_file(model, tmp_path / "model.pt2")(x, x)


def test_a_part_of_a_model_takes_them_too() -> None:
    (trained, x), (fresh, _) = quantized(0, 1.0, static_int8()), quantized(1, 0.01, static_int8())
    whole = nn.Sequential(nn.Linear(16, 16), fresh)
    whole.load_state_dict(saved(nn.Sequential(nn.Linear(16, 16), trained)))
    assert torch.equal(fresh(x), trained(x))


def test_scales_that_are_missing_or_of_another_graph_are_errors() -> None:
    (trained, _), (fresh, _) = quantized(0, 1.0, static_int8()), quantized(1, 0.01, static_int8())
    state = trained.state_dict()
    scales = state.pop(KEY)
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{KEY}"'):
        fresh.load_state_dict(state)
    with pytest.raises(RuntimeError, match=rf"{KEY} must be those of .* {len(scales)} numbers, got {len(scales) - 1}"):
        fresh.load_state_dict({**state, KEY: scales[1:]})
