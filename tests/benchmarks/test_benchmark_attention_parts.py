"""Attention on Hopper in parts: cases are listed where there is no GPU, and forms of the kernel change and return."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention_parts
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.variants import resolve

needs_triton = pytest.mark.skipif(not specialized.HAS_GLUON, reason="needs Gluon")


def test_a_smoke_run_lists_the_cases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a GPU it measures them
    assert attention_parts.main(["--smoke", "--only", "forms,choice"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "case_forms ([4, 32, 4096, 64], 'sage2_int8', 1)"
    assert [line.split()[0] for line in lines] == ["case_forms"] * 6 + ["case_choice"] * 2


def test_chunks_hold_every_head_once() -> None:
    q = torch.arange(3 * 5 * 2 * 4.0).view(3, 5, 2, 4)
    parts = attention_parts.in_chunks((q, -q, q + 1), 4)
    assert [part[0].shape for part in parts] == [(1, 4, 2, 4)] * 3 + [(1, 3, 2, 4)]
    for i, x in enumerate((q, -q, q + 1)):
        assert torch.equal(torch.cat([part[i] for part in parts], 1).view(q.shape), x)


@needs_triton
def test_a_form_changes_inside_its_block_alone() -> None:
    given = resolve("sage2_int8"), 64, 64, False
    before = specialized.form_of(*given)
    with attention_parts.changed_form({"stages": 5}):
        assert specialized.form_of(*given) == before._replace(stages=5)
    assert specialized.form_of(*given) == before
    assert before.stages < 5


@needs_triton
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["sage2_int8", "integer_exp"])
def test_forms_fit_shared_memory(name: str, width: int) -> None:
    for changes in attention_parts.FORMS.values():
        with attention_parts.changed_form(changes):
            assert specialized.shared_bytes(specialized.form_of(resolve(name), width, width, False)) <= 226 * 1024
