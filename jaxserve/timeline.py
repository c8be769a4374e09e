"""A request's way through the engine as spans: waiting, its prompt, its answer."""

from collections.abc import Iterator

from jaxserve.choice import Ongoing
from jaxserve.trace import Span, trace_id, wall


def spans(ongoing: Ongoing, now: float) -> Iterator[Span]:
    """The request from its arrival to `now` (of `time.monotonic`), and inside it the parts that it came to."""
    request = ongoing.request
    trace = trace_id(request.trace_id or request.request_id)
    attributes = {
        "request_id": request.request_id,
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": ongoing.choices[0].seq.num_cached,
        "output_tokens": ongoing.generated,
        "finish_reason": ongoing.finish_reason,
    }
    whole = Span("request", trace, wall(ongoing.arrived), wall(now), attributes)
    yield whole
    moments = [ongoing.arrived, ongoing.started, ongoing.first_token, now]
    for i, name in enumerate(("queue", "prefill", "decode")):
        begin = moments[i]
        if begin is not None:
            end = next(moment for moment in moments[i + 1 :] if moment is not None)
            yield Span(name, trace, wall(begin), wall(end), parent_id=whole.span_id)
