"""What the parts of a decoder that not every decoder has are, in numbers."""

from dataclasses import dataclass

from jaxserve.layers.moe import Routing


@dataclass(frozen=True)
class Mixture:
    """A feed-forward made of experts, some of which a router chooses for each token."""

    routing: Routing
    ffn_size: int  # of one expert
    layers: tuple[bool, ...]  # per layer: whether its feed-forward is this; else it is dense
    shared_ffn_size: int = 0  # of the expert that all tokens go to; 0 for none
    names: str = "llama"  # how a checkpoint calls the weights, see `feed_forward`
    selection_bias: bool = False  # sways which experts are chosen
    biases: bool = False  # of the router and of the experts
    clamp: tuple[float, float] | None = None  # (limit, alpha) of gpt-oss' gate
    capacity: float | None = None  # rows a device takes over an even share, as a factor; None drops nothing
    fp8_dispatch: bool = False  # rows go to their experts in 8 bits
    slots: tuple[int, ...] = ()  # the expert in each place when loaded; () is one place each

    @property
    def slot_count(self) -> int:
        return len(self.slots) or self.routing.experts


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: what is kept of a token is `rank` numbers and one rotary key (arXiv:2405.04434)."""

    rank: int  # numbers from which keys and values of all heads are made
    query_rank: int | None  # the same for queries; None: queries are made from the hidden state
    nope_dim: int  # channels of a head's query and key without positions
    rope_dim: int  # and with; their key is the same for all heads
    value_dim: int
    interleaved: bool = True  # rope turns channels (2i, 2i + 1) rather than (i, i + rope_dim / 2)
    bias: bool = False  # of the projections down to the ranks, and of the output
    norm_eps: float = 1e-6
