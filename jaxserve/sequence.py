"""A sequence on its way through the engine: its tokens, and how far they are computed."""

from dataclasses import dataclass, field

from kv import Lease


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of one request.

    A sequence owes the tokens that it has but are not computed yet: a new prompt owes all of itself, a
    decoding sequence the one token that it sampled last.
    """

    request_id: str
    tokens: list[int]  # prompt and read samples; only grows
    max_len: int  # tokens at which it is finished: prompt plus the most that may be sampled
    index: int = 0  # which of the request's choices
    priority: int = 0  # lower is served first
    salt: str = ""  # cached prefixes are shared only under the same salt
    skip_prefix: bool = False  # compute the whole prompt even if it is cached
    leader: "Sequence | None" = None  # waits until this one's prompt is cached, to share it
    prompt_len: int = -1  # by default all of `tokens`
    arrival: int = -1  # order of arrival, given by the scheduler
    computed: int = 0  # tokens whose keys and values are in the cache once the launched steps have run
    in_flight: int = 0  # samples of launched steps, not read yet
    checked: int = 0  # tokens whose step was read and found in order; only these may be shared
    group: int = 0  # of devices: where its pages and its slot are
    slot: int | None = None  # row of the per-sequence state on the device, while running
    lease: Lease | None = None  # while running
    num_cached: int | None = None  # prompt tokens found in the prefix cache, once it was admitted
    done: bool = False
    keys: list[bytes] = field(default_factory=list, repr=False)  # names of its full pages, as far as hashed

    def __post_init__(self):
        if self.prompt_len < 0:
            self.prompt_len = len(self.tokens)
        assert 0 < self.prompt_len < self.max_len, "a prompt is not empty and leaves room for one token"

    @property
    def length(self) -> int:
        """Tokens, the unread samples included."""
        return len(self.tokens) + self.in_flight

    @property
    def owed(self) -> int:
        """Tokens to compute before the next one can be sampled; none when the last one is sampled already."""
        length = len(self.tokens) + self.in_flight
        return length - self.computed if length < self.max_len else 0
