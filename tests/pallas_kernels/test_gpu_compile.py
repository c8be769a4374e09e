"""Every GPU kernel and case compiles to machine code for GPUs that are not here, its loops without spills."""

import os
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chip import GPUS, Gpu
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.page_write import page_write
from pallas_kernels.paged_attention import cases as paged_cases
from pallas_kernels.paged_attention import paged_attention
from tests.pallas_kernels.every_op import by_format, every_op
from tests.pallas_kernels.ptx import compiled, kernels_in, lowered

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

ARCHITECTURES = (GPUS["h200"], GPUS["b200"])
# Where results go, kept through the loop and out of its way; two registers of the loop itself (cuobjdump, sm_90).
SPILLED = {mla_attention: 256, paged_attention: 8}  # bytes of a thread


def every_kernel():
    """The cases of an op and format for the two architectures in turn; one that is alone for both."""
    for op, known in every_op("gpu"):
        for format, named in by_format(known.REAL).items():
            named = [(name, case) for name, case in named if not hasattr(case, "over")]
            for i, (name, case) in enumerate(named):
                for gpu in ARCHITECTURES if len(named) == 1 else [ARCHITECTURES[i % 2]]:
                    row = pytest.mark.supports(
                        "GPU kernels, compiled", f"{op.name} {format} sm_{gpu.capability}"
                    )
                    yield pytest.param(op, case, gpu, id=f"{op.name}-{name}-{gpu.name}", marks=row)


@pytest.fixture(scope="module")
def ptx_compiler():
    """Skips without triton, but not in CI."""
    if find_spec("triton") is None:
        assert "CI" not in os.environ, "triton is not installed: make test puts it into .triton"
        pytest.skip("triton is not installed: make test puts it into .triton")


@pytest.mark.compile
@pytest.mark.parametrize("op, case, gpu", list(every_kernel()))
def test_kernel_compiles_for_gpus_that_are_not_here(ptx_compiler, op, case, gpu: Gpu):
    """Within the shared memory and the registers, with tensor cores wherever there is a product."""
    args, kwargs = case.shapes(jnp.bfloat16)
    arrays = {name: x for name, x in kwargs.items() if hasattr(x, "shape")}
    kwargs = {name: x for name, x in kwargs.items() if name not in arrays}
    donated = 0 if op is page_write else ()
    low = lowered(lambda *a, **k: op.using("gpu")(*a, **k, **kwargs), gpu, args, arrays, donated)
    kernels = kernels_in(low)
    assert len(kernels) == 1
    program = compiled(kernels[0], gpu)
    assert program.shared <= gpu.shared_bytes
    assert program.spilled <= SPILLED.get(op, 0)
    assert program.tensor_cores or op is page_write
    if op is page_write:
        pages = len(jax.tree.leaves(args[0]))
        text = low.as_text()
        assert text.count("output_operand_alias<") == text.count("tf.aliasing_output") == pages


def test_the_op_takes_the_kernel_of_the_platform_and_the_definition_where_it_is_refused():
    for heads, kernels in (((4, 2, 64), 1), ((4, 2, 72), 0)):
        args, kwargs = paged_cases.Case(heads, (1, 1), (40, 9)).shapes(jnp.bfloat16)
        low = lowered(lambda *a, kwargs=kwargs: paged_attention(*a, **kwargs), GPUS["h100"], args)
        assert len(kernels_in(low)) == kernels
