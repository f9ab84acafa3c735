"""The routing benchmark's workload, its reading of a stream, and its sums."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_serve.bench.routing import Sample, Workload, measure, prompts, summary, table

SMALL = Workload(groups=3, requests=4, prefix_tokens=20, suffix_tokens=3, concurrency=2)


class Handler(BaseHTTPRequestHandler):
    """Answers with an empty event, one with a token, and the usage."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "prompt_tokens_details": {"cached_tokens": 20},
        }
        events = [
            {"choices": [{"token_ids": []}]},
            {"choices": [{"token_ids": [5]}]},
            self.server.last or {"choices": [], "usage": usage},
        ]
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.bodies, made.last = [], None
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def url(server):
    return f"http://127.0.0.1:{server.server_port}"


def test_groups_share_their_prefixes_in_an_order_that_is_always_the_same():
    made = prompts(SMALL)
    assert made == prompts(SMALL)
    assert Counter(Counter(tuple(p[:20]) for p in made).values()) == {4: 3}
    assert len({tuple(p) for p in made}) == 12


def test_every_prompt_is_sent_once_and_counted_as_the_server_says(server):
    samples = measure(url(server), "m", SMALL)
    assert sorted(body["prompt"] for body in server.bodies) == sorted(prompts(SMALL))
    assert {(s.prompt_tokens, s.cached_tokens) for s in samples} == {(23, 20)}
    assert all(0 < s.first_s <= s.total_s for s in samples)


def test_an_error_in_a_stream_is_raised(server):
    server.last = {"error": {"message": "rank 1 died"}}
    with pytest.raises(OSError, match="rank 1 died"):
        measure(url(server), "m", SMALL)


def test_the_summary_weighs_hits_by_tokens():
    row = summary([Sample(0.1, 0.2, 100, 0), Sample(0.3, 0.4, 300, 300)])
    assert row["hit_rate"] == 0.75
    assert row["first_p50_ms"] == pytest.approx(200)
    assert "75.0%" in table({"prefix": row})
