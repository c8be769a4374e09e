"""Every refusal and failure as an OpenAI error body with the right status."""

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from jaxserve.errors import EngineError, OverloadedError, RequestError
from jaxserve.sampling.checks import shown
from server.request_ids import HEADER

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
KINDS = {  # status: (type, code)
    400: (INVALID, "invalid_value"),
    401: (INVALID, "invalid_api_key"),
    404: (INVALID, "not_found"),
    405: (INVALID, "method_not_allowed"),
    413: (INVALID, "body_too_large"),
    415: (INVALID, "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("service_unavailable_error", "unavailable"),
}


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every refused or failed request is answered."""

    model_config = ConfigDict(extra="forbid")
    error: ErrorDetail


class ApiError(HTTPException):
    """A request answered with an error body; `code` defaults to the status's usual one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for these error statuses."""
    return {status: {"model": ErrorBody, "description": KINDS[status][1]} for status in statuses}


def as_api_error(error: Exception) -> ApiError:
    """What the caller is told about `error`; the words of an unforeseen one stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return ApiError(status, str(error), param=error.param, code=error.code)
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        return ApiError(503 if error.draining else 429, str(error), headers=retry)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    log.error("unforeseen error", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says more")


def error_body(error: ApiError) -> dict[str, Any]:
    """The OpenAI error body of `error`."""
    kind, code = KINDS.get(error.status_code, (INVALID, None))
    return {
        "error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code or code}
    }


def error_response(error: Exception) -> JSONResponse:
    """`error` as a whole answer."""
    known = as_api_error(error)
    return JSONResponse(error_body(known), known.status_code, headers=dict(known.headers or {}))


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if (
        isinstance(error, HTTPException)
        and not isinstance(error, ApiError)
        and error.status_code in (404, 405)
    ):
        where = f"{request.method} {request.url.path}"
        code = "unknown_url" if error.status_code == 404 else None
        message = f"there is no {where}; /openapi.json lists what there is"
        error = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    response = error_response(error)
    # What answers an unforeseen error stands outside the middleware that would add it.
    response.headers[HEADER] = request.state.request_id
    return response


def install(app: FastAPI, hints: dict[str, str]) -> None:
    """Answer every exception of `app` with an error body; `hints` say more about fields that are refused."""

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_invalid(error.errors(), hints))

    for kind in (HTTPException, RequestError, OverloadedError, EngineError, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(RequestValidationError, invalid)


def _invalid(problems: Any, hints: dict[str, str]) -> ApiError:
    """The deepest problem is the one of the union branch that fitted best."""
    worst = max(problems, key=lambda problem: len(_path(problem)))
    kind, path = worst["type"], _path(worst)
    param = ".".join(path) or None
    hinted = path[0] if path and path[0] in hints else path[-1] if path and path[0] == "messages" else None
    if hinted in hints:
        return ApiError(400, f"{param}: {hints[hinted]}", param=param, code="unsupported_parameter")
    if kind == "extra_forbidden":
        message = f"{param} is not a field of this request; remove it, or see /openapi.json for what there is"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"{param} is missing" if param else "the body is empty; send a JSON object"
        return ApiError(400, message, param=param, code="missing_required_parameter")
    if kind == "fields_disagree":
        return ApiError(400, worst["msg"], param=worst["ctx"]["field"], code="invalid_value")
    message = worst["msg"].removeprefix("Value error, ")
    if param and message.startswith("Input should be"):
        message = f"{param} is {shown(worst['input'])}; it {message.removeprefix('Input ')}"
        return ApiError(400, message, param=param)
    return ApiError(400, f"{param}: {message}" if param else f"the body: {message}", param=param)


def _path(problem: Any) -> list[str]:
    """Where in the body: without the names that pydantic gives to the branches of a union."""
    *outer, last = [step if isinstance(step, int) else step[:64] for step in problem["loc"]]
    steps = [step for step in outer[1:] if isinstance(step, int) or _is_field(step)]
    if outer and (
        isinstance(last, int) or problem["type"] in ("extra_forbidden", "missing") or _is_field(last)
    ):
        steps.append(last)
    return [str(step) for step in steps]


def _is_field(step: str) -> bool:
    return step.isidentifier() and step not in _BRANCHES


_BRANCHES = {"str", "int", "float", "bool", "none", "TokenizePrompt", "TokenizeChat"}
