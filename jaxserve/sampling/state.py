"""SlotState: what the sampler keeps on the device for each running sequence, from one step to the next."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxserve.expert_loads import ExpertLoads
from jaxserve.sampling.admission import PAST_LENGTH, Admission
from jaxserve.sampling.knobs import BAD_WORDS, PENALTIES, Knobs
from jaxserve.sampling.params import MAX_BAD_WORDS, MAX_STOP_TOKENS

# marks = 2 * times in the output + (1 if in the prompt), in int16; a count stays at its largest value, far
# beyond where a penalty still changes anything.
IN_PROMPT = 1
ONE_MORE = 2
_LAST_MARK = 2**15 - 1 - ONE_MORE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """One row a slot. Rows other than `last_token` mean something only after `admit`, for rows whose flags say so."""

    last_token: Array  # i32 [S]
    marks: Array  # i16 [S, V]
    bias: Array  # f32 [S, V]; -inf where a token is not allowed
    stop_ids: Array  # i32 [S, MAX_STOP_TOKENS]; -1 is no token
    bad_past: Array  # i32 [S, words, PAST_LENGTH]: what comes before a bad word's last token; -1 is any
    bad_last: Array  # i32 [S, words]; -1 is no word
    recent: Array  # i32 [S, PAST_LENGTH]: the output's last tokens, the newest at the end; -1 is none
    expert_loads: ExpertLoads | None = None  # of no slot: sums since the start, where they are wanted


def new_state(num_slots: int, vocab_size: int) -> SlotState:
    """The state before any sequence. Six bytes a slot and token of the vocabulary, nearly all of it."""

    def none(*shape: int) -> Array:
        return jnp.full((num_slots, *shape), -1, jnp.int32)

    return SlotState(
        last_token=jnp.zeros(num_slots, jnp.int32),
        marks=jnp.zeros((num_slots, vocab_size), jnp.int16),
        bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
        stop_ids=none(MAX_STOP_TOKENS),
        bad_past=none(2 * MAX_BAD_WORDS, PAST_LENGTH),
        bad_last=none(2 * MAX_BAD_WORDS),
        recent=none(PAST_LENGTH),
    )


def admit(state: SlotState, slot: Int32[Array, ""], admission: Admission) -> SlotState:
    """Fill one slot for a request that `needs_admit`; jit it with the state donated. Whatever was there is gone."""

    def put(rows: Array, row: np.ndarray | Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(rows, jnp.asarray(row), slot, 0)

    return replace(
        state,
        marks=put(state.marks, admission.marks),
        bias=put(state.bias, admission.bias),
        stop_ids=put(state.stop_ids, admission.stop_ids),
        bad_past=put(state.bad_past, admission.bad_past),
        bad_last=put(state.bad_last, admission.bad_last),
        recent=put(state.recent, admission.recent),
    )


def record(
    state: SlotState,
    tokens: Int32[Array, "B"],
    knobs: Knobs,
    slots: Int32[Array, "B"],
    valid: Bool[Array, "B"],
) -> SlotState:
    """The state after these tokens were sampled for the valid rows; nothing else changes."""
    nowhere = state.last_token.shape[0]
    all_rows = jnp.where(valid, slots, nowhere)
    counting = jnp.where(valid & knobs.has(PENALTIES), slots, nowhere)
    remembering = jnp.where(valid & knobs.has(BAD_WORDS), slots, nowhere)
    marks = state.marks.at[counting, tokens].get(mode="fill", fill_value=0)
    marks = jnp.where(marks <= _LAST_MARK, marks + ONE_MORE, marks)
    recent = state.recent.at[remembering].get(mode="fill", fill_value=-1)
    recent = jnp.concatenate([recent[:, 1:], tokens[:, None]], axis=1)
    return replace(
        state,
        last_token=state.last_token.at[all_rows].set(tokens, mode="drop"),
        marks=state.marks.at[counting, tokens].set(marks, mode="drop"),
        recent=state.recent.at[remembering].set(recent, mode="drop"),
    )
