"""A topology becomes a mesh in the chips' order; one that does not fit is refused with the nearest that do."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding.mesh import AXES, Misfit, ModelSizes, Topology, placed
from sharding.params import Param
from sharding.rules import expert_axes, only, param_shardings, spec
from tests.pallas_kernels.conftest import tpu_compiler  # noqa: F401

LLAMA = ModelSizes("llama", heads=32, kv_heads=8, ffn=14336, vocab=128256)
SMALL = ModelSizes("small", heads=9, kv_heads=3, ffn=1536, vocab=49152)
MIXTRAL = ModelSizes("mixtral", heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8)
DEEPSEEK = ModelSizes("deepseek", 128, 128, 18432, 129280, experts=256, latent=True)


@pytest.mark.parametrize(
    "topology, model, shape",
    [
        (Topology(tensor=8), LLAMA, {"tensor": 8}),
        (Topology(data=2, tensor=4), LLAMA, {"data": 2, "tensor": 4}),
        (Topology(data=2, context=2, tensor=2), LLAMA, {"data": 2, "context": 2, "tensor": 2}),
        (Topology(tensor=8), ModelSizes("few", 32, 2, 512, 512), {"tensor": 2, "copy": 4}),
        (Topology(expert=8), DEEPSEEK, {"expert": 8}),
        (Topology(expert=4, tensor=2), DEEPSEEK, {"expert": 4, "copy": 2}),
        (Topology(expert=1, tensor=8), MIXTRAL, {"expert": 1, "tensor": 8}),
        (Topology(stage=2, tensor=4), replace(LLAMA, layers=32), {"stage": 2, "tensor": 4}),
        (Topology(), LLAMA, {}),
    ],
)
def test_axes_of_one_device_are_left_out_and_spare_kv_heads_are_copied(topology, model, shape):
    mesh = topology.mesh(model)
    assert dict(mesh.shape) == shape
    assert set(mesh.axis_types) <= {AxisType.Auto}
    assert len({device.id for device in mesh.devices.flat}) == topology.devices


@pytest.mark.parametrize(
    "topology, model, words",
    [
        (Topology(tensor=2), SMALL, ["2 does not divide its 9 heads", "(tensor=3)", "(data=2)"]),
        (Topology(tensor=16), LLAMA, ["needs 16 devices", "there are 8", "(tensor=8)"]),
        (
            Topology(tensor=4),
            ModelSizes("odd", 12, 6, 768, 768),
            ["neither divides its 6 kv heads", "(tensor=6)"],
        ),
        (Topology(tensor=8), ModelSizes("gpt2", 16, 8, 512, 50257), ["vocabulary of 50257", "(data=8)"]),
        (Topology(tensor=4), ModelSizes("odd", 4, 4, 90, 512), ["feed-forward size of 90", "(tensor=2)"]),
        (Topology(expert=3), MIXTRAL, ["divides its 8 experts", "expert=4"]),
        (Topology(expert=2), LLAMA, ["no experts", "(data=2)"]),
        (
            Topology(stage=4),
            replace(SMALL, layers=30),
            ["4 does not divide its 30 layers", "2 or 3", "(stage=5)"],
        ),
        (Topology(stage=2), SMALL, ["2 does not divide its 1 layers", "(data=2)"]),
    ],
)
def test_a_topology_that_does_not_fit_is_refused_with_some_that_do(topology, model, words):
    with pytest.raises(Misfit) as refusal:
        topology.mesh(model)
    assert [word for word in words if word not in str(refusal.value)] == []
    for near in topology.nearest(model):
        near.check(model)


def test_a_topology_without_devices_is_refused():
    with pytest.raises(Misfit, match="tensor=0"):
        Topology(tensor=0)


def host_device(i: int, host: int) -> SimpleNamespace:
    return SimpleNamespace(id=i, process_index=host, device_kind="cpu", platform="cpu")


def test_hosts_are_outside_and_tensor_parallel_devices_on_one_host():
    devices = [host_device(i, i % 2) for i in range(8)]
    sizes = dict.fromkeys(AXES, 1) | {"data": 4, "tensor": 2}
    hosts = np.vectorize(lambda device: device.process_index)(placed(sizes, devices).reshape(4, 2))
    assert (hosts == hosts[:, :1]).all() and hosts[:, 0].tolist() == [0, 0, 1, 1]
    staged = np.vectorize(lambda device: device.process_index)(
        placed(sizes | {"stage": 2, "data": 2}, devices)
    )
    assert staged[0].max() < staged[1].min(), "stages are apart before anything else is"
    with pytest.raises(Misfit, match="2 hosts or slices with 4 devices each"):
        placed(sizes | {"data": 1, "tensor": 8}, devices)


def test_neighbours_of_a_tensor_axis_are_wired_to_each_other(tpu_compiler):  # noqa: F811
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    grid = Topology(data=4, tensor=4).mesh(LLAMA, devices).devices
    assert sorted(device.id for device in grid.flat) == sorted(device.id for device in devices)
    for row in grid:
        near = [max(abs(a.coords[i] - b.coords[i]) for i in range(3)) for a, b in pairwise(row)]
        assert max(near) == 1, [device.coords for device in row]


def test_every_weight_is_divided_by_what_its_axes_mean():
    mesh = Topology(tensor=8).mesh(ModelSizes("few", 32, 2, 512, 512))
    params = {
        "q": Param((256, 64), ("heads", None), "q"),
        "k": Param((16, 64), ("kv_heads", None), "k"),
        "down": Param((3, 64, 512), (None, None, "ffn"), ("a", "b", "c")),
        "norm": Param((64,), (None,), "norm"),
    }
    specs = {name: sharding.spec for name, sharding in param_shardings(mesh, params).items()}
    both = ("tensor", "copy")
    assert specs == {"q": P(both, None), "k": P("tensor", None), "down": P(None, None, both), "norm": P(None)}


@pytest.mark.parametrize(
    "topology, expected",
    [
        (Topology(tensor=8), P(None, "tensor", None)),  # every expert is divided
        (Topology(expert=1, tensor=8), P("tensor", None, None)),  # experts are, as wholes
        (Topology(expert=4, tensor=2), P(("expert", "tensor"), None, None)),
        (Topology(data=2, expert=2, tensor=2), P(("expert", "tensor"), None, None)),
        (Topology(expert=8), P("expert", None, None)),
    ],
)
def test_experts_are_divided_as_wholes_or_inside(topology, expected):
    mesh = topology.mesh(MIXTRAL)
    assert spec(mesh, (8, 14336, 4096), ("experts", "ffn", None)) == expected
    assert expert_axes(mesh, 8) == (
        expected[0] or () if isinstance(expected[0] or (), tuple) else (expected[0],)
    )


def test_fewer_experts_than_devices_are_divided_inside_as_well():
    few = ModelSizes("few", 8, 8, 512, 512, experts=4)
    mesh = Topology(expert=4, tensor=2).mesh(few)
    assert spec(mesh, (4, 512, 64), ("experts", "ffn", None)) == P("expert", "tensor", None)
    assert only(P("expert", ("tensor", "copy"), None), ("expert",)) == P("expert")
    assert jax.devices()[0] in mesh.devices
