"""paged_attention: grouped-query attention of any mix of new tokens over a paged cache."""

from pallas_kernels.op import Kernel, Op
from pallas_kernels.paged_attention import gpu, reference, tpu

paged_attention = Op(
    reference.paged_attention,
    tpu=Kernel("tpu", tpu.paged_attention),
    gpu=Kernel("gpu", gpu.paged_attention),
)
