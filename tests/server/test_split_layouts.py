"""Whatever the page size, the data type of the cache and the number of devices on either side: the same tokens."""

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import pytest

from jaxserve import AsyncLLM
from kv.transfer import DirectLink, JaxLink
from server.clients.split import Split
from server.clients.start import connected
from server.roles import RoleConfig
from tests.server.splits import SIZES, counted, forget, greedy, settled, tokens
from tests.tiny import tiny_checkpoint, tiny_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = {
    "page 4": {"block_size": 4},
    "page 16, tensor 2": {"block_size": 16, "tensor_parallel_size": 2, "first_device": 2},
    "page 8, bfloat16": {"block_size": 8, "kv_cache_dtype": "bfloat16"},
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
            settings = SIZES | {"compilation_cache_dir": self._cache, "max_num_seqs": 2} | LAYOUTS[layout]
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
        page = LAYOUTS[receiver]["block_size"]
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
