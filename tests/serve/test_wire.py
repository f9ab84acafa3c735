import pytest

from dflash_serve import errors
from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.sampling import SamplingParams
from dflash_serve.serve import wire


def test_request_round_trip():
    request = GenerationRequest(
        request_id="a",
        model="m",
        params=SamplingParams(max_tokens=3, seed=2**63 - 1),
        messages=[{"role": "user", "content": [{"type": "text", "text": "ü"}]}],
        stop=("x", "y"),
        emitted_ids=[1, 2],
    )
    assert wire.decode_request(wire.encode_request(request)) == request


def test_delta_round_trip():
    delta = Delta(text="é", token_ids=[1], finish_reason="stop", prompt_ids=[4], drafted=7)
    assert wire.decode_delta(wire.encode_delta(delta)) == delta


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestError("top_p is 2", "top_p"),
        errors.ModelNotFoundError("no model x", "model"),
        errors.OverloadedError("full", 2.5),
        errors.EngineDeadError("rank 1 died"),
        errors.UnavailableError("being started", 0.5),
        errors.EngineStalledError("stuck"),
        errors.DFlashError("a fault"),
    ],
)
def test_errors_arrive_as_the_class_they_were(error):
    with pytest.raises(errors.DFlashError) as caught:
        wire.decode_delta(wire.encode_error(error))
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


def test_a_replica_that_can_take_nothing_names_itself():
    assert wire.unable_replica(wire.encode_error(errors.EngineDeadError("x"), "r1")) == "r1"
    assert wire.unable_replica(wire.encode_error(errors.RequestError("x"))) is None
    assert wire.unable_replica(wire.encode_delta(Delta())) is None
