"""Compiled steps in a folder: `jaxserve plan --save-compiled` makes them for chips not here, a start loads them.

A step is found by all that its machine code depends on: the lowered program, with its shapes and mesh, and the versions
of what compiled it. Another model, cache size or version finds nothing, and compiles.
"""

import hashlib
import importlib.metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable

COMPILERS = ("jaxserve", "jax", "jaxlib", "libtpu")  # packages of which another version makes other programs


def save_step(folder: Path, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Path:
    """Write a step; its file."""
    payload, _, _ = serialize_executable.serialize(compiled)
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, lowered)
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(payload)
    unfinished.rename(file)
    return file


def load_step(
    folder: Path, lowered: jax.stages.Lowered, devices: list[jax.Device]
) -> jax.stages.Compiled | None:
    """The step that was saved, on these devices in the order of its mesh; None if it was not.

    The file is code: what it does is trusted.
    """
    file = _file(folder, lowered)
    if not file.is_file():
        return None
    arguments = jax.tree.structure(lowered.args_info)
    return serialize_executable.deserialize_and_load(
        file.read_bytes(), arguments, lowered.out_tree, devices[0].client, devices
    )


def _file(folder: Path, lowered: jax.stages.Lowered) -> Path:
    digest = hashlib.sha256(lowered.as_text().encode())
    versions = {d.name: d.version for d in importlib.metadata.distributions() if d.name in COMPILERS}
    digest.update(repr(sorted(versions.items())).encode())
    return folder / f"{digest.hexdigest()[:32]}.jaxexec"
