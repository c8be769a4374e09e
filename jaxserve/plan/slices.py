"""TPU slices that are not here: their devices, as the compiler knows them."""

import importlib.util
import os
import re
from typing import Any

from jax.experimental import topologies

from jaxserve.errors import ConfigError
from pallas_kernels.chip import CHIPS, Chip

NO_CHIP = {  # what the compiler asks for where there is no TPU to ask
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
NAME = re.compile(r"(\w+):(\d+(?:x\d+){1,2})")


def slice_of(name: str) -> tuple[Chip, list[Any]]:
    """(the chip, the devices) of a slice such as v5e:2x4 or tpu7x:2x2x1; ConfigError if there is no such slice."""
    match = NAME.fullmatch(name)
    if not match or match[1] not in CHIPS:
        raise ConfigError(
            f"topology {name!r} is not CHIP:AxB or CHIP:AxBxC with a chip of {', '.join(CHIPS)}, for example v5p:4x4x4"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("planning needs the TPU compiler: pip install 'jaxserve[tpu]' (no TPU is needed)")
    for variable, value in NO_CHIP.items():
        os.environ.setdefault(variable, value)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as why:  # many kinds, all of the compiler's own
        raise ConfigError(f"the compiler knows no slice {name}: {str(why).splitlines()[0]}") from why
    return CHIPS[match[1]], list(devices)
