"""The jitted sampling step as an engine runs it, small enough for tests, and plain references for it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.admission import admission
from jaxserve.sampling.knobs import needs_admit, pack_knobs, unpack_knobs
from jaxserve.sampling.params import SamplingParams
from jaxserve.sampling.sample import Sampled, sample
from jaxserve.sampling.state import admit, new_state

VOCAB = 512
SLOTS = 40


traced = []  # the shape of the logits, each time the step is traced


@partial(jax.jit, donate_argnums=2)
def step(logits, flat, state, slots, valid):
    traced.append(logits.shape)
    return sample(logits, unpack_knobs(flat, logits.shape[0]), state, slots, valid)


fill = jax.jit(admit, donate_argnums=0)


class Sampler:
    """Slots, and steps over some of them."""

    def __init__(self, vocab_size: int = VOCAB):
        self.vocab_size = vocab_size
        self.state = new_state(SLOTS, vocab_size)

    def admit(
        self, slot: int, params: SamplingParams, tokens=(), n_prompt=None, bad_words=(), eos=()
    ) -> None:
        if needs_admit(params):
            n_prompt = len(tokens) if n_prompt is None else n_prompt
            row = admission(params, tokens, n_prompt, self.vocab_size, bad_words, eos)
            self.state = fill(self.state, np.int32(slot), row)

    def step(self, logits, rows, slots=None, valid=None) -> Sampled:
        """One step over `rows` of (params, seed, n_out) or None; None rows are padding."""
        size = len(rows)
        slots = np.arange(size) if slots is None else np.asarray(slots)
        valid = np.array([row is not None for row in rows]) if valid is None else np.asarray(valid)
        logits = jnp.asarray(np.broadcast_to(logits, (size, self.vocab_size)), jnp.float32)
        flat = pack_knobs(rows, size)
        out, self.state = step(logits, flat, self.state, slots.astype(np.int32), valid)
        return jax.tree.map(np.asarray, out)

    def token(self, logits, params: SamplingParams, *, slot=0, seed=0, n_out=0) -> int:
        """The token of a step of one row."""
        return int(self.step(logits, [(params, seed, n_out)], [slot]).tokens[0])


def peaked(rng, size: int = 1, vocab_size: int = VOCAB) -> np.ndarray:
    """Logits as models have them: few likely tokens and a long tail."""
    return (rng.gumbel(size=(size, vocab_size)) * 1.5).astype(np.float32)


def ramp(*likeliest: int, vocab_size: int = VOCAB) -> np.ndarray:
    """Logits whose likeliest tokens are these, in order, half a unit apart; all others are far behind."""
    logits = np.full(vocab_size, -8.0, np.float32)
    logits[list(likeliest)] = 4 - 0.5 * np.arange(len(likeliest))
    return logits
