"""Rotary frequencies against the formulas of the papers, written anew; rotation against complex numbers."""

import cmath
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import Rope, RopeSettings, reach, rope, rotate, rotations

DIM, THETA, MAX = 16, 10000.0, 4096


def settings(max_positions: int = MAX, dim: int = DIM, theta: float = THETA, **values: Any) -> RopeSettings:
    return RopeSettings(values, theta, dim, max_positions, "tiny")


def plain(i: int, theta: float = THETA) -> float:
    return 1 / theta ** (2 * i / DIM)


def assert_frequencies(made: Rope, expected: list[float], magnitude: float = 1.0):
    np.testing.assert_allclose(made.frequencies, expected, rtol=1e-12)
    assert made.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.supports("rope", "default")
def test_plain():
    assert_frequencies(rope(settings(), MAX), [plain(i) for i in range(8)])


@pytest.mark.supports("rope", "linear")
def test_linear_divides_positions():
    assert_frequencies(rope(settings(type="linear", factor=4), MAX), [plain(i) / 4 for i in range(8)])


@pytest.mark.supports("rope", "dynamic")
def test_dynamic_grows_the_base_with_the_length_served():
    made = settings(rope_type="dynamic", factor=2.0)
    for length in (100, MAX):
        assert_frequencies(rope(made, length), [plain(i) for i in range(8)])
    base = THETA * (2.0 * 8192 / MAX - 1.0) ** (DIM / (DIM - 2))
    assert_frequencies(rope(made, 8192), [plain(i, base) for i in range(8)])


def yarn_pair(
    i: int, factor: float, native: int, fast: float = 32, slow: float = 1, truncate: bool = True
) -> float:
    """By turns r of the pair within the native length: the ramp of the paper, laid over pair numbers as released."""

    def pair(turns):
        return DIM / 2 * math.log(native / (2 * math.pi * turns)) / math.log(THETA)

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    if i <= low:
        kept = 1.0
    elif i >= high:
        kept = 0.0
    else:
        kept = (high - i) / (high - low)
    return kept * plain(i) + (1 - kept) * plain(i) / factor


@pytest.mark.supports("rope", "yarn")
@pytest.mark.parametrize(
    "extra, pair, magnitude",
    [
        ({}, {}, 0.1 * math.log(8) + 1),
        ({"truncate": False}, {"truncate": False}, 0.1 * math.log(8) + 1),
        ({"beta_fast": 8, "beta_slow": 2}, {"fast": 8, "slow": 2}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.5}, {}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, {}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.4}, {}, (0.07 * math.log(8) + 1) / (0.14 * math.log(8) + 1)),
        ({"mscale": 0.7, "mscale_all_dim": 0}, {}, 0.1 * math.log(8) + 1),
    ],
)
def test_yarn(extra, pair, magnitude):
    made = rope(settings(rope_type="yarn", factor=8.0, original_max_position_embeddings=512, **extra), MAX)
    assert_frequencies(made, [yarn_pair(i, 8, 512, **pair) for i in range(8)], magnitude)


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    made = rope(settings(rope_type="yarn", factor=None, original_max_position_embeddings=512), MAX)
    assert_frequencies(made, [yarn_pair(i, 8, 512) for i in range(8)], 0.1 * math.log(8) + 1)


def test_yarn_with_one_beta_is_a_step():
    values = {"factor": 8.0, "beta_fast": 1, "beta_slow": 1, "original_max_position_embeddings": 512}
    made = rope(settings(rope_type="yarn", **values), MAX)
    ratios = [f / plain(i) for i, f in enumerate(made.frequencies)]
    assert ratios[:4] == pytest.approx([1.0] * 4) and ratios[4:] == pytest.approx([1 / 8] * 4)


@pytest.mark.supports("rope", "llama3")
def test_llama3_by_wavelength():
    native, factor, low, high = 1024, 8.0, 1.0, 4.0

    def pair(i):
        wavelength = 2 * math.pi / plain(i)
        if wavelength < native / high:
            return plain(i)
        if wavelength > native / low:
            return plain(i) / factor
        smooth = (native / wavelength - low) / (high - low)
        return (1 - smooth) * plain(i) / factor + smooth * plain(i)

    values = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    made = rope(settings(rope_type="llama3", original_max_position_embeddings=native, **values), MAX)
    expected = [pair(i) for i in range(8)]
    assert sum(e not in (plain(i), plain(i) / factor) for i, e in enumerate(expected)) > 0, (
        "no pair is in between"
    )
    assert_frequencies(made, expected)


@pytest.mark.supports("rope", "longrope")
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_takes_the_factors_of_the_length_served(kind):
    short, long = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
    made = settings(type=kind, short_factor=short, long_factor=long, original_max_position_embeddings=1024)
    magnitude = math.sqrt(1 + math.log(4) / math.log(1024))
    assert_frequencies(rope(made, 1024), [plain(i) / short[i] for i in range(8)], magnitude)
    assert_frequencies(rope(made, 1025), [plain(i) / long[i] for i in range(8)], magnitude)
    given = RopeSettings(dict(made.values) | {"attention_factor": 1.25}, THETA, DIM, MAX, "tiny")
    assert rope(given, MAX).magnitude == 1.25


@pytest.mark.parametrize(
    "values, problem",
    [
        ({"rope_type": "proportional"}, "'proportional' is not supported; known are default, linear"),
        ({"rope_type": "mrope"}, "'mrope' is not supported"),
        ({"rope_type": "linear"}, "needs a positive number factor"),
        ({"rope_type": "linear", "factor": "4"}, "needs a positive number factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, "does not know mrope_section"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs a positive number low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "needs 8 numbers"),
    ],
)
def test_refusals_say_what_is_wrong(values, problem):
    with pytest.raises(ConfigError, match=problem):
        rope(settings(**values), MAX)


@pytest.mark.parametrize(
    "values, served, limit",
    [
        ({}, 4096, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 4096, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 8192),
    ],
)
def test_reach(values, served, limit):
    assert reach(settings(**values)) == (served, limit)


def test_rotation_multiplies_by_unit_complex_numbers():
    rng = np.random.default_rng(0)
    made = (rope(settings(dim=6), MAX), Rope((0.5, 0.25, 0.125), magnitude=1.5))
    positions, x = jnp.asarray([0, 7, 4000]), rng.standard_normal((3, 2, 8)).astype(np.float32)
    turns = rotations(made, positions)
    for r, turning in enumerate(made):
        got = np.asarray(rotate(jnp.asarray(x), turns[r]))
        for t, position in enumerate(positions):
            for i, frequency in enumerate(turning.frequencies):
                pair = x[t, :, i] + 1j * x[t, :, i + 3]
                expected = pair * cmath.exp(1j * float(position) * frequency) * turning.magnitude
                np.testing.assert_allclose(
                    got[t, :, i] + 1j * got[t, :, i + 3], expected, atol=2e-3 if t == 2 else 1e-5
                )
        np.testing.assert_array_equal(got[..., 6:], x[..., 6:])


def test_far_positions_keep_float32_accuracy():
    """XLA's own sine must reduce large angles properly."""
    made, position = rope(settings(), MAX), 131071
    cos, sin = np.asarray(rotations((made,), jnp.asarray([position])))[0, :, 0]
    angles = np.float32(position) * np.asarray(made.frequencies, np.float32)
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)), atol=1e-6)
