"""options= and mode= of torch.compile: split from Inductor's, unknown ones refused."""

from __future__ import annotations

import pytest

from qframework.backend.options import parse_options
from qframework.errors import UnsupportedError


def test_options_are_split_from_inductors():
    options = parse_options(None, {"linear": "int8_dynamic", "max-autotune": True, "triton.cudagraphs": True})
    assert options.linear == "int8_dynamic"
    assert options.inductor == {"max_autotune": True, "triton.cudagraphs": True}


def test_modes_reach_inductor():
    assert parse_options("reduce-overhead").inductor["triton.cudagraphs"] is True
    assert parse_options("max-autotune").inductor["max_autotune"] is True
    assert parse_options("default").inductor == parse_options().inductor == {}


def test_an_option_overrides_the_mode():
    assert parse_options("reduce-overhead", {"triton.cudagraphs": False}).inductor["triton.cudagraphs"] is False


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("fast", None, "mode must be one of default, .*reduce-overhead.*max-autotune.*, got 'fast'"),
        (None, {"linear": "int4"}, "'linear' must be one of 'off', 'int8_dynamic', got 'int4'"),
        (None, {"linaer": "off"}, "option 'linaer' is unknown. Did you mean linear.*'linear': off | int8_dynamic"),
        (None, {"max_autotun": True}, "Did you mean max_autotune"),
    ],
)
def test_unknown_options_are_refused_with_the_known_ones(mode, options, message):
    with pytest.raises(UnsupportedError, match=message):
        parse_options(mode, options)
