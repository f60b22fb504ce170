"""benchmarks/decode.py: a smoke run, wrong results, and the summary."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import decode as module
from benchmarks.decode_cases import PROVIDERS, Inputs, Shape, attention_fp64, number_of_copies
from benchmarks.harness import Record, WrongResultError

SMALL = Shape(2, 4, 2, 3, 50, 32)


def test_smoke(tmp_path, capsys):
    path = tmp_path / "decode.json"
    assert module.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    timed = {record["provider"] for record in records if record["status"] == "ok"}
    assert {"qframework_int8", "torch_matmul", "torch_flash_gqa"} <= timed
    assert {record["status"] for record in records} <= {"ok", "unsupported"}
    assert "times torch_" in capsys.readouterr().out
    for record in records:
        if record["status"] == "ok":
            int8 = record["provider"] == "qframework_int8"
            assert (record["quantization_error"] > 3 * record["error"]) == int8


def test_models_smoke(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "models.json"
    assert module.main(["--smoke", "--models", "--device", "cpu", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert len(records) == 6
    assert {record["status"] for record in records} == {"ok"}
    errors = {record["provider"]: record["error"] for record in records}
    assert errors["static_fp16"] < 1e-5 < errors["qframework_int8"] < 0.03


def test_a_limit_stops(capsys):
    assert module.main(["--smoke", "--device", "cpu", "--limit", "-1"]) == 0
    assert "stopped after -1 s" in capsys.readouterr().out


def test_oracle():
    given = Inputs(SMALL, "cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(
        given.query.double(), given.key.double(), given.value.double(), enable_gqa=True
    )
    torch.testing.assert_close(attention_fp64(given.query, given.key, given.value), expected)


@pytest.mark.parametrize("provider", ["qframework_int8", "torch_matmul"])
def test_wrong_results_are_found(provider):
    given = Inputs(SMALL, "cpu")
    case = PROVIDERS[provider](given)
    right = case.calls[0]()
    case.check(right)
    wrong = right.clone()
    wrong[1, 2, 0] *= 1.1
    with pytest.raises(WrongResultError):
        case.check(wrong)


def test_copies_exceed_the_cache():
    assert number_of_copies(2**20) == 32
    assert number_of_copies(2**30) == 2
    shape = Shape(1, 32, 8, 1, 4096, 128)
    assert shape.int8_bytes == shape.fp16_bytes / 2 * (1 + 4 / 256)


def test_held_out_shapes_are_odd_and_apart():
    assert not set(module.SHAPES) & set(module.HELD_OUT)
    assert all(shape.keys % 128 for shape in module.HELD_OUT)


def test_speedups():
    def record(provider: str, dtype: str, ms: float) -> Record:
        return Record(
            benchmark="decode", op="decode_attention", shape=SMALL.sizes, provider=provider, dtype=dtype, p50_ms=ms
        )

    records = [record("qframework_int8", "int8", 2.0), record("a", "float16", 5.0), record("b", "float16", 3.0)]
    assert "1.50 times b" in module.speedups(records)[0]
