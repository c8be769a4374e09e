"""expert_exchange: rows to the devices that own their experts, and back, with the weighted sum at home."""

from pallas_kernels.expert_exchange import ragged, reference, tpu
from pallas_kernels.expert_exchange.reference import combine as combine
from pallas_kernels.op import Kernel, Op

expert_exchange = Op(
    reference.expert_exchange,
    tpu=Kernel("tpu", tpu.expert_exchange),
    tpu_ragged=Kernel("tpu", ragged.expert_exchange),
    gpu=Kernel("gpu", ragged.expert_exchange),
)
