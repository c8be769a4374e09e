"""The server's description of itself holds under fuzzing: no 500, and no status or body that it does not name."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from server.answers import ChatCompletion
from server.app import create_app
from tests.server.fake_engine import FakeEngine

APP = create_app(FakeEngine())
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_answers_are_as_described(case):
    # Whether a body is taken depends on more than a schema can say: the model's name, fields that exclude others.
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


@pytest.fixture(scope="module")
def description():
    return APP.openapi()


def test_every_error_is_described_by_the_error_body(description):
    for path, operations in description["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for status, response in operation["responses"].items():
                schema = response["content"].get("application/json", {}).get("schema")
                if int(status) >= 400 and "z" not in path and "health" not in path:
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


def test_request_bodies_are_closed(description):
    bodies = [name for name in description["components"]["schemas"] if name.endswith("Request")]
    assert {"ChatRequest", "CompletionRequest", "DetokenizeRequest"} <= set(bodies)
    assert all(description["components"]["schemas"][name]["additionalProperties"] is False for name in bodies)
    assert ChatCompletion.__name__ in description["components"]["schemas"]
