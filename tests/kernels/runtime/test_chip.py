"""The GPUs that the kernels run on."""

from __future__ import annotations

import pytest
import torch

from qframework.errors import UnsupportedError
from qframework.kernels.runtime import chip


@pytest.mark.parametrize(("capability", "hip", "what"), [((7, 5), None, "sm_75"), ((9, 4), "7.0", "an AMD GPU")])
def test_other_gpus_are_refused_by_name(monkeypatch, capability, hip, what):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Chip 3")
    chip.check_device.cache_clear()
    with pytest.raises(UnsupportedError, match=rf"Chip 3 .* is {what}; .* need an NVIDIA GPU of sm_80 or newer"):
        chip.check_device(torch.device("cuda", 0))
    chip.check_device.cache_clear()
