"""The shipped application over replicas that misbehave when told to (`serve deploy`).

No postponed annotations here: Ray Serve looks at the builder's annotation at run time.
"""

from ray.serve import Application

from dflash_serve.serve.app import assemble
from dflash_serve.serve.settings import ServeSettings

from .replica import ChaosReplica

__all__ = ["build"]


def build(args: ServeSettings) -> Application:
    """As `dflash_serve.serve.app.build_app`."""
    return assemble(args, ChaosReplica)
