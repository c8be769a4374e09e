"""Whatever the page size, the data type of the cache and the number of devices on either side: the same tokens."""

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxserve import AsyncLLM
from jaxserve.handover.messages import Incompatible
from kv import wire
from kv.transfer import DirectLink, JaxLink
from server.clients.split import Split
from server.clients.start import connected
from server.roles import RoleConfig
from tests.server.splits import SIZES, counted, failures, forget, greedy, settled, tokens
from tests.tiny import tiny_checkpoint, tiny_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = {
    "page 4": {"block_size": 4},
    "page 16, tensor 2": {"block_size": 16, "tensor_parallel_size": 2, "first_device": 2},
    "page 8, bfloat16": {"block_size": 8, "kv_cache_dtype": "bfloat16"},
}
LOW_BITS = {
    f"{name}, {cache}": {"kv_cache_dtype": cache} | layout
    for cache in ("fp8", "int4")
    for name, layout in {
        "page 8": {"block_size": 8},
        "page 4, tensor 2": {"block_size": 4, "tensor_parallel_size": 2, "first_device": 2},
    }.items()
}
PROMPT = [(i * 37 + i // 7) % 250 for i in range(70)]


class Workers:
    """Engines of one model, one for each layout, started when first asked for."""

    def __init__(self, path: str, cache: str):
        self._path, self._cache = path, cache
        self._started: dict[str, Split] = {}
        self._links = {"jax": JaxLink("127.0.0.1"), "direct": DirectLink()}

    def __getitem__(self, layout: str) -> Split:
        if layout not in self._started:
            settings = (
                SIZES
                | {"compilation_cache_dir": self._cache, "max_num_seqs": 2}
                | (LAYOUTS | LOW_BITS)[layout]
            )
            roles = RoleConfig("both", split_min_tokens=8)
            self._started[layout] = connected(
                AsyncLLM(self._path, **settings), roles, "tiny", self._links, []
            )
        return self._started[layout]

    def close(self) -> None:
        for split in self._started.values():
            split.close()

    async def divided(
        self, sender: str, receiver: str, link: str, prompt: list[int], count: int
    ) -> list[int]:
        """What two of them say together, the whole prompt having travelled."""
        first, second = self[sender], self[receiver]
        forget(second)
        second._turns = itertools.repeat(first.sender)
        second.receiver._preferred = link
        before = counted(second, "tokens_total")
        said = await tokens(second, prompt, greedy(max_tokens=count, detokenize=False))
        page = second.pages.page_size
        assert counted(second, "tokens_total") - before == len(prompt) // page * page
        await settled(first, second)
        return said


@pytest.fixture(scope="module")
def llama(tmp_path_factory, compilation_cache_dir):
    path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    made = Workers(str(path), compilation_cache_dir)
    yield made
    made.close()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory, compilation_cache_dir):
    path = tmp_path_factory.mktemp("deepseek")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "deepseek_v3" / name, path)
    tiny_tokenizer(path)
    made = Workers(str(path), compilation_cache_dir)
    yield made
    made.close()


@pytest.mark.supports("disaggregation", "different page sizes, cache types and tensor parallel sizes")
@pytest.mark.parametrize("sender, receiver", list(itertools.permutations(LAYOUTS, 2)))
def test_every_pair_of_layouts_says_what_the_receiver_says_alone(llama, sender, receiver):
    async def both() -> None:
        alone = await tokens(llama[receiver].llm, PROMPT, greedy(max_tokens=8))
        for link in ("jax", "direct"):
            assert await llama.divided(sender, receiver, link, PROMPT, 8) == alone

    asyncio.run(both())


@pytest.mark.supports("disaggregation", "latent caches (DeepSeek)")
@pytest.mark.parametrize("sender, receiver", list(itertools.permutations(list(LAYOUTS)[:2])))
def test_a_latent_cache_travels_and_the_tokens_are_the_reference_s(deepseek, sender, receiver):
    golden = json.loads((GOLDEN / "deepseek_v3" / "prompts.json").read_text())["prompts"]
    case = next(case for case in golden if 32 <= case["length"] <= 100)
    said = asyncio.run(deepseek.divided(sender, receiver, "jax", case["ids"], 15))
    assert said == case["greedy"][:15]


