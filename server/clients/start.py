"""From an engine and a role to a client that hands prompts over and takes them."""

import secrets
from dataclasses import replace
from typing import Any

import jax

from jaxserve.async_llm import AsyncLLM
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.handover.handshake import Handshake, fingerprint, versions
from jaxserve.handover.metrics import HandoverMetrics
from jaxserve.handover.pages import EnginePages
from jaxserve.handover.receiver import Receiver, Source
from jaxserve.handover.sender import Sender
from kv.transfer import ByteLink, DirectLink, JaxLink, Link
from server.clients.split import Split
from server.clients.worker import HttpWorker
from server.roles import RoleConfig


def with_role(llm: AsyncLLM, roles: RoleConfig, name: str, api_key: str | None = None) -> Split:
    """The engine as a worker among others; `api_key` is what the others ask for."""
    host = roles.kv_transfer_host
    links: dict[str, Link] = {"jax": JaxLink(host)} if roles.kv_transfer == "jax" else {}
    links |= {"tcp": ByteLink(host)}
    sources: list[Source] = [HttpWorker(url, api_key, roles.kv_silence_timeout) for url in roles.prefill_url]
    return connected(llm, roles, name, links, sources, api_key)


def connected(
    llm: AsyncLLM,
    roles: RoleConfig,
    name: str,
    links: dict[str, Link],
    sources: list[Source],
    api_key: str | None = None,
    beside: Split | None = None,
) -> Split:
    """The same with given links and sources of prompts."""
    engine: Any = llm._engine
    pages = EnginePages(engine, llm.model_config)
    llm.call(lambda engine: pages.warm()).result()
    handshake = Handshake(
        role=roles.role or "both",
        epoch=secrets.token_hex(8),
        model=fingerprint(llm.model_config, engine.runner.params),
        name=name,
        layers=pages.layers,
        row=pages.row,
        dtype=llm.config.kv_cache_dtype,
        page_size=pages.page_size,
        tensor_parallel_size=llm.config.tensor_parallel_size,
        limits={
            "max_model_len": llm.config.max_model_len or 0,
            "vocab_size": engine.limits.vocab_size,
            "max_num_seqs": llm.config.max_num_seqs,
            "max_num_batched_tokens": llm.config.max_num_batched_tokens,
        },
        transfer={kind: link.address for kind, link in links.items()},
        versions=versions(),
    )
    metrics = HandoverMetrics(llm.registry, name)
    preferred = "direct" if "direct" in links else roles.kv_transfer
    return Split(
        llm,
        pages,
        Receiver(llm, pages, handshake, links, metrics, preferred, roles.kv_silence_timeout),
        Sender(llm, pages, handshake, links, metrics, roles.kv_lease_seconds),
        metrics,
        sources,
        role=handshake.role,
        least=roles.split_min_tokens,
        api_key=api_key,
        silence=roles.kv_silence_timeout,
        beside=beside,
    )


def beside(engine: EngineConfig, roles: RoleConfig) -> EngineConfig:
    """An engine for prompts on the devices after those of `engine`, whose model it has."""
    own = engine.tensor_parallel_size * engine.data_parallel_size * engine.prefill_context_parallel_size
    taken = engine.first_device + own
    ways, there = roles.prefill_devices, len(jax.local_devices())
    if taken + ways > there:
        raise ConfigError(
            f"prefill_devices={ways} are not here: of {there} devices the model itself takes {taken}"
        )
    return replace(
        engine,
        first_device=taken,
        tensor_parallel_size=ways,
        data_parallel_size=1,
        expert_parallel_size=None,
        expert_capacity_factor=None,
        expert_dispatch_dtype="auto",
        prefill_context_parallel_size=1,
        enable_eplb=False,
        eplb_config=None,
    )


def paired(prefill: AsyncLLM, decode: AsyncLLM, roles: RoleConfig, name: str) -> Split:
    """Two engines of this process, on devices of their own: the second goes on with the prompts of the first.

    Rows move by `device_put` between the shardings of the two groups of devices.
    """
    links: dict[str, Link] = {"direct": DirectLink()}
    first = connected(prefill, roles, name, links, [])
    return connected(decode, roles, name, links, [first.sender], beside=first)
