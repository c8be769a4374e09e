"""The real step on a mesh, with the goldens' prompts as its sequences, each group of devices with some of them."""

from typing import Any

import numpy as np

from jaxserve.arrays import Arrays
from jaxserve.batch import Row
from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.layer_groups import layer_groups
from jaxserve.layered_step import LayeredPrograms, LayeredStep
from jaxserve.models import model_for
from jaxserve.placement import placement
from jaxserve.readout import Readout
from jaxserve.runner import DeviceRunner
from jaxserve.sampling.params import SamplingParams
from jaxserve.step import Step
from jaxserve.topology import model_sizes
from jaxserve.weights import load, open_checkpoint
from sharding.mesh import Topology
from sharding.params import stack_layers
from tests.jaxserve.models.running import GOLDEN, golden_config, golden_prompts

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=32, prompt_logprobs=0)


class Stepping:
    """A golden's model on a mesh: prompts in one step, then a token a step."""

    def __init__(
        self,
        arch: str,
        topology: Topology | None,
        *,
        stacked: bool = False,
        longest: int = 160,
        pieces: int = 1,
    ):
        """Prompts run as about `pieces` programs, with the embedding and the head two more, if there are several."""
        self.config, self.pages = golden_config(arch), -(-longest // PAGE)
        params = model_for(self.config).params(self.config)
        if stacked:
            params["layers"] = stack_layers(params["layers"])
        where = None
        if topology is not None:
            where = placement(topology.mesh(model_sizes(self.config)), self.config, params, stacked=stacked)
        settings = EngineConfig(
            arch, max_num_seqs=1, block_size=PAGE, dtype="float32", kv_cache_dtype="float32"
        )
        arrays = Arrays(settings, self.config, params, stacked, where)
        checkpoint = open_checkpoint(str(GOLDEN / arch))
        weights = load(params, checkpoint, "float32", where and where.params, progress=False)
        self.groups = where.groups if where else 1
        step = Step(self.config, PAGE, where)
        self.buckets = [Bucket(longest, 1, self.pages), Bucket(1, 1, self.pages)]
        groups = layer_groups(weights["layers"], stacked=stacked, pieces=pieces)
        self.runner = DeviceRunner(
            step,
            weights,
            arrays.pool(1 + self.pages),
            arrays.state(),
            self.buckets,
            layered=LayeredStep(step, groups) if pieces > 1 else None,
        )
        self.texts: dict[Bucket, str] = {}

    def compiled(self, bucket: Bucket) -> None:
        """The step of this size, compiled in little time; its program is in `texts`."""
        self.runner._compile(bucket, {"xla_backend_optimization_level": 0})
        step = self.runner._compiled[bucket]
        if not isinstance(step, LayeredPrograms):
            self.texts[bucket] = step.as_text()  # type: ignore[attr-defined]

    def run(self, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], list[np.ndarray]]:
        """(greedy tokens, log-probabilities of the prompt's tokens) of a prompt in each group."""
        assert len(prompts) == self.groups
        for bucket in self.buckets:
            self.compiled(bucket)
        read = Readout(self.runner.launch([self._row(g, p, 0) for g, p in enumerate(prompts)]))
        at, scores = 0, []
        for prompt in prompts:
            scores.append(np.array(read.scores.logprob[at : at + len(prompt) - 1]))
            at += len(prompt)
        tokens = [[token] for token in read.tokens]
        for n in range(1, steps):
            rows = [self._row(g, [tokens[g][-1]], len(prompt) + n - 1) for g, prompt in enumerate(prompts)]
            for mine, token in zip(tokens, Readout(self.runner.launch(rows)).tokens, strict=True):
                mine.append(token)
        return tokens, scores

    def _row(self, group: int, tokens: list[int], before: int) -> Row:
        pages = list(range(1, 1 + self.pages))
        targets = [*tokens[1:], -1] if not before else []
        return Row(tokens, before + len(tokens), pages, 0, True, GREEDY, targets=targets, group=group)


def expected_scores(arch: str, prompt: dict[str, Any]) -> np.ndarray:
    """Log-probabilities of a prompt's tokens, by the golden's logits."""
    logits = np.load(GOLDEN / arch / "logits.npz")[f"logits_{prompt['length']}"].astype(np.float64)
    norms = np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1)) + logits.max(-1)
    ids = prompt["ids"][1:]
    return (logits[np.arange(len(ids)), ids] - norms[:-1]).astype(np.float32)


def check_golden(
    arch: str, topology: Topology | None, *, stacked: bool = False, steps: int = 8, pieces: int = 1
) -> Stepping:
    """The goldens' prompts, one a group, give their log-probabilities and greedy tokens."""
    listed = golden_prompts(arch)
    stepping = Stepping(arch, topology, stacked=stacked, pieces=pieces)
    mine = [listed[-1 - g % len(listed)] for g in range(stepping.groups)]  # the longest one first
    tokens, scores = stepping.run([prompt["ids"] for prompt in mine], steps)
    for prompt, got, score in zip(mine, tokens, scores, strict=True):
        np.testing.assert_allclose(score, expected_scores(arch, prompt), rtol=1e-4, atol=5e-4)
        assert got == prompt["greedy"][:steps]
    return stepping
