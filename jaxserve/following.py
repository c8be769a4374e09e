"""One engine on several processes: the first plans every step and tells the others, which run the same steps."""

import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields

import jax
import numpy as np

from jaxserve.batch import Row
from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runner import DeviceRunner, Pending, Told
from jaxserve.sampling.admission import Admission
from sharding.hosts import Follower, Leader, Lost, join

log = logging.getLogger(__name__)
OWN = ("node_rank", "tokenizer", "compilation_cache_dir")  # settings that a process may have to itself
JOIN_TIMEOUT = 300.0  # seconds that processes wait for each other at the start
STOP, LAUNCH, ADMIT = 1, 2, 3


def assemble(config: EngineConfig) -> Leader | Follower | None:
    """Meet the engine's other processes, so that JAX has the devices of all; None if there are none."""
    if config.nnodes == 1:
        return None
    address, port, rank = config.master_addr, config.master_port, config.node_rank
    terms = {name: value for name, value in asdict(config).items() if name not in OWN}
    terms |= {name: importlib.metadata.version(name) for name in ("jaxserve", "jax", "jaxlib")}
    try:
        if rank:
            crew = Follower(address, port + 1, rank, terms, JOIN_TIMEOUT)
        else:
            crew = Leader(address, port + 1, config.nnodes - 1, terms, JOIN_TIMEOUT)
    except (Lost, OSError) as why:
        raise ConfigError(f"the engine's {config.nnodes} processes did not come together: {why}") from why
    join(address, port, config.nnodes, rank, JOIN_TIMEOUT)
    log.info("process %d of %d has joined, with %d devices", rank, config.nnodes, jax.local_device_count())
    return crew


class LeadingRunner:
    """A runner that has the followers do what it does."""

    def __init__(self, runner: DeviceRunner, leader: Leader):
        self._runner, self._leader = runner, leader

    def launch(self, rows: Sequence[Row], told: Told = lambda group: None) -> Pending:
        """See `DeviceRunner.launch`."""
        bucket, flat = self._runner.packed(rows)
        self._leader.send(LAUNCH, np.array(astuple(bucket), np.int32).tobytes(), flat.tobytes())
        return self._runner.pending(rows, bucket, self._runner.run(bucket, flat, told))

    def admit(self, slot: int, admission: Admission, group: int = 0) -> None:
        """See `DeviceRunner.admit`."""
        slot = self._runner.slot(slot, group)
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(admission)]
        self._leader.send(ADMIT, np.int32(slot).tobytes(), *leaves)
        self._runner.fill(slot, admission)

    def close(self) -> None:
        """The followers end, too."""
        self._leader.stop(STOP)
        self._runner.close()


def follow(runner: DeviceRunner, follower: Follower, blank: Admission) -> None:
    """Do as the leader says until it says stop; `blank` shows the form of an admission."""
    for kind, body in follower.frames():
        if kind == STOP:
            break
        if kind == LAUNCH:
            numbers, sizes = np.frombuffer(body, np.int32), len(fields(Bucket))
            runner.run(Bucket(*numbers[:sizes].tolist()), numbers[sizes:])
        else:
            runner.fill(int(np.frombuffer(body[:4], np.int32)[0]), _admission(body[4:], blank))
    jax.block_until_ready(runner.state)  # who ends within a step takes the others' part of it along
    runner.close()
    follower.close()


def _admission(body: bytes, blank: Admission) -> Admission:
    leaves, tree = jax.tree.flatten(blank)
    at, arrays = 0, []
    for leaf in map(np.asarray, leaves):
        arrays.append(np.frombuffer(body[at : at + leaf.nbytes], leaf.dtype).reshape(leaf.shape))
        at += leaf.nbytes
    return jax.tree.unflatten(tree, arrays)
