"""What every test runs under: eight CPU devices, strict dtypes and ranks, checked shapes; the support table.

A test that shows a capability carries a row of the support table (README, docs/support.md):

    @pytest.mark.supports("models", "llama")                        # area, name
    pytest.param("qwen3", marks=pytest.mark.supports("models", "qwen3"))

A row is written as working when every test that carries it passed (`make docs`).
"""

import json
import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

if not jax.config.jax_platforms:  # JAX_PLATFORMS=cuda runs tests/device on its device
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Array code only: elsewhere a wrong type is the user's, and must meet our own error, not the hook's.
install_import_hook(["pallas_kernels", "sharding", "jaxserve.layers", "jaxserve.models"], "beartype.beartype")

settings.register_profile("jaxserve", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("jaxserve")


@pytest.fixture(scope="session")
def compilation_cache_dir(tmp_path_factory) -> str:
    """A folder for compiled steps that the whole run shares, so that equal steps compile once."""
    return str(tmp_path_factory.mktemp("xla"))


def pytest_addoption(parser):
    parser.addoption(
        "--support-report", metavar="FILE", help="write the outcome of every supports() row as JSON"
    )


def pytest_configure(config):
    config.stash[_ROWS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    rows = item.config.stash[_ROWS]
    for mark in item.iter_markers("supports"):
        outcomes = rows.setdefault(mark.args, set())
        if report.when == "call" or report.outcome != "passed":
            outcomes.add(report.outcome)
    return report


def pytest_sessionfinish(session):
    path = session.config.getoption("--support-report")
    if not path:
        return
    rows = [
        {"area": area, "name": name, "works": outcomes == {"passed"}}
        for (area, name), outcomes in session.config.stash[_ROWS].items()
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(rows, indent=1))


_ROWS = pytest.StashKey[dict[tuple[str, str], set[str]]]()
