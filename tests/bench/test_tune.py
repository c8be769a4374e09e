"""The search for block sizes finds what is cheapest nearby, prices nothing twice, and keeps its finds readable."""

import json

import pytest
from jax.experimental.pallas import tpu as pltpu

from bench import tune
from pallas_kernels import tuning
from pallas_kernels.chip import CHIPS
from pallas_kernels.page_write.cases import TINY

SPACE = {"rows": (1, 2, 4, 8), "keys": (16, 32, 64)}


@pytest.mark.parametrize("rows, keys", [(1, 16), (8, 64), (4, 32)])
def test_the_search_walks_to_the_cheapest(rows, keys):
    asked = []

    def price(blocks):
        asked.append(tuple(blocks.values()))
        return abs(blocks["rows"] - rows) + abs(blocks["keys"] - keys)

    blocks, cost = tune.search(SPACE, price)
    assert (blocks, cost) == ({"rows": rows, "keys": keys}, 0)
    assert len(set(asked)) == len(asked) < 12


def test_blocks_that_do_not_fit_are_passed_over():
    blocks, cost = tune.search(SPACE, lambda b: float("inf") if b["rows"] > 2 else 9.0 - b["rows"])
    assert blocks["rows"] == 2 and cost == 7.0


def test_finds_replace_those_of_the_same_shape_and_are_found_again(tmp_path, monkeypatch):
    key, other = {"rows": 8, "keys": 64}, {"rows": 8, "keys": 4096}
    for blocks in ({"rows": 1}, {"rows": 2}):
        tune.write("some_op", "v5e", key, blocks, tmp_path)
    tune.write("some_op", "v5e", other, {"rows": 3}, tmp_path)
    lines = (tmp_path / "v5e.json").read_text().splitlines()
    assert sum('"key"' in line for line in lines) == 2
    assert json.loads("\n".join(lines))["some_op"][0] == {"key": key, "blocks": {"rows": 2}}
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning._tuned.cache_clear()
    try:
        assert tuning.nearest("some_op", CHIPS["v5e"], key) == {"rows": 2}
        assert tuning.nearest("some_op", CHIPS["v5e"], other) == {"rows": 3}
    finally:
        tuning._tuned.cache_clear()


@pytest.mark.parametrize(
    "op, case, keys",
    [
        (
            "paged_attention",
            "llama-70b prefill",
            {"rows", "context", "heads", "kv_heads", "width", "row_bytes"},
        ),
        ("paged_attention", "gpt-oss decode", {"rows", "context", "heads", "kv_heads", "width", "row_bytes"}),
        ("ring_attention", "llama-70b, 8 x 8192", {"tokens", "keys", "heads", "width"}),
    ],
)
def test_finds_are_filed_under_what_the_kernel_looks_up(op, case, keys):
    assert [set(key) for key in tune.keys_of(op, case)] == [keys]


@pytest.mark.parametrize("chip", list(CHIPS))
def test_every_table_names_sizes_that_its_kernel_has(chip):
    for op, entries in tuning._tuned(chip).items():
        assert all(entry["blocks"].keys() == tune.SPACES[op].keys() for entry in entries)


def test_the_clock_times_the_kernel_itself(monkeypatch):
    monkeypatch.setattr(tune, "known_case", lambda *_: TINY["decode"])
    monkeypatch.setattr(tune, "REPEATS", 1)
    with pltpu.force_tpu_interpret_mode():
        assert tune.clock("page_write", "", None) > 0
