"""page_write: new keys and values into cache pages, in place."""

from pallas_kernels.op import Kernel, Op
from pallas_kernels.page_write import gpu, reference, tpu

page_write = Op(reference.page_write, tpu=Kernel("tpu", tpu.page_write), gpu=Kernel("gpu", gpu.page_write))
