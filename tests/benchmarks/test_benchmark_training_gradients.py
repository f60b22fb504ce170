"""The comparison of gradients, and its file (training_gradients.py)."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from benchmarks import training_gradients
from benchmarks.training_gradients import Row
from demos.training_tasks import TextTask

TASK = TextTask(width=256, depth=1, heads=2, context=16, limit=300_000)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return TASK.build(0)


def test_the_file_holds_what_was_printed(tmp_path, capsys):
    path = tmp_path / "new" / "gradients.json"
    assert training_gradients.main(["--smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    rows = [Row(**row) for row in document["rows"]]
    assert training_gradients.table(rows) in capsys.readouterr().out
    assert document["settings"]["tokens"] == 2 * 4 * 16
    assert {row.configuration for row in rows} == set(training_gradients.COMPARED)
    assert all(0 < row.gradient_error < 1 for row in rows if row.massive == 0)


def test_fp32_compared_with_itself_has_no_error(model, monkeypatch):
    monkeypatch.setattr(training_gradients, "int8", lambda given, name: copy.deepcopy(given))
    batches = [TASK.batch(1, step, 2) for step in range(2)]
    (row,) = training_gradients.compare_gradients(TASK, model, batches, ["per_block_32"])
    assert (row.gradient_error, row.percent) == (0.0, 0.0)


def test_a_massive_token_harms_the_tokens_in_its_block(model):
    """One block of 128 x 128 holds all 16 tokens; of (1, 128) each has its own."""
    changed = training_gradients.with_massive_token(TASK, model, 300.0)
    batches = [TASK.batch(1, 0, 2)]
    assert (
        training_gradients.times_median(changed, batches[0]) > 100 > training_gradients.times_median(model, batches[0])
    )
    names = ["per_block_128", "per_block_1x128"]
    square, row = training_gradients.compare_massive(TASK, changed, batches, names, 300.0)
    assert abs(row.loss - row.loss_fp32) < 0.1 * abs(square.loss - square.loss_fp32)


def test_table():
    rows = [Row("a", 0.0, 1.5, 2.0, 2.0, 0.01), Row("a", 50.0, 330.0, 3.0, 2.0)]
    assert training_gradients.table(rows).splitlines()[-1] == "| a | 0.0100 | +0.00 % | +50.00 % |"
