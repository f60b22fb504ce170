"""Many architectures: their builders, a smoke run in processes, and the page (families*.py, report_families.py)."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import families, report, report_families
from benchmarks.families_cases import FAMILIES, SMOKE
from benchmarks.families_models import _build_transformers, _enlarge_tiny
from benchmarks.harness import Record, Results, WrongResultError
from qframework.numerics import sqnr_db

TRANSFORMERS = [name for name, family in FAMILIES.items() if family.build.func is _build_transformers]


def test_timm_knows_the_others():
    import timm

    assert set(FAMILIES) - set(TRANSFORMERS) <= set(timm.list_models())
    assert len(FAMILIES) >= 24


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_small_forms_of_transformers_models(name):
    model, inputs, reference = families.build(FAMILIES[name], 2, "cpu", smoke=True)
    assert len(reference) == len(inputs[0]) == 2
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert reference.isfinite().all()
    assert reference.std() > 0.05


def test_padding_is_not_compared():
    _, (_, mask), reference = families.build(FAMILIES["bert_base"], 2, "cpu", smoke=True)
    assert 0 < mask.sum() < mask.numel()
    assert (reference[mask == 0] == 0).all()


def test_ids_and_masks_are_not_cast():
    ids, values = torch.ones(2, dtype=torch.long), torch.ones(2)
    assert [x.dtype for x in families.cast((ids, values), torch.float16)] == [torch.long, torch.float16]


def test_batch_1_adds_cuda_graphs():
    plans = families.plans_of(
        ["gpt2"], families.AT_ONCE + families.ALONE, "cuda", smoke=False, throughput=True, latency=True
    )
    graphs = {plan.batch for plan in plans if plan.provider.endswith("graphs")}
    assert graphs == {1}
    assert {plan.batch for plan in plans} == {1, FAMILIES["gpt2"].batch}


class Heads(nn.Module):
    """A layer that mixes heads, which is too small for INT8 with many rows, beside another or not."""

    def __init__(self, wide: int | None = None) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.wide = nn.Identity() if wide is None else nn.Linear(8, wide)

    def forward(self, x):
        return self.wide(self.mix(x))


@pytest.mark.parametrize(("wide", "expected"), [(None, True), (512, False)])
def test_a_dynamic_model_may_be_left_in_float(wide, expected, fresh_dynamo):
    options = {"linear": "int8_dynamic", "freeze_weights": True}
    forward = torch.compile(Heads(wide).eval(), backend="qframework", options=options)
    assert families.left_in_float(forward, (torch.randn(4096, 8),)) is expected


@pytest.mark.parametrize("wide", [None, 512])
def test_a_model_that_is_left_in_float_is_as_exact_as_float(wide, monkeypatch, fresh_dynamo):
    """Its record says so; one that is quantized must not be as exact."""
    family = families.Family("heads", "", 4096, lambda smoke: Heads(wide).eval(), lambda *_: (torch.randn(4096, 8),))
    monkeypatch.setitem(families.FAMILIES, "heads", family)
    exact = {"sqnr_db": 70.0, "worst_sqnr_db": 70.0, "error": 1e-4}

    def check_three(forward, inputs, output, reference, provider):
        if provider.precision == "int8":
            raise WrongResultError("too exact for int8", 1e-4)
        assert provider.precision == "float16"
        return exact

    monkeypatch.setattr(families, "check_three", check_three)
    check = families.Measurement(families.Plan("heads", 4096, "qframework_dynamic_frozen", "cpu")).check
    if wide is None:
        assert check().sqnr_db == 70.0
    else:
        with pytest.raises(WrongResultError, match="too exact"):
            check()


class Keeps(nn.Module):
    """Keeps a bias from its first call, as attention of timm's TinyViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.attention_bias_cache = nn.Linear(8, 8), {}

    def forward(self, x):
        if "kept" not in self.attention_bias_cache:
            self.attention_bias_cache["kept"] = self.fc.bias + (100 if torch.compiler.is_compiling() else 1)
        return self.fc(x) + self.attention_bias_cache["kept"]


def test_models_keep_biases_of_an_eager_call(monkeypatch, fresh_dynamo):
    family = families.Family("keeps", "", 4, lambda smoke: Keeps().eval(), lambda *_: (torch.randn(4, 8),))
    monkeypatch.setitem(families.FAMILIES, "keeps", family)
    assert families.Measurement(families.Plan("keeps", 4, "fp16_compiled", "cpu")).check().error < 0.01


def test_batch_1_alone():
    plans = families.plans_of(["gpt2"], families.AT_ONCE, "cuda", smoke=False, throughput=False, latency=True)
    assert {plan.batch for plan in plans} == {1}
    assert families.plans_of(["gpt2"], families.AT_ONCE, "cuda", smoke=False, throughput=False, latency=False) == []


def test_decoding_runs_in_cuda_graphs_at_every_batch():
    plans = families.plans_of(["llama_1b_decoding"], families.ALONE, "cuda", smoke=False, throughput=True, latency=True)
    assert {(plan.batch, plan.provider) for plan in plans} == {(b, name) for b in (1, 16) for name in families.ALONE}


def test_decoding_sees_its_context_and_can_be_repeated():
    model, (ids,), reference = families.build(FAMILIES["llama_1b_decoding"], 2, "cpu", smoke=True)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference)
        torch.testing.assert_close(model(ids.flip(0)), reference.flip(0))
        model.cache.values_0[:, :, 7] += 9.0
        assert (model(ids) - reference).norm() > 1e-3 * reference.norm()