def rows_of(split: Split, prompt: list[int], count: int, dtype: str) -> list[np.ndarray]:
    """What its pages hold of the first tokens of a prompt, as it would travel."""

    def look(engine) -> list[np.ndarray]:
        cache, latent, size = engine.scheduler.cache, split.pages.latent, split.pages.page_size
        lease = cache.match(prompt)
        assert lease.length >= count
        places = wire.places(lease.pages, size, 0, count, count)
        rows, _ = wire.take(engine.runner.pool, places, latent=latent, dtype=dtype)
        cache.release(lease)
        return [np.asarray(layer) for layer in rows]

    return split.llm.call(look).result()


@pytest.mark.supports(
    "disaggregation", "caches in low bits, grouped queries and latents: codes and scales as they are"
)
@pytest.mark.parametrize("model, cache", [("llama", "fp8"), ("deepseek", "int4")])
def test_low_bits_arrive_as_they_are_and_say_what_the_receiver_says_alone(model, cache, request):
    workers = request.getfixturevalue(model)

    async def both(sender: str, receiver: str) -> None:
        alone = await tokens(workers[receiver].llm, PROMPT, greedy(max_tokens=8))
        for link in ("jax", "direct"):
            assert await workers.divided(sender, receiver, link, PROMPT, 8) == alone
        name = workers[sender].llm.config.kv_cache_dtype
        sent, got = (rows_of(workers[layout], PROMPT, 64, name) for layout in (sender, receiver))
        for one, other in zip(sent, got, strict=True):
            np.testing.assert_array_equal(one, other)

    for pair in itertools.permutations([name for name in LOW_BITS if name.endswith(cache)]):
        asyncio.run(both(*pair))


@pytest.mark.supports(
    "disaggregation", "a plain cache for prompts and one in low bits to go on: quantised on the way"
)
@pytest.mark.parametrize("model, cache", [("llama", "fp8"), ("deepseek", "int4")])
def test_a_plain_cache_is_quantised_on_the_way_and_never_the_other_way_round(model, cache, request):
    workers, sender, receiver = request.getfixturevalue(model), "page 16, tensor 2", f"page 8, {cache}"

    async def there() -> None:
        said = [await workers.divided(sender, receiver, link, PROMPT, 8) for link in ("jax", "direct")]
        name = workers[receiver].llm.config.kv_cache_dtype
        sent, got = (rows_of(workers[layout], PROMPT, 64, name) for layout in (sender, receiver))
        for one, other in zip(sent, got, strict=True):
            np.testing.assert_array_equal(one, other)
        again = await tokens(workers[receiver].llm, PROMPT, greedy(max_tokens=8))  # with what is cached
        assert said[0] == said[1] == again

    async def back() -> None:
        first, second = workers[receiver], workers["page 4"]
        with pytest.raises(Incompatible, match=r"rows of a cache of .* cannot become rows of float32"):
            second.handshake.link_to(first.handshake, "direct")
        alone = await tokens(second.llm, PROMPT, greedy(max_tokens=8))
        forget(second)
        second._turns = itertools.repeat(first.sender)
        before = failures(second, "incompatible")
        assert await tokens(second, PROMPT, greedy(max_tokens=8)) == alone, "it computes the prompt itself"
        assert failures(second, "incompatible") == before + 1
        await settled(first, second)

    asyncio.run(there())
    asyncio.run(back())


@pytest.mark.supports("disaggregation", "prefill and decode on two groups of devices in one process")
def test_two_groups_of_devices_in_one_process_are_one_engine_to_its_clients(tmp_path, compilation_cache_dir):
    from jaxserve.config import EngineConfig
    from server.clients.start import beside, paired

    roles = RoleConfig("decode", prefill_devices=2, split_min_tokens=8)
    path = str(tiny_checkpoint(tmp_path, tokenizer=True))
    settings = SIZES | {"compilation_cache_dir": compilation_cache_dir, "max_num_seqs": 2}
    config = EngineConfig(path, **settings, tensor_parallel_size=2)
    prompts = AsyncLLM(beside(config, roles))
    assert prompts.config.first_device == 2
    pair = paired(prompts, AsyncLLM(config), roles, "tiny")

    async def both() -> None:
        assert await tokens(pair, PROMPT) == await tokens(pair.llm, PROMPT)
        assert counted(pair, "tokens_total") == 68
        await settled(pair)

    asyncio.run(both())
    pair.close()
