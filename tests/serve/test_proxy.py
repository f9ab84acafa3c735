import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from dflash_serve.serve.proxy import middlewares


def with_two_ids():
    answer = PlainTextResponse("fine", headers={"x-request-id": "ours"})
    answer.raw_headers.append((b"X-Request-ID", b"serves"))
    return answer


def answer(response):
    async def handle(_request):
        return response()

    return handle


def pieces():
    return StreamingResponse(iter(["too ", "late"]), 408, {"retry-after": "3"})


ROUTES = {
    "/ok": lambda: PlainTextResponse("fine"),
    "/ids": with_two_ids,
    "/json": lambda: JSONResponse({"error": {"message": "mine"}}, 400),
    "/late": pieces,
    "/empty": lambda: PlainTextResponse("", 503),
    "/long": lambda: PlainTextResponse("x" * 10_000, 500),
    "/-/healthz": lambda: PlainTextResponse("draining", 503),
}


@pytest.fixture
async def client():
    routes = [Route(path, answer(response)) for path, response in ROUTES.items()]
    app = Starlette(routes=routes, middleware=middlewares())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        yield client


@pytest.mark.parametrize(("path", "text"), [("/ok", "fine"), ("/-/healthz", "draining")])
async def test_other_answers_pass_untouched(client, path, text):
    assert (await client.get(path)).text == text


async def test_json_errors_pass_untouched(client):
    assert (await client.get("/json")).json() == {"error": {"message": "mine"}}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/late", 408, "too late"),
        ("/empty", 503, "no details given"),
        ("/long", 500, "x" * 500),
        ("/nothing", 404, "Not Found"),
    ],
)
async def test_plain_errors_become_json(client, path, status, message):
    response = await client.get(path)
    assert response.status_code == status
    assert response.json()["error"]["message"] == message
    assert int(response.headers["content-length"]) == len(response.content)


async def test_other_headers_are_kept(client):
    assert (await client.get("/late")).headers["retry-after"] == "3"


async def test_an_answer_has_one_request_id_the_first(client):
    assert (await client.get("/ids")).headers.get_list("x-request-id") == ["ours"]
