"""One engine on several processes: process 0 answers over HTTP, and when another dies it says so within seconds."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests.jaxserve.models.running import GOLDEN, golden_prompts
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
SMALL = {  # two steps to compile
    "--max-model-len": 64, "--max-num-seqs": 1, "--max-num-batched-tokens": 8, "--block-size": 8,
    "--num-gpu-blocks-override": 12, "--dtype": "float32", "--host": "127.0.0.1",
}  # fmt: skip


def free_ports() -> int:
    """A free port, the next one being free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class Engine:
    """A server of several processes with some simulated devices each."""

    def __init__(self, model: Path, processes: int, devices: int, **flags: object):
        http, master = free_ports(), free_ports()
        self.url, self.log = f"http://127.0.0.1:{http}", model / "log"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }  # fmt: skip
        given = SMALL | {
            "--compilation-cache-dir": "",
            "--nnodes": processes,
            "--master-port": master,
            "--port": http,
        }
        given |= {"--" + name.replace("_", "-"): value for name, value in flags.items()}
        command = [sys.executable, "-m", "server.cli", "serve", str(model)]
        for name, value in given.items():
            command += [name] if value is True else [name, str(value)]
        with open(self.log, "w") as log:
            self.processes = [
                subprocess.Popen(
                    [*command, "--node-rank", str(rank)], cwd=ROOT, env=environment, stdout=log, stderr=log
                )
                for rank in range(processes)
            ]

    def wait_for(self, path: str, status: int, seconds: float) -> httpx.Response:
        """The answer once it has this status."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                answer = httpx.get(self.url + path, timeout=10)
                if answer.status_code == status:
                    return answer
            except httpx.TransportError:
                pass
            assert all(p.poll() is None for p in self.processes[:1]), self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"no {status} in {seconds} s:\n{self.log.read_text()}")

    def complete(self, prompt: list[int], **body: object) -> httpx.Response:
        asked = {
            "model": "golden",
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return httpx.post(self.url + "/v1/completions", json=asked | body, timeout=120)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    """Engines on a golden's weights, which end with the test."""
    engines: list[Engine] = []

    def started(arch: str, processes: int, devices: int, **flags: object) -> Engine:
        model = tmp_path / arch
        shutil.copytree(GOLDEN / arch, model)
        tiny_tokenizer(model)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.add_tokens(
            [f"<{i}>" for i in range(tokenizer.get_vocab_size(), 512)]
        )  # as many as the golden has
        tokenizer.save(str(model / "tokenizer.json"))
        engines.append(Engine(model, processes, devices, served_model_name="golden", **flags))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def check_answers(engine: Engine, arch: str) -> None:
    prompt = next(p for p in golden_prompts(arch) if p["length"] == 37)
    answer = engine.complete(prompt["ids"], max_tokens=12)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == prompt["greedy"][:12]


@pytest.mark.supports("many processes", "experts over two processes, a process that dies")
def test_two_processes_answer_as_one_and_a_death_is_a_clear_failure(start):
    engine = start("deepseek_v2_lite", 2, 2, data_parallel_size=4, enable_expert_parallel=True)
    engine.wait_for("/readyz", 200, 200)
    check_answers(engine, "deepseek_v2_lite")
    refused = engine.complete([5], max_tokens=4, logit_bias={"7": 100})  # fills a slot's state on both
    assert refused.json()["choices"][0]["token_ids"] == [7] * 4

    lines: list[str] = []
    streaming = threading.Thread(target=stream, args=(engine, lines))
    streaming.start()
    while not lines:
        time.sleep(0.01)
    engine.processes[1].send_signal(signal.SIGKILL)
    streaming.join(30)
    assert not streaming.is_alive(), "a running request ends"
    errors = [json.loads(line[6:])["error"] for line in lines if '"error"' in line]
    assert errors and "process 1" in errors[0]["message"]
    assert "process 1" in engine.wait_for("/health", 503, 20).text
    failed = engine.complete([5], max_tokens=4)
    assert failed.status_code == 503 and "it is dead" in failed.json()["error"]["message"]
    engine.processes[0].send_signal(signal.SIGTERM)
    assert engine.processes[0].wait(30) == 1


def stream(engine: Engine, lines: list[str]) -> None:
    body = {"model": "golden", "prompt": [5, 6], "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", engine.url + "/v1/completions", json=body, timeout=60) as answer:
        lines += (line for line in answer.iter_lines() if line)


@pytest.mark.supports("many processes", "sequences over four processes, heads over the devices of each")
def test_four_processes_answer_as_one_and_end_together(start):
    engine = start("qwen3", 4, 2, tensor_parallel_size=2, data_parallel_size=4)
    engine.wait_for("/readyz", 200, 200)
    check_answers(engine, "qwen3")
    engine.processes[0].send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in engine.processes] == [0] * 4, engine.log.read_text()


@pytest.mark.supports("many processes", "pipeline stages over two processes")
def test_two_processes_with_half_of_the_layers_each(start):
    """A dense layer in both, then one with experts in each."""
    engine = start("deepseek_v2_lite", 2, 1, pipeline_parallel_size=2)
    engine.wait_for("/readyz", 200, 200)
    check_answers(engine, "deepseek_v2_lite")
