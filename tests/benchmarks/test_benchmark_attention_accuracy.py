"""The figures on the page on attention match the stored measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.attention_accuracy import SMOKE_SHAPE, measure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/attention.md").read_text()
(FILE,) = re.findall(r"benchmarks/results/other/\S+?attention_accuracy\.json", PAGE)
ROWS = {row["variant"]: row for row in json.loads((ROOT / FILE).read_text())["rows"]}
PRINTED = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([\d.]+) \|", PAGE, re.MULTILINE))


def test_every_named_variant_has_its_error():
    assert set(PRINTED) == set(ROWS) - {"8-per_thread-fp16-fp32"}
    for variant, printed in PRINTED.items():
        digits = len(printed.split(".")[1])
        assert f"{ROWS[variant]['relative_l1']:.{digits}f}" == printed, variant


def test_gains_of_smooth_k():
    text = PAGE[PAGE.index("- **Smooth K**") : PAGE.index("- **Smooth Q**")]
    gains = re.findall(r"([\d.]+)(?: times)?\s+with\s+((?:`\w+`(?: and )?)+)", text)
    named = {variant: gain for gain, variants in gains for variant in re.findall(r"`(\w+)`", variants)}
    assert set(named) == {"sage_t", "sage2_int4", "sage_b", "qattn", "sage_vt", "sage_vb", "sage2_int8"}
    for variant, printed in named.items():
        assert f"{ROWS[variant]['biased_rough'] / ROWS[variant]['biased_smooth']:.1f}" == printed, variant


def test_measuring_still_works():
    rows = {row["variant"]: row for row in measure(SMOKE_SHAPE)}
    assert set(rows) == set(ROWS)
    for variant, row in rows.items():  # another shape: the same size of error
        assert 0.5 < row["relative_l1"] / ROWS[variant]["relative_l1"] < 2, variant
