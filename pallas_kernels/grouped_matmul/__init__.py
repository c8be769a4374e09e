"""grouped_matmul: every group of rows times a matrix of its own, as the experts of a mixture need."""

from pallas_kernels.grouped_matmul import gpu, reference, tpu
from pallas_kernels.op import Kernel, Op

grouped_matmul = Op(
    reference.grouped_matmul, tpu=Kernel("tpu", tpu.grouped_matmul), gpu=Kernel("gpu", gpu.grouped_matmul)
)
