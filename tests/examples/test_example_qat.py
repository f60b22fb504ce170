"""The example of quantization-aware training runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from example_scripts import example

from qframework.evaluation import digits_vit


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("qat_digits").main(["--smoke", "--build", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("FP32", "static INT8", "static INT8, trained"))


@pytest.mark.slow
def test_training_recovers_the_loss_of_static_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the example's epochs in float and half of those with fake quantization are enough to see it."""
    short = replace(digits_vit.SIZES["small"], epochs=10, batch_size=16, learning_rate=1e-3, shifted=0.5)
    monkeypatch.setitem(digits_vit.SIZES, "small", short)
    script = example("qat_digits")
    full, lost, trained = script.run(script.parse_arguments(["--build", str(tmp_path), "--epochs", "4"])).values()
    assert full > 95
    assert lost < full - 10
    assert trained > full - 0.3 * (full - lost)