def test_decoding_in_float16_turns_by_frequencies_of_float32():
    model, (ids,), reference = families.build(FAMILIES["llama_1b_decoding"], 2, "cpu", smoke=True)
    half = families.in_dtype(model, torch.float16)
    dtypes = {name.rpartition(".")[2]: x.dtype for name, x in half.named_buffers()}
    assert dtypes["inv_freq"] == torch.float32
    assert dtypes["keys_0"] == torch.float16
    with torch.no_grad():
        assert sqnr_db(reference, half(ids).float()) > 50


@pytest.mark.parametrize(
    "names",
    [
        "fp16_compiled,qframework_static",
        pytest.param("fp16_compiled,qframework_dynamic_frozen,qframework_static", marks=pytest.mark.full),
    ],
)
def test_smoke_run_of_an_encoder(names, tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--models", "bert_base", "--providers", names, "--limit", "240", "--output", str(output)]
    assert families.main(arguments) == 0
    records = json.loads(output.read_text())["records"]
    assert [record["status"] for record in records] == ["ok"] * len(names.split(","))
    assert max(record["sqnr_db"] for record in records[1:]) < 60 < records[0]["sqnr_db"]


@pytest.mark.slow
@pytest.mark.full
def test_smoke_run_of_every_kind(tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--providers", "qframework_dynamic_frozen", "--limit", "580", "--output", str(output)]
    assert families.main(arguments) == 0
    records = [Record.from_json(fields) for fields in json.loads(output.read_text())["records"]]
    assert {record.model for record in records} == set(SMOKE)


def record(model: str, batch: int, provider: str, rate: float, **fields: object) -> Record:
    return Record(
        benchmark="families", model=model, batch=batch, provider=provider, images_per_second=rate, p50_ms=1.0, **fields
    )


def test_page_shows_ratios_means_losses_and_failures(tmp_path):
    results = Results("families", {"device": "made up", "date": "2026-01-01"}, tmp_path / "families" / "run.json")
    results.path.parent.mkdir()
    results.add(
        record("gpt2", 8, "fp16_compiled", 100.0, kernels_ms=9.0, spread=0.5),
        record("gpt2", 8, "qframework_dynamic_frozen", 150.0, sqnr_db=30.0),
        record("gpt2", 8, "qframework_static", 90.0, kernels_ms=6.0, spread=0.07),
        record("gpt2", 1, "fp16_compiled", 50.0),
        record("gpt2", 1, "fp16_compiled_graphs", 100.0),
        record("gpt2", 1, "qframework_dynamic_frozen", 60.0),
        Record(benchmark="families", model="gpt2", batch=1, provider="qframework_static", status="failed", reason="x"),
    )
    page = report_families.families_page(report.load_runs(results.path.parent), tmp_path / "docs" / "families.md")
    assert "| gpt2 | 8 | 1 |  |  | **1.5** | 0.9 | , 1.50 | 30, " in page.text
    assert "| gpt2 | 8 | static | 0.9 | 1.50 | 7 %, 50 % |" in page.text
    assert "| gpt2 | 1 | dynamic | 0.6 |  |  |" in page.text  # the fastest of each counts
    assert "failed: x" in page.text
    page.write()
    assert page.stale() == []
    assert b"gpt2, batch 8" in (tmp_path / "docs" / "assets" / "families-made-up.svg").read_bytes()


def test_the_newest_run_of_each_architecture_is_shown(tmp_path):
    for day, models in ((1, ("gpt2", "t5_base")), (2, ("gpt2",))):
        machine = {"device": "GPU A", "date": f"2026-01-0{day}", "commit": f"commit{day}"}
        results = Results("families", machine, tmp_path / f"run{day}.json")
        for model in models:
            results.add(record(model, 8, "fp16_compiled", 100.0), record(model, 8, "qframework_static", 100.0 * day))
    other = Results("families", {"device": "GPU B", "date": "2026-01-03"}, tmp_path / "other.json")
    other.add(record("gpt2", 8, "fp16_compiled", 100.0), record("gpt2", 8, "qframework_static", 300.0))
    text = report_families.render(report.load_runs(tmp_path))
    assert text.count("| gpt2 | 8 |") == 2
    first = text[text.index("## GPU A") : text.index("### Runs", text.index("## GPU A"))]
    assert "| gpt2 | 8 | 1 |  |  |  | **2** |" in first
    assert "| t5_base | 8 | 1 |  |  |  | **1** |" in first
    assert "| throughput | 2 |" in first
    assert all(f"| 2026-01-0{day} | `commit{day}` | " in text for day in (1, 2))
    assert text.count("device: GPU A") == text.count("device: GPU B") == 1


def test_tiny_parameters_are_enlarged():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e-6, -2e-6], [0.0, 5e-7]]))
        model.bias.zero_()
    _enlarge_tiny(model)
    torch.testing.assert_close(model.weight, torch.tensor([[0.05, -0.1], [0.0, 0.025]]))
    assert not model.bias.any()
    before = model.weight.clone()
    assert torch.equal(_enlarge_tiny(model).weight, before)


def test_matrices_of_zeros_are_drawn_and_biases_of_zeros_stay():
    model = nn.Linear(64, 8)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    _enlarge_tiny(model)
    assert 0.5 < float(model.weight.std() * 64**0.5) < 1.5
    assert not model.bias.any()
