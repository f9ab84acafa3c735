"""Soft knobs as they stand in a deployment file, and what a replica does with them."""

import threading

import pytest

from dflash_serve.errors import ConfigError, RequestError
from dflash_serve.scheduler.tuning import Tuning
from dflash_serve.serve.knobs import SoftKnobs
from dflash_serve.serve.replica import Replica


class Engine:
    def __init__(self):
        self.tunings = []

    def tune(self, tuning):
        if tuning.max_running == 99:
            raise RequestError("max_running is 99; allowed: 1 to 8", "max_running")
        self.tunings.append(tuning)

    def check_health(self):
        pass

    def shutdown(self):
        pass


@pytest.fixture
def replica():
    made = Replica.__new__(Replica)
    made._engine, made._executor = Engine(), Engine()
    made._leaving = threading.Event()
    made._knobs, made._refused_knobs = SoftKnobs(), None
    made._started = False
    return made


def test_knobs_become_a_tuning():
    given = {"verify_length": 4, "speculation": False, "max_running": 2, "log_level": "ERROR"}
    knobs = SoftKnobs.parse(given)
    assert knobs.tuning() == Tuning(verify_length=4, speculation=False, max_running=2)
    assert SoftKnobs.parse(None).tuning() == Tuning()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2.*Soft knobs are verify_length"),
        ({"verify_length": 0}, "verify_length is 0.*greater than or equal to 1"),
        ({"speculation": "no"}, "speculation is 'no'.*boolean"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD'.*'DEBUG'"),
    ],
)
def test_what_is_no_soft_knob_is_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=named):
        SoftKnobs.parse(given)


@pytest.mark.parametrize("bad", [{"max_running": 99}, {"no_such_knob": 1}])
async def test_bad_knobs_fail_a_start_and_leave_a_running_replica_as_it_is(replica, bad):
    with pytest.raises(ConfigError):
        replica.reconfigure(bad)
    await replica.check_health()
    replica.reconfigure(bad)  # the first that it gets, with no knobs in the file it started from
    assert next(iter(bad)) in replica._refused_knobs
    replica.reconfigure({"verify_length": 2})
    replica.reconfigure(bad)
    assert replica._knobs == SoftKnobs(verify_length=2)
    assert next(iter(bad)) in replica._refused_knobs
    replica.reconfigure({})
    assert replica._refused_knobs is None
    assert replica._engine.tunings == [Tuning(verify_length=2), Tuning()]
