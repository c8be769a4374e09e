"""ring_attention: sequences too long for one device, with keys that go round while queries stay."""

from pallas_kernels.op import Kernel, Op
from pallas_kernels.ring_attention import reference, tpu
from pallas_kernels.ring_attention.layout import zigzag as zigzag

ring_attention = Op(reference.ring_attention, tpu=Kernel("tpu", tpu.ring_attention))
