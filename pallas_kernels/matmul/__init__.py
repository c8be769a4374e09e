"""matmul: rows times a matrix in any format that checkpoints store."""

from pallas_kernels.matmul import gpu, reference, tpu
from pallas_kernels.op import Kernel, Op

matmul = Op(reference.matmul, tpu=Kernel("tpu", tpu.matmul), gpu=Kernel("gpu", gpu.matmul))
