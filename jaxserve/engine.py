"""The engine: requests in, deltas out, one step at a time; the step before is read while the next one runs."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from jaxserve.batch import UNSAMPLED, UNSCORED, Row
from jaxserve.choice import Choice, Ongoing, Prompted
from jaxserve.config import EngineConfig
from jaxserve.expert_loads import ExpertTraffic
from jaxserve.groups import GroupedScheduler
from jaxserve.layer_groups import LayerGroup
from jaxserve.metrics import Metrics
from jaxserve.readout import Found, Readout
from jaxserve.rebalance import Rebalancer
from jaxserve.refusals import Limits, checked
from jaxserve.request import Delta, Logprob, Request
from jaxserve.runner import Pending
from jaxserve.sampling.admission import Admission, admission, encode_bad_words
from jaxserve.sampling.knobs import needs_admit
from jaxserve.sampling.params import SamplingParams
from jaxserve.scheduler import Chunk, Plan, Scheduler
from jaxserve.sequence import Sequence
from jaxserve.text import Tokenizer
from jaxserve.timeline import spans
from jaxserve.trace import Trace

CORRUPTED = (
    "the model's logits were not finite for this request (NaN or infinity), so it was ended; other requests are "
    "not affected. A lower-precision dtype that overflows is the usual cause"
)


class Runner(Protocol):
    """What the engine needs of a device."""

    def launch(self, rows: list[Row], told: Callable[[LayerGroup], None] = ...) -> Pending: ...

    def admit(self, slot: int, admission: Admission, group: int = 0) -> None: ...

    def close(self) -> None: ...


Launched = tuple[Plan, Pending]


class Engine:
    """Everything about serving but devices, threads and HTTP. Not thread safe, except `prepare`."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler | GroupedScheduler,
        tokenizer: Tokenizer,
        limits: Limits,
        config: EngineConfig,
        metrics: Metrics,
        experts: ExpertTraffic | None = None,
        rebalancer: Rebalancer | None = None,
    ):
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.limits, self.config, self.metrics = limits, config, metrics
        self.experts, self.rebalancer = experts, rebalancer
        self.ongoing: dict[str, Ongoing] = {}
        self.started: list[str] = []  # requests whose first tokens the last step launched
        self.trace: Trace | None = None  # is handed the timeline of each request that ends
        self.read: Plan | None = None  # of the step that was read last, if the last call read one
        self._launched: Launched | None = None
        self._seeds = random.Random(config.seed)
        self._counted = (0, 0, 0)  # preemptions, prefix queries and prefix hits that the metrics know of

    @property
    def busy(self) -> bool:
        return bool(self.ongoing) or self._launched is not None

    def prepare(self, request: Request) -> Request:
        """The request as it will run, or a RequestError that says why it never can."""
        request = checked(request, self.limits, self.config, self._bad_words(request.params))
        if request.generated:
            self._begin(request, 0, None, 0)  # ends here if it has nothing left to do
        return request

    def add(self, request: Request) -> None:
        """Queue a prepared request."""
        params = request.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        scored = params.prompt_logprobs is not None
        prompted = Prompted(len(request.prompt_token_ids) if scored else None)
        ongoing = Ongoing(request, [], time.monotonic(), prompted)
        for i in range(params.best_of or params.n):
            leader = ongoing.choices[0].seq if i else None
            ongoing.choices.append(self._begin(request, i, leader, seed + i))
            self.scheduler.add(ongoing.choices[i].seq)
        ongoing.unfinished = len(ongoing.choices)
        self.ongoing[request.request_id] = ongoing

    def _begin(self, request: Request, index: int, leader: Sequence | None, seed: int) -> Choice:
        """A choice of the request before its first step, after what was generated elsewhere."""
        params, prompt = request.params, request.prompt_token_ids
        max_len = self.limits.max_model_len
        if params.max_tokens is not None:
            max_len = len(prompt) + max(params.max_tokens, 1)  # a step always samples
        seq = Sequence(
            request.request_id,
            [*prompt, *request.generated],
            max_len,
            index=index,
            priority=request.priority,
            salt=request.cache_salt,
            skip_prefix=index == 0 and (params.prompt_logprobs is not None or request.hidden_states),
            leader=leader,
            prompt_len=len(prompt),
        )
        choice = Choice(request, seq, seed, self.tokenizer, self.limits.eos_token_ids)
        choice.resume(request.generated)
        return choice

    def abort(self, request_id: str) -> None:
        """Forget a request, in whatever state it is; one that has ended already is no mistake."""
        ongoing = self.ongoing.get(request_id)
        if ongoing is not None:
            for choice in ongoing.choices:
                self.scheduler.finish(choice.seq)
            ongoing.finish_reason = "abort"
            self._close(ongoing)

    def step(self) -> list[tuple[str, Delta]]:
        """Launch one step and read one: the step before, or with async_scheduling off this one."""
        self.started = []
        if self.rebalancer:
            self.rebalancer.between_steps()
        plan = self.scheduler.schedule()
        launched = self._launch(plan) if plan.chunks else None
        if not self.config.async_scheduling:
            self._launched, launched = launched, None
        previous, self._launched = self._launched, launched
        self.read = previous[0] if previous else None
        deltas = self._read(previous) if previous else []
        self._report(plan)
        return deltas

    def close(self) -> None:
        """Stop what runs in the background."""
        if self.rebalancer:
            self.rebalancer.close()
        self.runner.close()

    def reset(self) -> None:
        """Forget every request and cached page: an exception in the middle of a step leaves nothing to rely on."""
        self.scheduler = self.scheduler.renewed()
        self.ongoing, self._launched, self._counted = {}, None, (0, 0, 0)

    # Launching

    def _launch(self, plan: Plan) -> Launched:
        for seq in plan.admitted:
            params = self._choice(seq).params
            if needs_admit(params):
                row = admission(
                    params,
                    seq.tokens,
                    seq.prompt_len,
                    self.limits.vocab_size,
                    self._bad_words(params),
                    self.limits.eos_token_ids,
                )
                assert seq.slot is not None
                self.runner.admit(seq.slot, row, seq.group)
        rows = [self._row(chunk) for chunk in plan.chunks]
        watches = [(self.ongoing[chunk.seq.request_id].request.watch, chunk.seq) for chunk in plan.chunks]
        if not any(watch for watch, _ in watches):
            return plan, self.runner.launch(rows)

        def told(group: LayerGroup) -> None:
            for watch, seq in watches:
                if watch:
                    watch(seq, group)

        return plan, self.runner.launch(rows, told)

    def _row(self, chunk: Chunk) -> Row:
        seq, start, end = chunk.seq, chunk.start, chunk.start + chunk.count
        assert seq.lease is not None and seq.slot is not None
        ongoing, choice = self.ongoing[seq.request_id], self._choice(seq)
        if ongoing.started is None:
            ongoing.started = time.monotonic()
            self.started.append(seq.request_id)
        known = seq.tokens[start:end]
        targets: list[int] = []
        if ongoing.prompted.logprobs is not None and seq.index == 0 and not choice.n_out:
            targets = [*seq.tokens[start + 1 : min(end + 1, seq.prompt_len)]]
        return Row(
            tokens=known + [UNSAMPLED] * (chunk.count - len(known)),
            kv_len=end,
            pages=seq.lease.pages[: self.scheduler.cache.pages_for(end)],
            slot=seq.slot,
            samples=chunk.samples,
            params=choice.params,
            seed=choice.seed,
            n_out=max(end - seq.prompt_len, 0),
            targets=targets + [UNSCORED] * (chunk.count - len(targets)),
            group=seq.group,
        )

    # Reading

    def _read(self, launched: Launched) -> list[tuple[str, Delta]]:
        plan, pending = launched
        read = Readout(pending)
        self.metrics.on_expert_drops(read.expert_drops)
        if self.experts and pending.output.expert_loads:
            self.experts.on_step(pending.output.expert_loads)
        deltas: list[tuple[str, Delta]] = []
        at = 0
        for i, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            rows = slice(at, at + chunk.count)
            at += chunk.count
            alive = self.scheduler.received(seq, read.tokens[i]) if chunk.samples else not seq.done
            if not alive:
                continue
            if not read.finite[i]:
                delta = Delta(seq.index, finish_reason="error", error=CORRUPTED)
            else:
                seq.checked = max(seq.checked, chunk.start + chunk.count)
                self._note_prompt(chunk, rows, read)
                if not chunk.samples:
                    continue
                delta = self._advance(seq, read.tokens[i], i, read)
            deltas += self._passed_on(seq, delta)
        return deltas

    def _advance(self, seq: Sequence, token: int, i: int, read: Readout) -> Delta:
        ongoing, choice = self.ongoing[seq.request_id], self._choice(seq)
        params, now = choice.params, time.monotonic()
        logprobs = None
        if params.logprobs is not None or (params.best_of or 0) > params.n:
            logprobs = self._logprobs(token, params.logprobs or 0, i, read.sampled)
        first = choice.n_out == len(ongoing.request.generated)
        delta = choice.advance(token, logprobs)
        ongoing.generated += len(delta.token_ids)
        if first:
            seq.skip_prefix = False  # what was asked of the prompt is known
            ongoing.first_token = ongoing.first_token or now
            delta = replace(
                delta,
                prompt_logprobs=ongoing.prompted.logprobs,
                hidden_states=ongoing.prompted.hidden,
                num_cached_tokens=min(seq.num_cached or 0, seq.prompt_len),
            )
        if delta.token_ids and first:
            self.metrics.on_first_token(now - ongoing.arrived)
        elif delta.token_ids:
            self.metrics.on_tokens(now - choice.last_at, 1)
        choice.last_at = now
        return delta

    def _note_prompt(self, chunk: Chunk, rows: slice, read: Readout) -> None:
        """Keep what the request asked to know of the prompt rows in this chunk."""
        seq, ongoing = chunk.seq, self.ongoing[chunk.seq.request_id]
        logprobs = ongoing.prompted.logprobs
        if seq.index or chunk.start >= seq.prompt_len or self._choice(seq).n_out:
            return
        if logprobs is not None:
            for row in range(rows.start, rows.stop):
                place = chunk.start + row - rows.start + 1
                if place < seq.prompt_len:
                    wanted = ongoing.request.params.prompt_logprobs or 0
                    logprobs[place] = self._logprobs(seq.tokens[place], wanted, row, read.scores)
        if ongoing.request.hidden_states:
            states = read.hidden[rows]
            if ongoing.prompted.hidden is None:
                ongoing.prompted.hidden = np.zeros((seq.prompt_len, states.shape[1]), np.float32)
            end = min(chunk.start + chunk.count, seq.prompt_len)
            ongoing.prompted.hidden[chunk.start : end] = states[: end - chunk.start]

    def _logprobs(self, token: int, wanted: int, row: int, found: Found) -> dict[int, Logprob]:
        """The token's own entry first, then the `wanted` likeliest ones, as vLLM gives them."""
        entries = {token: Logprob(float(found.logprob[row]), int(found.rank[row]), self._decoded(token))}
        for place in range(wanted):
            other = int(found.top_ids[row][place])
            if other >= 0 and other not in entries:
                value = float(found.top_logprobs[row][place])
                entries[other] = Logprob(value, place + 1, self._decoded(other))
        return entries

    # Ending

    def _passed_on(self, seq: Sequence, delta: Delta) -> list[tuple[str, Delta]]:
        """The deltas to hand out now; with best_of they wait until the best choices are known."""
        ongoing = self.ongoing[seq.request_id]
        params = ongoing.request.params
        if delta.finish_reason == "error" and ongoing.finish_reason != "error":
            self.metrics.on_corrupted()
        if delta.finish_reason:
            self.scheduler.finish(seq)
            ongoing.unfinished -= 1
            if ongoing.finish_reason != "error":
                ongoing.finish_reason = delta.finish_reason
        out = [delta]
        if (params.best_of or 0) > params.n:
            if delta.finish_reason == "error":  # which choices are best will never be known
                out = [replace(delta, index=i) for i in range(params.n)]
                for choice in ongoing.choices:
                    self.scheduler.finish(choice.seq)
                ongoing.unfinished = 0
            else:
                ongoing.held.setdefault(seq.index, []).append(delta)
                out = [] if ongoing.unfinished else _best(ongoing)
        if not ongoing.unfinished:
            self._close(ongoing)
        return [(seq.request_id, delta) for delta in out]

    def _close(self, ongoing: Ongoing) -> None:
        del self.ongoing[ongoing.request.request_id]
        if self.trace:
            for span in spans(ongoing, time.monotonic()):
                self.trace(span)
        now, arrived, params = time.monotonic(), ongoing.arrived, ongoing.request.params
        started = ongoing.started or now
        first_token = ongoing.first_token or now
        self.metrics.on_finished(
            ongoing.finish_reason,
            n_prompt=len(ongoing.request.prompt_token_ids),
            n_cached=ongoing.choices[0].seq.num_cached or 0,
            n_generated=ongoing.generated,
            queue=started - arrived,
            prefill=first_token - started,
            decode=now - first_token,
            e2e=now - arrived,
            params_n=params.n,
            max_tokens=params.max_tokens,
        )

    def _report(self, plan: Plan) -> None:
        cache, scheduler = self.scheduler.cache, self.scheduler
        counts = (scheduler.preemptions, cache.prefix_queries, cache.prefix_hits)
        added = [new - old for new, old in zip(counts, self._counted, strict=True)]
        self._counted = counts
        new_tokens = sum(chunk.count for chunk in plan.chunks)
        self.metrics.on_step(len(scheduler.running), len(scheduler.waiting), cache.usage, new_tokens, *added)

    # Small questions

    def _choice(self, seq: Sequence) -> Choice:
        return self.ongoing[seq.request_id].choices[seq.index]

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        encode = partial(self.tokenizer.encode, add_special_tokens=False, allow_special=False)
        return encode_bad_words(params, encode) if params.bad_words else []

    def _decoded(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)


def _best(ongoing: Ongoing) -> list[Delta]:
    """The n choices with the highest mean log-probability, best first, renumbered."""

    def mean(index: int) -> float:
        choice = ongoing.choices[index]
        return choice.cumulative_logprob / choice.n_out if choice.n_out else -math.inf

    ranked = sorted(ongoing.held, key=mean, reverse=True)[: ongoing.request.params.n]
    return [
        replace(delta, index=place) for place, index in enumerate(ranked) for delta in ongoing.held[index]
    ]
