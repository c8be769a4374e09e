"""What a sender of a prompt says to its receiver, in the order in which it is said."""

from dataclasses import dataclass

from jaxserve.request import Delta


@dataclass(frozen=True)
class Granted:
    """The blocks that follow are kept under this lease."""

    id: str
    epoch: str
    seconds: float  # without a renewal


@dataclass(frozen=True)
class Block:
    """Rows of some tokens in some layers, ready to be fetched. Those of a layer come in the order of the tokens."""

    number: int  # from 0, in order
    layer: int  # the first one
    layers: int  # how many
    start: int  # the first token
    count: int  # tokens
    rows: int  # with the padding
    dtype: str
    pieces: int  # parts of each layer's rows, by head
    checksums: list[list[int]]  # of each layer's rows
    ticket: int


@dataclass(frozen=True)
class First:
    """The first token; all blocks have been announced."""

    delta: Delta


Message = Granted | Block | First


class HandoverFailed(Exception):
    """A prompt did not arrive from elsewhere; whoever wanted it computes it. `reason` is a word for the metrics."""

    def __init__(self, reason: str, message: str):
        self.reason = reason
        super().__init__(message)


class Incompatible(HandoverFailed):
    """Two workers that can never exchange pages."""

    def __init__(self, message: str):
        super().__init__("incompatible", message)
