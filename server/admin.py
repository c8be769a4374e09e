"""What operators and clients ask about the server: models, health, metrics, version."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from server.answers import HealthAnswer, ModelCard, ModelList, Version
from server.errors import documented
from server.served import VERSION, Served, served

_METRICS_TYPES = ("text/plain", "application/openmetrics-text")
router = APIRouter()
health = APIRouter(responses={503: {"model": HealthAnswer, "description": "not now"}})


@router.get("/v1/models", responses=documented(401, 503))
async def models(served: Annotated[Served, Depends(served)]) -> ModelList:
    """The names the server answers to."""
    served.check_loaded()
    return ModelList(object="list", data=[_card(served, name) for name in served.names])


@router.get("/v1/models/{model:path}", responses=documented(401, 404, 503))
async def model(model: str, served: Annotated[Served, Depends(served)]) -> ModelCard:
    """One of them."""
    served.check_loaded()
    return _card(served, served.named(model))


@router.get("/version", responses=documented(401))
async def version() -> Version:
    """The release that runs."""
    return Version(version=VERSION)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {kind: {"schema": {"type": "string"}} for kind in _METRICS_TYPES}},
        **documented(401),
    },
)
async def metrics(request: Request, served: Annotated[Served, Depends(served)]) -> Response:
    """Prometheus metrics under vLLM's names."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(served.engine.registry), media_type=None, headers={"Content-Type": content_type})


@health.head("/health", include_in_schema=False)
@health.get("/health", response_model=HealthAnswer)
async def healthy(served: Annotated[Served, Depends(served)]) -> JSONResponse:
    """Whether requests are being served or soon will be: 503 if the engine is stuck or dead."""
    return _health(served, bad=("stalled", "dead"))


@health.head("/livez", include_in_schema=False)
@health.get("/livez", response_model=HealthAnswer)
async def live(served: Annotated[Served, Depends(served)]) -> JSONResponse:
    """Whether to leave the process alone: 503 if only a restart can help."""
    return _health(served, bad=("stalled", "dead"))


@health.head("/readyz", include_in_schema=False)
@health.get("/readyz", response_model=HealthAnswer)
async def ready(served: Annotated[Served, Depends(served)]) -> JSONResponse:
    """Whether to send requests: 503 also while starting or draining."""
    return _health(served, bad=("starting", "draining", "stalled", "dead"))


def _health(served: Served, bad: tuple[str, ...]) -> JSONResponse:
    now = served.engine.health()
    return JSONResponse({"status": now.state, "detail": now.detail}, 503 if now.state in bad else 200)


def _card(served: Served, name: str) -> ModelCard:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": served.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return ModelCard(
        id=name,
        object="model",
        created=served.created,
        owned_by="jaxserve",
        root=served.engine.config.model,
        parent=None,
        max_model_len=served.max_model_len,
        permission=[permission],
    )
