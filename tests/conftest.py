"""What every test runs under: eight CPU devices, strict dtypes and ranks, checked shapes; the support table.

A test that shows a capability carries a row of the support table (README, docs/support.md):

    @pytest.mark.supports("models", "llama")                        # area, name
    pytest.param("qwen3", marks=pytest.mark.supports("models", "qwen3"))

A row is written as working when every test that carries it passed (`make docs`).
"""

import gc
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
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return str(shared / "xla")


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Forget compiled programs before they are too many: each is a hundred mappings, and Linux allows 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 5_000:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser):
    parser.addoption(
        "--support-report", metavar="FILE", help="write the outcome of every supports() row as JSON"
    )


def pytest_configure(config):
    path = config.getoption("--support-report")
    if path and not hasattr(config, "workerinput"):  # who hears of all tests, not who runs some
        config.pluginmanager.register(SupportReport(Path(path)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties += [("supports", mark.args) for mark in item.iter_markers("supports")]
    return report


class SupportReport:
    """Gathers what became of each row's tests, and writes it when the run ends."""

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: dict[tuple[str, str], set[str]] = {}

    def pytest_runtest_logreport(self, report):
        for name, row in report.user_properties:
            if name == "supports" and (report.when == "call" or report.outcome != "passed"):
                self._outcomes.setdefault(tuple(row), set()).add(report.outcome)

    def pytest_sessionfinish(self):
        rows = [
            {"area": area, "name": name, "works": outcomes == {"passed"}}
            for (area, name), outcomes in self._outcomes.items()
        ]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(rows, indent=1))
