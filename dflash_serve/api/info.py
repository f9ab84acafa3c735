"""The /server_info answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dflash_serve import __version__
from dflash_serve.api.protocol import ReplicaStatus
from dflash_serve.engine.messages import LengthStats
from dflash_serve.observe.replicas import accept_length, lengths_of, speculative

__all__ = ["server_info"]


def server_info(models: Sequence[str], statuses: Sequence[ReplicaStatus]) -> dict[str, Any]:
    """Configuration, versions and speculation figures of everything served.

    `avg_spec_accept_length` is tokens committed per verified block (bonus token included), pooled
    over the verify lengths that draft; per verify length it stands beside, one-row steps too.
    `dummy_weights` is true when any replica computes with random weights, `synthetic_acceptance`
    is set when any counts proposals as accepted that the target may not confirm.

    Args:
        models: names served.
        statuses: the replicas that answered; top-level speculation fields pool over them.
    """
    first = statuses[0].info if statuses else None
    drafts = first is not None and first.block_size is not None
    return {
        "version": __version__,
        "models": list(models),
        "dummy_weights": any(status.info.dummy_weights for status in statuses),
        "synthetic_acceptance": next(
            (s.info.synthetic_acceptance for s in statuses if s.info.synthetic_acceptance), None
        ),
        "speculative_algorithm": "DFLASH" if drafts else None,
        "speculative_num_draft_tokens": first.verify_length if first and drafts else None,
        **_accept_lengths(statuses),
        "replicas": [_replica(status) for status in statuses],
    }


def _replica(status: ReplicaStatus) -> dict[str, Any]:
    return {
        "model": status.model,
        "replica": status.replica,
        "state": status.state,
        "restarts": status.restarts,
        "start_seconds": status.start_seconds,
        "config": status.config,
        "engine": msgspec.to_builtins(status.info),
        "stats": msgspec.to_builtins(status.stats, str_keys=True),
        "outstanding": status.outstanding,
        "step_age_s": status.step_age_s,
        **_accept_lengths([status]),
    }


def _accept_lengths(statuses: Iterable[ReplicaStatus]) -> dict[str, Any]:
    by_length: dict[int, list[LengthStats]] = {}
    drafting: list[LengthStats] = []
    for status in statuses:
        drafting += speculative(status).values()
        for verify_length, stats in lengths_of(status).items():
            by_length.setdefault(verify_length, []).append(stats)
    return {
        "avg_spec_accept_length": accept_length(drafting),
        "avg_spec_accept_length_by_verify_length": {
            str(verify_length): accept_length(stats)
            for verify_length, stats in sorted(by_length.items())
        },
    }
