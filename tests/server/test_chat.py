"""The terminal chat: turns are remembered, commands do what they say, and an answer can be stopped."""

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxserve.errors import ConfigError, RequestError
from server import chat

ROOT = Path(__file__).parents[2]


class Echo:
    """Answers with what it was sent, one word at a time."""

    name = "echo"

    def __init__(self):
        self.seen, self.open_count = [], 0

    async def open(self):
        self.open_count += 1

    async def close(self):
        self.open_count -= 1

    async def answer(self, messages, sampling):
        self.seen.append(([dict(message) for message in messages], sampling))
        last = messages[-1]["content"]
        if last == "stop me":
            yield "half ", 1
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(30)
        if last == "fail":
            raise RequestError("the prompt is too long")
        for word in last.split():
            yield word + " ", 1


def talk(monkeypatch, capsys, text: str, **kwargs) -> tuple[Echo, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    peer = Echo()
    chat.run(peer, system=kwargs.get("system", ""), sampling={"temperature": 0})
    out, err = capsys.readouterr()
    assert peer.open_count == 0
    return peer, out, err


def test_every_line_of_a_pipe_is_a_turn_of_one_conversation(monkeypatch, capsys):
    peer, out, _ = talk(monkeypatch, capsys, "hello there\n\nand you?\n", system="be kind")
    assert out == "hello there \nand you? \n"
    assert peer.seen[1] == (
        [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello there"},
            {"role": "assistant", "content": "hello there "},
            {"role": "user", "content": "and you?"},
        ],
        {"temperature": 0},
    )


def test_commands(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    lines = [
        "one",
        "/reset",
        "/system be brief",
        "two",
        f"/save {file}",
        "/nonsense",
        "/help",
        "/exit",
        "three",
    ]
    peer, out, err = talk(monkeypatch, capsys, "\n".join(lines))
    assert out == "one \ntwo \n"
    assert peer.seen[1][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}]
    assert [message["content"] for message in json.loads(file.read_text())] == ["be brief", "two", "two "]
    assert "there is no /nonsense" in err and "/save FILE" in err


def test_a_line_that_ends_in_a_backslash_goes_on(monkeypatch, capsys):
    peer, _, _ = talk(monkeypatch, capsys, "one\\\ntwo\n")
    assert peer.seen[0][0][-1]["content"] == "one\ntwo"


def test_a_line_that_is_not_text_is_a_mistake_of_the_user_s(monkeypatch, capsys):
    with pytest.raises(RequestError, match="UTF-8"):
        talk(monkeypatch, capsys, b"caf\xe9\n".decode(errors="surrogateescape"))


def test_ctrl_c_stops_the_answer_and_keeps_what_came(monkeypatch, capsys):
    peer, out, _ = talk(monkeypatch, capsys, "stop me\ngo on\n")
    assert out == "half \ngo on \n"
    assert peer.seen[1][0][1] == {"role": "assistant", "content": "half "}


def test_an_error_ends_a_pipe(monkeypatch, capsys):
    with pytest.raises(RequestError, match="too long"):
        talk(monkeypatch, capsys, "fail\n")


def _server(answer) -> chat.Server:
    server = chat.Server("http://test/v1/", "key")
    server.client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test")
    return server


async def test_a_server_streams_text_and_counts():
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        assert json.loads(request.content)["messages"] == [{"role": "user", "content": "hi"}]
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1}},
            {"choices": [{"delta": {"content": "b"}}], "usage": {"completion_tokens": 3}},
            {"choices": [], "usage": {"completion_tokens": 3}},
        ]
        return httpx.Response(
            200, text="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        )

    server = _server(answer)
    await server.open()
    pieces = [piece async for piece in server.answer([{"role": "user", "content": "hi"}], {})]
    await server.close()
    assert server.name == "tiny" and [piece for piece in pieces if any(piece)] == [("a", 1), ("b", 2)]


async def test_what_a_server_refuses_is_told_in_its_words():
    refusal = {"error": {"message": "no such key"}}
    server = _server(lambda request: httpx.Response(401, json=refusal))
    with pytest.raises(ConfigError, match="401: no such key"):
        await server.open()
    with pytest.raises(RequestError, match="no such key"):
        [piece async for piece in server.answer([], {})]
    server = _server(lambda request: httpx.Response(200, text=f"data: {json.dumps(refusal)}\n\n"))
    with pytest.raises(RequestError, match="no such key"):
        [piece async for piece in server.answer([], {})]


async def test_a_server_that_is_not_there_is_named():
    server = chat.Server("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.*is the server running"):
        await server.open()
    await server.close()


def test_on_a_terminal_it_prompts_shows_the_speed_and_survives_ctrl_c(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import asyncio\nfrom server import chat\n"
        "class Slow:\n"
        "    name = 'slow'\n"
        "    async def open(self): pass\n"
        "    async def close(self): pass\n"
        "    async def answer(self, messages, sampling):\n"
        "        for i in range(1000 if messages[-1]['content'] == 'long' else 3):\n"
        "            await asyncio.sleep(0.02)\n"
        "            yield f'w{i} ', 1\n"
        "chat.run(Slow(), system='', sampling={})\n"
    )
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "HOME": str(tmp_path), "TERM": "dumb"},
        start_new_session=True,
        close_fds=True,
    )
    os.close(terminal)
    seen = ""

    def until(words: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while words not in seen:
            readable, _, _ = select.select([main], [], [], max(deadline - time.monotonic(), 0))
            assert readable, f"no {words!r} in {seen!r}"
            seen += os.read(main, 4096).decode()
        seen = seen.split(words, 1)[1]

    until("> ")
    os.write(main, b"long\n")
    until("w3 ")
    process.send_signal(signal.SIGINT)
    until("[stopped]")
    until("> ")
    os.write(main, b"short\n")
    until("w2 ")
    until("3 tokens")
    until("tokens/s")
    until("> ")
    os.write(main, b"/exit\n")
    assert process.wait(timeout=30) == 0
    os.close(main)
    assert "short" in (tmp_path / ".cache" / "jaxserve" / "chat_history").read_text()
