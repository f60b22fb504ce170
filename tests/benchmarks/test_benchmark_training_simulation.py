"""INT8 training against a simulation in plain PyTorch (training_simulation.py, simulated_gpt.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training_simulation
from benchmarks.simulated_gpt import Product, Sizes, rounded
from benchmarks.training_simulation import Distance
from demos.training_tasks import TextTask
from qframework.kernels.blocks.format import BLOCK_SIZES, CanonicalSize, dequantize_blocks_ref, quantize_blocks_ref

TASK = TextTask(width=128, depth=2, heads=2, context=48, limit=300_000)


@pytest.mark.parametrize("size", BLOCK_SIZES, ids=str)
def test_the_gradients_of_int8_training_are_the_simulation_s(
    size: CanonicalSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the order of sums, whose effect on roundings the two simulations show; for every block size."""
    monkeypatch.setattr(training_simulation, "BATCHES", 2)
    monkeypatch.setattr(training_simulation, "BATCH", 3)
    torch.manual_seed(0)
    weights = TASK.build(0).state_dict()
    found = {row.pair: row.distance for row in training_simulation.distances(TASK, weights, size, 0, "cpu")}
    mine, floor, format_s, _ = found.values()
    assert mine <= 1.5 * floor
    assert mine < 0.5 * format_s


@pytest.mark.parametrize("size", BLOCK_SIZES, ids=str)
def test_rounding_is_the_block_format_s(size: CanonicalSize) -> None:
    x = torch.randn(3, 50, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, :40, :33] = 0
    expected = dequantize_blocks_ref(*quantize_blocks_ref(x.float(), size), size)
    assert torch.allclose(rounded(x, size).float(), expected, rtol=1e-6, atol=0)


def test_without_blocks_a_product_is_exact() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = (4, 5, 6), (6, 7), (7,)
    x, weight, bias = (torch.randn(s, generator=random, dtype=torch.float64, requires_grad=True) for s in shapes)
    assert torch.autograd.gradcheck(lambda *args: Product.apply(*args, Sizes(None, None)), (x, weight, bias))


def test_the_file_holds_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "simulation.json"
    assert training_simulation.main(["--smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert set(document["runs"]) == set(training_simulation.RUNS)
    assert [row["step"] for row in document["distances"]] == [1] * 4 + [2] * 4
    assert training_simulation.tables(document) in capsys.readouterr().out


def test_tables() -> None:
    rows = [Distance(5, "a and b", 0.25).__dict__]
    text = training_simulation.tables({"runs": {"kernels": [[5, 1.5]], "bf16": [[5, 1.25]]}, "distances": rows})
    assert "| kernels | 1.500 |" in text
    assert "| a and b | 0.2500 |" in text
