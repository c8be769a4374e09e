"""page_write: new keys and values into cache pages, in place."""

from pallas_kernels.op import Op
from pallas_kernels.page_write import reference

page_write = Op(reference.page_write)
