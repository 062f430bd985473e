"""Sessions of one test process that have the same program compile it once."""

import functools

from jzero.build import make_run


def same_program(config, mesh):
    """What `make_run` returns, made once for all configs that have the same program."""
    return _made(_Settings(config), mesh)


class _Settings:
    """A config that is equal to another if both have the same program."""

    def __init__(self, config):
        self.config = config
        self.key = config.model_dump_json(exclude={"run", "checkpoint", "log"})

    def __eq__(self, other):
        return self.key == other.key

    def __hash__(self):
        return hash(self.key)


@functools.cache
def _made(settings, mesh):
    return make_run(settings.config, mesh)
