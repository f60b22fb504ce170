"""Training runs: resuming, several processes, files and errors (training_loop.py, training_files.py)."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demos import training_loop
from demos.training_files import CHECKPOINT, Curves, draw_curves, load_checkpoint
from demos.training_graph import StepGraph
from demos.training_loop import Place, RunConfig, train, train_together
from demos.training_tasks import TextTask
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError
from qframework.evaluation.distributed import Processes


class Regression:
    """A linear map with noise, learned by a small network with dropout, so that random numbers matter."""

    settings: Mapping[str, Any] = MappingProxyType({"name": "regression"})

    def build(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, 4)  # from the global generator, which the loop seeds
        return inputs, inputs[:, :2]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(model(inputs), targets)

    def evaluate(self, model: nn.Module, seed: int, device: torch.device) -> dict[str, float]:
        inputs = torch.randn(16, 4)
        return {"loss": float(self.loss(model, inputs, inputs[:, :2]))}


CONFIG = RunConfig(steps=12, batch_size=8, learning_rate=1e-2)


def test_losses_fall_and_depend_on_the_seed_alone() -> None:
    long = train(Regression(), replace(CONFIG, steps=150)).curves
    assert sum(long.losses[-20:]) < 0.5 * sum(long.losses[:20])
    torch.manual_seed(99)  # of no consequence
    again = train(Regression(), replace(CONFIG, steps=150)).curves
    assert again == long
    assert train(Regression(), replace(CONFIG, seed=1)).curves.losses != train(Regression(), CONFIG).curves.losses


@pytest.mark.parametrize(("steps", "rate"), [(25, 8.0), (20, 20 * 8 / 119)])
def test_the_speed_leaves_out_the_steps_that_compile(monkeypatch: pytest.MonkeyPatch, steps: int, rate: float) -> None:
    """The first takes 100 seconds, the others one; a run of 20 has no others to go by."""
    clock = 0.0

    class Slow(Regression):
        def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
            nonlocal clock
            clock += 1.0 if step else 100.0
            return super().batch(seed, step, size)

    monkeypatch.setattr(training_loop.time, "perf_counter", lambda: clock)
    outcome = train(Slow(), replace(CONFIG, steps=steps), Place(checkpoint_every=7))
    assert outcome.examples_per_second == pytest.approx(rate)
    assert len(outcome.curves.losses) == steps


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_an_interrupted_run_ends_with_the_same_losses(tmp_path: Path, stop: int) -> None:
    """Losses, validation and weights, bit for bit."""
    whole = train(Regression(), CONFIG, Place(evaluate_every=4))
    place = Place(folder=tmp_path, evaluate_every=4)
    first = train(Regression(), CONFIG, replace(place, stop_after=stop))
    assert not first.finished
    assert first.curves.losses == whole.curves.losses[:stop]
    second = train(Regression(), CONFIG, place)
    assert second.finished
    assert second.curves == whole.curves
    assert set(second.curves.validation) == {4, 8, 12}
    for name, weight in second.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name


def test_without_the_optimizers_state_losses_would_differ(tmp_path: Path) -> None:
    """What the test above rests on."""
    train(Regression(), CONFIG, Place(folder=tmp_path, stop_after=5))
    fields = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    fields["optimizer"]["state"] = {}
    torch.save(fields, tmp_path / CHECKPOINT)
    assert train(Regression(), CONFIG, Place(folder=tmp_path)).curves != train(Regression(), CONFIG).curves


def test_the_callers_generators_and_settings_do_not_change() -> None:
    before = torch.random.get_rng_state()
    train(Regression(), replace(CONFIG, steps=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_micro_batches_add_up_to_the_batch() -> None:
    """Without dropout the same gradients up to the rounding of FP32, which AdamW may enlarge to a step's size."""

    class NoDropout(Regression):
        def build(self, seed: int) -> nn.Module:
            return nn.Linear(4, 2)

    whole = train(NoDropout(), CONFIG).curves.losses
    parts = train(NoDropout(), replace(CONFIG, accumulate=4)).curves.losses
    assert parts == pytest.approx(whole, rel=1e-4)
    assert parts != whole  # added up in another order: micro-batches were made


def test_weight_decay_applies_to_matrices_only() -> None:
    decaying, others = training_loop.adamw(nn.Linear(3, 2), CONFIG).param_groups
    assert ([p.dim() for p in decaying["params"]], decaying["weight_decay"]) == ([2], CONFIG.weight_decay)
    assert ([p.dim() for p in others["params"]], others["weight_decay"]) == ([1], 0.0)


# Refusals


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    place = Place(folder=tmp_path)
    train(Regression(), CONFIG, replace(place, stop_after=2))
    with pytest.raises(QFrameworkError, match=r"other settings \(seed was 0, is 3\)"):
        train(Regression(), replace(CONFIG, seed=3), place)
    assert train(Regression(), replace(CONFIG, seed=3), replace(place, restart=True)).finished


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(FileFormatError, match="is not a checkpoint of a training run"):
        load_checkpoint(tmp_path / CHECKPOINT, {})


BAD_CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": "int4"}, "precision must be one of fp32, bf16, int8, got 'int4'"),
    "mode": ({"mode": "per_row"}, "mode must be one of per_block, per_tensor, per_token, got 'per_row'"),
    "steps": ({"steps": 0}, "must be at least 1, got 0"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGURATIONS.values(), ids=BAD_CONFIGURATIONS)
