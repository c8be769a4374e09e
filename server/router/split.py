"""Whether one worker computes a request's prompt for another that goes on with it. No clock, no network.

Splitting costs a transfer and buys an undisturbed stream of tokens for those who are being answered, so it takes three
things at once: a prompt that does not fit between two tokens, a target for the time between them that somebody is
promised, and a link over which keys and values come sooner than they are computed.
"""

from server.router.cost import Standing


def reason_to_split(
    standing: Standing, to_compute: int, tpot_target: float | None, transfer_per_token: float | None
) -> tuple[bool, str]:
    """(whether to split, the reason in a word).

    Args:
        standing: the worker that is to answer.
        to_compute: prompt tokens that are not in its cache.
        tpot_target: seconds a token.
        transfer_per_token: seconds that the transfer adds, as measured; None before the first, which is tried.
    """
    if tpot_target is None:
        return False, "no_target"
    if not standing.decoding:
        return False, "nobody_waits"
    room = tpot_target - standing.pace.seconds(0, standing.decoding)
    if to_compute * standing.pace.prompt_token <= room:
        return False, "short_prompt"
    if transfer_per_token is not None and transfer_per_token >= standing.pace.prompt_token:
        return False, "slow_link"
    return True, "split"
