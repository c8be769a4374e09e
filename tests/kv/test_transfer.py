"""Over every link, what is fetched is what was offered; what cannot be had is an error in bounded time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv.transfer import ByteLink, DirectLink, JaxLink, TransferError

ARRAYS = [jnp.arange(48, dtype=jnp.float32).reshape(4, 12), jnp.ones((3, 5), jnp.bfloat16)]
SHAPES = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in ARRAYS]


def direct(host: str) -> DirectLink:
    return DirectLink()


@pytest.fixture(params=[JaxLink, ByteLink, direct])
def link(request):
    made = request.param("127.0.0.1")
    yield made
    made.close()


def test_what_is_fetched_is_what_was_offered(link):
    tickets = [link.offer(ARRAYS), link.offer(ARRAYS[::-1])]
    for ticket, shapes, arrays in ((tickets[1], SHAPES[::-1], ARRAYS[::-1]), (tickets[0], SHAPES, ARRAYS)):
        for got, sent in zip(link.fetch(link.address, ticket, shapes, 20), arrays, strict=True):
            assert got.dtype == sent.dtype
            np.testing.assert_array_equal(got, sent)
        link.forget(ticket)


def test_what_was_withdrawn_is_not_to_be_had(link):
    ticket = link.offer(ARRAYS)
    link.withdraw(ticket)
    with pytest.raises(TransferError):
        link.fetch(link.address, ticket, SHAPES, 0.3)


@pytest.mark.parametrize("make", [JaxLink, ByteLink])
def test_nobody_there_is_an_error(make):
    link = make("127.0.0.1")
    with pytest.raises(TransferError):
        link.fetch("127.0.0.1:1", 5, SHAPES, 0.3)
    link.close()


def test_other_sizes_than_announced_are_an_error():
    link = ByteLink("127.0.0.1")
    with pytest.raises(TransferError, match="bytes for this ticket"):
        link.fetch(link.address, link.offer(ARRAYS), SHAPES[:1], 20)
    link.close()
