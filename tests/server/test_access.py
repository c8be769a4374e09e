"""Keys, origins, ids and names: who may call, from where, and how an answer is told from another."""

import httpx
import pytest

from jaxserve.errors import ConfigError
from server.app import create_app
from server.config import ServerConfig
from tests.server.conftest import chat

GUARDED = [
    "/v1/models",
    "/v1/models/x",
    "/metrics",
    "/version",
    "/openapi.json",
    "/docs",
    "/nothing",
    "/health/x",
]


@pytest.mark.parametrize("path", GUARDED)
async def test_every_route_but_health_wants_a_key(make_client, path):
    client = make_client(api_key=("one", "two"))
    for headers in (
        {},
        {"Authorization": "Bearer no"},
        {"Authorization": "Basic one"},
        {"x-api-key": b"thr\xe9e"},
    ):
        response = await client.get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_any_of_the_keys_opens_in_either_header(make_client):
    client = make_client(api_key=("one", "two"))
    for headers in ({"Authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "two"}):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
async def test_health_is_open(make_client, path):
    assert (await make_client(api_key=("one",)).get(path)).status_code == 200


async def test_a_root_path_opens_no_other_route(engine):
    app = create_app(engine, ServerConfig(api_key=("one",)))
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path, status in (
            ("/llm/health", 200),
            ("/health", 200),
            ("/llm/version", 401),
            ("/llm/llm/health", 401),
        ):
            assert (await client.get(path)).status_code == status


async def test_browsers_may_call_only_from_allowed_origins(client, make_client):
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in (await client.get("/version", headers=asking)).headers
    open_client = make_client(allowed_origins=("https://a.example",), api_key=("k",))
    allowed = await open_client.options("/v1/chat/completions", headers=asking)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = await open_client.get("/version", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
    other = await open_client.options(
        "/v1/chat/completions", headers=asking | {"Origin": "https://b.example"}
    )
    assert "access-control-allow-origin" not in other.headers


async def test_answers_carry_the_callers_id_or_a_new_one(client):
    url = "/v1/chat/completions"
    mine = await client.post(url, json=chat(request_id="in-body"), headers={"X-Request-Id": "in-header"})
    assert mine.headers["x-request-id"] == "in-header" and mine.json()["id"] == "chatcmpl-in-header"
    body = await client.post(url, json=chat(request_id="in-body"))
    assert body.headers["x-request-id"] == "in-body" and body.json()["id"] == "chatcmpl-in-body"
    fresh = {(await client.get("/version")).headers["x-request-id"] for _ in range(2)}
    assert len(fresh) == 2
    unusable = await client.get("/version", headers={"X-Request-Id": "a b"})
    assert unusable.headers["x-request-id"] != "a b"


async def test_equal_ids_do_not_collide_in_the_engine(client, engine):
    await client.post("/v1/completions", json={"prompt": ["a", "b"], "request_id": "same"})
    await client.post("/v1/completions", json={"prompt": "c", "request_id": "same"})
    assert len({request.request_id for request in engine.seen}) == 3


async def test_models_are_listed_under_every_served_name(client, make_client):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["id"] == card["root"] == "models/fake" and card["max_model_len"] == 256 and card["permission"]
    assert (await client.get("/v1/models/models/fake")).json() == card
    renamed = make_client(served_model_name=("a", "b"))
    listed = (await renamed.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in listed] == [("a", "models/fake"), ("b", "models/fake")]
    assert (await renamed.post("/v1/chat/completions", json=chat(model="b"))).json()["model"] == "b"
    assert (await renamed.post("/v1/chat/completions", json=chat())).json()["model"] == "a"
    assert (await renamed.post("/v1/chat/completions", json=chat(model="models/fake"))).status_code == 404


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"port": 70000}, "port=70000"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"sse_keep_alive_interval": float("nan")}, "sse_keep_alive_interval"),
        ({"ssl_keyfile": "key"}, "ssl_certfile"),
        ({"api_key": ("",)}, "empty key"),
        ({"root_path": "llm"}, "root_path"),
        ({"max_body_bytes": 1}, "max_body_bytes"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**settings)


async def test_a_chat_template_may_be_a_file_or_the_text(make_client, engine, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}?")
    for template, text in ((str(tmp_path / "t.jinja"), "Hi?"), ("{{ messages[0].content }}.", "Hi.")):
        await make_client(chat_template=template).post("/v1/chat/completions", json=chat())
        assert engine.seen[-1].prompt == text
    with pytest.raises(ConfigError, match="nowhere"):
        make_client(chat_template="/nowhere/t.jinja")
