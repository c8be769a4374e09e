"""The engine's settings: a value of the wrong kind is refused by name, before anything is loaded."""

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_num_seqs", "2"),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", None),
        ("block_size", True),
        ("gpu_memory_utilization", "0.5"),
        ("enable_prefix_caching", "no"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="m", **{name: value})


def test_an_integer_does_for_a_fraction():
    assert EngineConfig(model="m", gpu_memory_utilization=1).gpu_memory_utilization == 1
