"""The papers' tables: formats against the operator, what each table must show, the smoke run and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks import paper_tables, report_papers
from benchmarks.attention_formats import Formats, attention_in, figures, smoothed
from benchmarks.attention_layers import captured, random_layers
from benchmarks.paper_tables import TABLES, average, measure, worst
from qframework.attention import sage_attention
from qframework.errors import FileFormatError
from qframework.kernels.attention.variants import KEYS_PER_FP16_SUM, fp8_ranges


def operands(tokens: int = 150, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 3, tokens, 32, generator=generator).half() for _ in range(3))
    return query, key + 2, value


@pytest.mark.parametrize(
    ("formats", "variant"),
    [
        (Formats("INT8", "INT8"), "sage_vb"),
        (Formats("INT8", "INT8", "per_token"), "sage_vt"),
        (Formats("INT8", "FP16"), "8-per_block-fp16-fp32"),
        (Formats("INT8", "E4M3", "per_thread"), "sage2_int8"),
        (Formats("INT8", "E4M3", "per_thread", *fp8_ranges("fp16"), KEYS_PER_FP16_SUM), "sage2pp_int8"),
    ],
)
def test_formats_are_those_of_the_operator(formats: Formats, variant: str) -> None:
    """Both round alike, but for ties, the order of float sums, and the operator's result in float16."""
    query, key, value = operands()
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    ours, theirs = (
        attention_in(formats, query, smoothed(key), value),
        sage_attention(query, key, value, variant=variant),
    )
    error, apart = figures(theirs, exact)["relative_l1"], figures(ours, theirs)["relative_l1"]
    assert apart < 0.02 * error + 3e-4, (apart, error)


def test_fp16_sums_overflow_beyond_their_range() -> None:
    """Sums of 64 products of 448 and 448 do not fit float16; those of the narrow ranges do (SageAttention2++ eq. 3)."""
    query, key, value = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 64, 16), torch.ones(1, 1, 64, 16)
    wide = attention_in(Formats("INT8", "E4M3", "per_thread", 448.0, 448.0, 64), query, key, value)
    narrow = attention_in(Formats("INT8", "E4M3", "per_thread", 224.0, 4.5, 64), query, key, value)
    assert not wide.isfinite().any()
    torch.testing.assert_close(narrow, torch.ones_like(narrow))


def test_figures_as_the_paper_defines_them() -> None:
    found = figures(torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    assert found == pytest.approx({"cosine": 0.6, "relative_l1": 4 / 7, "rmse": 8**0.5})


def test_captured_operands_are_those_of_the_call() -> None:
    query, key, value = (each.float() for each in operands(9))
    (layer,) = captured("toy", lambda q, k: F.scaled_dot_product_attention(q, k, value=value), query, key)
    assert layer.layer == "toy, layer 0"
    for ours, theirs in zip(layer[1:], (query, key, value), strict=True):
        assert torch.equal(ours, theirs.half())


def test_the_order_of_the_papers() -> None:
    layers = list(random_layers(200))
    error = {
        name: {row: average(found)["relative_l1"] for row, found in measure(TABLES[name].rows, layers).items()}
        for name in ("formats", "smooth_k", "int4_granularity", "int4_smoothing", "fp8_ranges")
    }
    formats = error["formats"]
    assert formats["INT8, E4M3"] < formats["E4M3, E4M3"] < formats["E5M2, E4M3"]
    assert formats["INT8, FP16"] < formats["INT8, E4M3"] < formats["INT8, E5M2"]
    for granularity in ("per_token", "per_block", "per_tensor"):
        rows = error["smooth_k"]
        assert rows[f"{granularity}, smooth K"] < 0.7 * rows[f"{granularity}, not smoothed"]
    int4 = error["int4_granularity"]
    assert int4["per_token"] < int4["per_thread"] < int4["per_warp"] < int4["per_tensor"]
    smoothing = error["int4_smoothing"]
    assert smoothing["Q and K"] < min(smoothing["Q"], smoothing["K"])
    assert max(smoothing["Q"], smoothing["K"]) < smoothing["neither"]
    wide, *narrow = error["fp8_ranges"].values()
    assert max(narrow) < 1.001 * min(narrow)
    assert narrow[0] == pytest.approx(wide, rel=0.15)  # 448 and 4.5 place the values of V elsewhere in their binades


def test_smoke_run_and_page(tmp_path: Path) -> None:
    path = tmp_path / "papers.json"
    assert paper_tables.main(["--smoke", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert {name: list(rows) for name, rows in document["tables"].items()} == {
        name: list(table.rows) for name, table in TABLES.items()
    }
    assert list(report_papers.SECTIONS) == list(TABLES)
    assert report_papers.load(tmp_path) == {}  # of a smoke run
    path.write_text(json.dumps({**document, "smoke": False}))
    page = report_papers.render(report_papers.load(tmp_path))
    found = document["tables"]["formats"]["INT8, INT8"]
    mean, least = average(found), worst(found)[1]
    assert f"| INT8, INT8 | {100 * mean['cosine']:.3f} % | {mean['relative_l1']:.4f} |" in page
    assert f"| INT8, INT8 | {100 * least['cosine']:.3f} % | {least['relative_l1']:.4f} |" in page
    assert "| 99.70 % | 0.1035 | 0.00682 |" in page  # the paper's
    model = {"sqnr_db": 17.66, "correspondences": 70.0, "cosine": 0.99, "worst_cosine": 0.9}
    whole = report_papers.render({"paper_tables": {**document, "models": {"INT8, per tensor": model}, "crops": 34}})
    assert "on 34 crops" in whole
    assert "| INT8, per tensor | 17.7 | 70.0 | 0.9900 | 0.9000 |" in whole
    path.write_text("{}")
    with pytest.raises(FileFormatError, match="not a result file"):
        report_papers.load(tmp_path)
    assert "Nothing measured" in report_papers.render({})
