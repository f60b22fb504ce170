"""Configurations of attention: errors, hashing, JSON."""

import json

import pytest

from qframework.errors import UnsupportedError
from qframework.kernels.attention.variants import VARIANTS
from qframework.quantizer import (
    AttentionConfig,
    QFrameworkQuantizer,
    QuantizationConfig,
    dynamic_attention,
    dynamic_int8,
    static_attention,
    static_int8,
)

ATTENTION = [
    static_attention(),
    static_attention("per_head"),
    static_attention("per_head", "moving_average", averaging_constant=0.1),
    static_attention(observer="percentile", percentile=99.5),
    AttentionConfig(output="always"),
    dynamic_attention(),
    dynamic_attention("sage_b", smooth_k=False),
    dynamic_attention(VARIANTS["sage2_int8"].spec),
    *map(dynamic_attention, VARIANTS),
]


@pytest.mark.parametrize("config", ATTENTION, ids=lambda config: config.mode)
def test_json_round_trip(config):
    restored = AttentionConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert hash(restored) == hash(config)


@pytest.mark.parametrize("linear", [None, static_int8(), dynamic_int8()])
@pytest.mark.parametrize("attention", [None, static_attention("per_head"), dynamic_attention("sage_t")])
def test_json_round_trip_of_both(linear, attention):
    config = QuantizationConfig(linear, attention)
    restored = QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert (restored.linear, restored.attention) == (linear, attention)


def test_presets_differ():
    assert len(set(ATTENTION)) == len(ATTENTION)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dynamic_attention("sage3"), ["variant must be auto, sage_t", "qattn", "got 'sage3'"]),
        (lambda: dynamic_attention("static"), ["got 'static'", "static_attention()"]),
        (lambda: AttentionConfig(None), ["mode must be 'static', 'auto'", "got None"]),
        (
            lambda: static_attention("per_token"),
            ["granularity must be one of 'per_tensor', 'per_head', got 'per_token'"],
        ),
        (
            lambda: static_attention("per_head", "percentile"),
            ["observer must be 'minmax' or 'moving_average' for granularity='per_head', got 'percentile'"],
        ),
        (lambda: static_attention(observer="max"), ["observer must be one of 'minmax', 'moving_average'", "got 'max'"]),
        (lambda: static_attention(percentile=99.0), ["observer 'minmax'", "got 'percentile'"]),
        (lambda: AttentionConfig(output="never"), ["output must be one of 'consumer', 'always', got 'never'"]),
        (lambda: AttentionConfig(smooth_k=1), ["smooth_k must be True or False, got 1"]),
        (lambda: AttentionConfig(smooth_k=False), ["smooth_k must be True for mode='static', got False"]),
        (
            lambda: AttentionConfig("sage_b", "per_head"),
            ["mode must be 'static' for granularity='per_head', got 'sage_b'"],
        ),
        (lambda: AttentionConfig("auto", observer="mse"), ["mode must be 'static' for observer='mse', got 'auto'"]),
        (lambda: AttentionConfig("auto", observer_args={"bins": 256}), ["{'bins': 256}", "got 'auto'"]),
        (lambda: AttentionConfig("auto", output="always"), ["mode must be 'static' for output='always'"]),
        (lambda: AttentionConfig.from_dict({"heads": 3}), ["'mode', 'granularity'", "got 'heads'"]),
        (
            lambda: QuantizationConfig(static_attention()),
            ["linear must be of type LinearConfig or None, got AttentionConfig"],
        ),
        (
            lambda: QuantizationConfig(None, static_int8()),
            ["attention must be of type AttentionConfig or None, got LinearConfig"],
        ),
        (lambda: QuantizationConfig.from_dict({"conv": None}), ["'linear', 'attention', got 'conv'"]),
        (lambda: QFrameworkQuantizer().set_global("static"), ["'static'", "AttentionConfig", "QuantizationConfig"]),
    ],
)
def test_refused(make, words):
    with pytest.raises(UnsupportedError) as error:
        make()
    for word in words:
        assert word in str(error.value)
