"""Compiling for TPUs that are not here: libtpu's compiler needs no chip, only to be told not to look for one."""

import importlib.util
import os

import pytest

NO_CHIP = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def pytest_configure(config):
    config.addinivalue_line("markers", "compile: compiles for TPUs that are not here, some seconds each")


@pytest.fixture(scope="session")
def tpu_compiler():
    """Skips without libtpu; the environment that its compiler wants."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'jaxserve[tpu]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_CHIP.items():
            if name not in os.environ:
                patch.setenv(name, value)
        yield
