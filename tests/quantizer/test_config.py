"""Configurations: errors, hashing, JSON."""

import json
from dataclasses import FrozenInstanceError

import pytest

from qframework.errors import UnsupportedError
from qframework.quantizer import (
    ActivationConfig,
    LinearConfig,
    QFrameworkQuantizer,
    WeightConfig,
    dynamic_int8,
    qattn_paper,
    static_int8,
)

PRESETS = [
    static_int8(),
    static_int8("per_token", "per_tensor", "moving_average", averaging_constant=0.1),
    static_int8(observer="percentile", percentile=99.5, bins=4096),
    static_int8(observer="mse", bins=512),
    static_int8(symmetric=False),
    static_int8(observer="moving_average", symmetric=False),
    static_int8(observer="percentile", symmetric=False, percentile=99.5),
    dynamic_int8(),
    dynamic_int8("per_tensor", "per_tensor"),
    qattn_paper(),
    qattn_paper(dynamic=True),
    LinearConfig(weight=WeightConfig(observer="mse")),
]


@pytest.mark.parametrize("config", PRESETS)
def test_json_round_trip(config):
    restored = LinearConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert hash(restored) == hash(config)


def test_presets_differ():
    assert len(set(PRESETS)) == len(PRESETS)


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        static_int8().output = "always"


def test_order_of_observer_arguments_is_irrelevant():
    one = ActivationConfig(observer="percentile", observer_args={"percentile": 99.0, "bins": 256})
    other = ActivationConfig(observer="percentile", observer_args={"bins": 256, "percentile": 99.0})
    assert one == other


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: static_int8("per_row"), ["granularity must be one of 'per_tensor', 'per_token', got 'per_row'"]),
        (
            lambda: static_int8(weight="per_row"),
            ["granularity must be one of 'per_tensor', 'per_channel', got 'per_row'"],
        ),
        (lambda: dynamic_int8("per_channel"), ["granularity", "'per_token', got 'per_channel'"]),
        (lambda: static_int8(observer="max"), ["observer must be one of 'minmax', 'moving_average', ", "got 'max'"]),
        (
            lambda: static_int8("per_token", observer="percentile"),
            ["granularity must be 'per_tensor' for observer 'percentile'", "support it: 'minmax', 'moving_average'"],
        ),
        (lambda: static_int8("per_token", observer="mse"), ["'mse'"]),
        (lambda: static_int8("per_token", observer="entropy"), ["'entropy'"]),
        (lambda: ActivationConfig(dynamic=True, observer="mse"), ["'mse'", "dynamic activation"]),
        (
            lambda: ActivationConfig(dynamic=True, observer_args={"bins": 256}),
            ["{'bins': 256}", "dynamic activation"],
        ),
        (lambda: ActivationConfig(dynamic=True, symmetric=False), ["symmetric must be True except", "a dynamic one"]),
        (lambda: static_int8("per_token", symmetric=False), ["symmetric must be True except", "'per_token'"]),
        (lambda: static_int8(observer="entropy", symmetric=False), ["one of 'minmax', ", "got False", "'entropy'"]),
        (lambda: static_int8(symmetric=1), ["symmetric must be True or False, got 1"]),
        (lambda: ActivationConfig(dynamic=1), ["dynamic must be True or False, got 1"]),
        (lambda: static_int8(percentile=99.0), ["observer 'minmax'", "arguments must be 'margin', got 'percentile'"]),
        (
            lambda: static_int8(observer="percentile", percent=99.0),
            ["must be one of 'percentile', 'bins', got 'percent'"],
        ),
        (lambda: static_int8(observer="percentile", percentile=0), ["percentile must be a number in (0, 100], got 0"]),
        (lambda: static_int8(observer="percentile", percentile=float("nan")), ["percentile", "got nan"]),
        (lambda: static_int8(observer="percentile", percentile="99"), ["percentile", "got '99'"]),
        (lambda: static_int8(observer="mse", bins=257), ["bins must be an even number", "got 257"]),
        (lambda: static_int8(observer="entropy", bins=128), ["from 256", "got 128"]),
        (
            lambda: static_int8(observer="moving_average", averaging_constant=0.0),
            ["averaging_constant must be a number in (0, 1], got 0.0"],
        ),
        (lambda: WeightConfig(observer="entropy"), ["observer must be one of 'minmax', 'mse', got 'entropy'"]),
        (lambda: LinearConfig(output="never"), ["output must be one of 'consumer', 'always', got 'never'"]),
        (
            lambda: LinearConfig(activation="per_tensor"),
            ["activation must be of type ActivationConfig, got 'per_tensor'"],
        ),
        (lambda: LinearConfig(weight=None), ["weight must be of type WeightConfig, got None"]),
        (lambda: LinearConfig(ActivationConfig(dynamic=True), output="always"), ["'always'", "'consumer'"]),
        (
            lambda: LinearConfig.from_dict({"wieght": {}}),
            ["fields must be one of 'activation', 'weight', 'output', got 'wieght'"],
        ),
        (lambda: LinearConfig.from_dict({"activation": {"bits": 8}}), ["'bits'", "granularity"]),
        (lambda: LinearConfig.from_dict([]), ["[]", "to_dict"]),
    ],
)
def test_refused(make, words):
    with pytest.raises(UnsupportedError) as error:
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q: q.set_global("int8"), ["set_global", "'int8'", "LinearConfig"]),
        (lambda q: q.set_module_name("", None), ["set_module_name", "''"]),
        (lambda q: q.set_module_name(3, None), ["set_module_name", "3"]),
        (lambda q: q.set_module_type("Linear", None), ["set_module_type", "'Linear'"]),
        (lambda q: q.set_filter("head", None), ["set_filter", "'head'"]),
    ],
)
def test_rules_refused(call, words):
    with pytest.raises(UnsupportedError) as error:
        call(QFrameworkQuantizer())
    for word in words:
        assert word in str(error.value)
