"""Timelines of requests: what an engine says of one, as JSON lines and as an OpenTelemetry collector takes it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from jaxserve.errors import ConfigError
from jaxserve.request import Request
from jaxserve.trace import Event, Span, open_trace, otlp, trace_id
from tests.engines import Traffic, around, greedy

ID = "0af7651916cd43dd8448eb211c80319c"


def test_a_request_is_told_from_its_arrival_to_its_last_token(tiny):
    engine, spans = around(tiny), []
    engine.trace = spans.append
    traffic = Traffic(engine)
    traffic.add(Request("one", [1, 2, 3], greedy(), trace_id=ID))
    traffic.add(Request("two", [1, 2, 3], greedy()))
    traffic.abort("two")
    traffic.finish()
    aborted = [span for span in spans if span.trace_id != ID]
    assert [span.name for span in aborted] == ["request", "queue"]
    assert aborted[0].attributes["finish_reason"] == "abort"
    whole, *parts = [span for span in spans if span.trace_id == ID]
    assert [span.name for span in (whole, *parts)] == ["request", "queue", "prefill", "decode"]
    assert whole.attributes["prompt_tokens"] == 3 and whole.attributes["output_tokens"] == 8
    assert all(span.parent_id == whole.span_id for span in parts)
    moments = [moment for span in parts for moment in (span.start, span.end)]
    assert moments == pytest.approx(sorted(moments), abs=1e-3)
    assert (moments[0], moments[-1]) == pytest.approx((whole.start, whole.end), abs=1e-3)


def test_ids_that_are_traces_are_taken_as_they_are():
    assert trace_id(ID) == ID
    assert trace_id("mine") == trace_id("mine") != trace_id("yours")
    assert len(trace_id("0" * 32)) == 32 and trace_id("0" * 32) != "0" * 32


def test_a_collector_gets_what_otlp_asks_for(tmp_path):
    got = []

    class Collects(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collects)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    path = tmp_path / "spans.jsonl"
    trace = open_trace(str(path), f"http://127.0.0.1:{server.server_port}", "tests")
    assert trace
    span = Span("request", ID, 1.5, 2.0, {"n": 3, "ok": True, "of": [0.5]}, [Event("given", 1.75)])
    trace(span)
    thread.join(20)
    server.server_close()
    ((where, body),) = got
    assert where == "/v1/traces" and body == otlp([span], "tests")
    written = body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert (written["traceId"], written["startTimeUnixNano"]) == (ID, "1500000000")
    assert written["attributes"][0] == {"key": "n", "value": {"intValue": "3"}}
    assert written["attributes"][2]["value"] == {"arrayValue": {"values": [{"doubleValue": 0.5}]}}
    assert json.loads(path.read_text())["name"] == "request"


def test_without_a_place_nothing_is_traced_and_a_bad_one_is_refused(tmp_path):
    assert open_trace(None, None, "tests") is None
    with pytest.raises(ConfigError, match="cannot be written"):
        open_trace(str(tmp_path / "none" / "spans"), None, "tests")