def test_bad_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((QFrameworkError, UnsupportedError), match=message):
        replace(CONFIG, **changes)


def test_a_batch_that_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(QFrameworkError, match="multiple of 3 processes times 1 micro-batches, got 8"):
        train(Regression(), CONFIG, Place(processes=Processes(0, 3)))


# Curves


def test_csv_reads_back_exactly(tmp_path: Path) -> None:
    curves = Curves([0.1, 1 / 3, 2.0], {2: {"loss": 0.7, "top1": 12.5}, 3: {"loss": 1e-9}})
    curves.write_csv(tmp_path / "losses.csv")
    rows = list(csv.DictReader((tmp_path / "losses.csv").open()))
    assert [float(row["loss"]) for row in rows] == curves.losses
    assert [row["validation_loss"] for row in rows] == ["", "0.7", "1e-09"]
    assert [row["validation_top1"] for row in rows] == ["", "12.5", ""]
    assert Curves.from_dict(curves.as_dict()) == curves
    assert curves.last == {"loss": 1e-9}


def test_equal_curves_are_drawn_alike(tmp_path: Path) -> None:
    curves = Curves([3.0, 2.0, 1.0], {3: {"loss": 1.5}})
    for name in ("a.png", "b.png"):
        draw_curves({"bf16": [curves, curves], "int8": [curves]}, tmp_path / name, title="runs")
    drawn = (tmp_path / "a.png").read_bytes()
    assert drawn[:4] == b"\x89PNG"
    assert drawn == (tmp_path / "b.png").read_bytes()
    draw_curves({"bf16": [Curves([3.0, 2.5], {})]}, tmp_path / "b.png", title="runs")
    assert drawn != (tmp_path / "b.png").read_bytes()


# Processes

SCRIPT = """
import json, os, sys
from pathlib import Path
from qframework.evaluation.distributed import joined_processes
from demos.training_loop import Place, RunConfig, train
from test_training_loop import CONFIG, NoRandomness

with joined_processes() as processes:
    assert processes.size == 2
    outcome = train(NoRandomness(), CONFIG, Place(processes=processes))
    everyones = processes.gather([outcome.curves.losses])
    if processes.is_first:
        Path(sys.argv[1]).write_text(json.dumps(everyones))
os._exit(0)  # past the end of the interpreter, where C++ threads of PyTorch sometimes call terminate
"""


class NoRandomness(Regression):
    """Dropout differs between the processes, as it should; without it nothing does."""

    def build(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def test_two_processes_have_the_same_losses_as_one(tmp_path: Path) -> None:
    """Up to the rounding of FP32 sums in another order."""
    import json

    script, output = tmp_path / "script.py", tmp_path / "losses.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "examples")]
    paths = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script), str(output)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    first, second = json.loads(output.read_text())
    assert first == second
    assert first == pytest.approx(train(NoRandomness(), CONFIG).curves.losses, rel=1e-4)


def test_runs_that_take_turns_have_the_losses_of_runs_alone(tmp_path: Path) -> None:
    """Also with other lengths and places; dropout and batches come from generators that all runs share."""
    configs = [CONFIG, replace(CONFIG, seed=1), replace(CONFIG, steps=7, learning_rate=2e-2)]
    places = [Place(evaluate_every=4), Place(folder=tmp_path, checkpoint_every=5), Place(stop_after=3)]
    together = train_together(Regression(), list(zip(configs, places, strict=True)))
    for config, place, found in zip(configs, places, together, strict=True):
        alone = train(Regression(), config, replace(place, folder=None))
        assert found.curves == alone.curves
        assert found.finished == alone.finished == (place.stop_after is None)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="graphs must be False without a GPU and in several processes, got de"):
        train(Regression(), CONFIG, Place(graphs=True))


def test_a_step_is_ordinary_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing a step does not make it: the captured one is replayed with the inputs of each call."""
    made: list[float] = []

    class Recorded:
        def replay(self) -> None:
            made.append(float(inputs[0]))
            loss.copy_(2 * inputs[0])

    inputs, loss = torch.zeros(1), torch.zeros(())
    monkeypatch.setattr(StepGraph, "_capture", lambda *_: (Recorded(), inputs, torch.zeros(1), loss))
    step = StepGraph(lambda x, _: made.append(float(x[0])) or 2 * x[0])
    losses = [step(torch.tensor([float(n)]), torch.zeros(1)) for n in range(6)]
    assert made == [0, 1, 2, 3, 4, 5]
    assert [float(each) for each in losses] == [0, 2, 4, 6, 8, 10]  # copies, not the graph's own memory


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_steps_in_graphs_have_the_losses_of_ordinary_steps(precision: str, tmp_path: Path) -> None:
    """Of two runs at once, one of which is interrupted; fused AdamW rounds otherwise."""
    task = TextTask(width=128, depth=2, heads=2, context=64, windows=4, limit=200_000)
    configs = [RunConfig(12, 8, 1e-3, seed=seed, precision=precision) for seed in (0, 1)]
    device = torch.device("cuda")
    ordinary = [train(task, config, Place(device)).curves for config in configs]
    places = [Place(device, folder=tmp_path / str(seed), graphs=True) for seed in (0, 1)]
    train(task, configs[1], replace(places[1], stop_after=6))
    graphed = [each.curves for each in train_together(task, list(zip(configs, places, strict=True)))]
    for mine, other in zip(graphed, ordinary, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=5e-3)
        assert mine.last["loss"] == pytest.approx(other.last["loss"], rel=5e-3)
