"""mla_attention: absorbed multi-head latent attention of any mix of new tokens over a paged latent cache."""

from pallas_kernels.mla_attention import gpu, reference, tpu
from pallas_kernels.op import Kernel, Op

mla_attention = Op(
    reference.mla_attention, tpu=Kernel("tpu", tpu.mla_attention), gpu=Kernel("gpu", gpu.mla_attention)
)
