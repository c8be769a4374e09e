"""Settings of a worker's role are refused at once where nothing can come of them."""

from dataclasses import replace

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from server.clients.start import beside
from server.config import ServerConfig
from server.roles import RoleConfig, is_address
from server.serve import run


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kv_layer_groups": 7}, "kv_layer_groups: no effect without a role"),
        ({"split_min_tokens": 5, "kv_transfer": "tcp"}, "split_min_tokens, kv_transfer: no effect"),
        ({"role": "prefill", "prefill_devices": 2}, "needs role=decode"),
        ({"role": "decode", "prefill_devices": -3}, "prefill_devices=-3 must be at least 0"),
        ({"role": "decode", "prefill_url": ("http://localhost:99999",)}, "no address"),
        ({"role": "decode", "kv_layer_groups": 0}, "must be at least 1"),
    ],
)
def test_settings_without_effect_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        RoleConfig(**settings)


def test_what_is_an_address():
    for url in ("http://a", "https://a:80/prefix", "http://[::1]:8100"):
        assert is_address(url), url
    for url in (
        "a:80",
        "file:///x",
        "http://",
        "http://[::",
        "http://a:99999",
        "http://u:p@a",
        "http://a?q",
        "http://é",
    ):
        assert not is_address(url), url


def test_devices_for_prompts_come_after_the_model_s_and_must_be_there():
    roles = RoleConfig("decode", prefill_devices=2)
    decoding = EngineConfig(
        "m", tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True, enable_eplb=True
    )
    config = beside(decoding, roles)
    assert (config.first_device, config.tensor_parallel_size, config.data_parallel_size) == (4, 2, 1)
    assert not config.enable_eplb
    assert (
        beside(EngineConfig("m", tensor_parallel_size=2, prefill_context_parallel_size=2), roles).first_device
        == 4
    )
    there = len(jax.local_devices())
    with pytest.raises(
        ConfigError, match=f"prefill_devices=99 are not here: of {there} devices the model itself takes 4"
    ):
        beside(decoding, replace(roles, prefill_devices=99))


def test_stages_have_no_role():
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: stages hand no pages over"):
        run(EngineConfig("m", pipeline_parallel_size=2), ServerConfig(), RoleConfig("both"))
