"""paged_attention: grouped-query attention of any mix of new tokens over a paged cache."""

from pallas_kernels.op import Op
from pallas_kernels.paged_attention import reference

paged_attention = Op(reference.paged_attention)
