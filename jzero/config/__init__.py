"""What a run is: the schema of its settings, and how they are loaded.

Defaults < YAML file (`--config`) < flags (`--SECTION.KEY VALUE`).  The flags are generated from the schema, so a key
has one name everywhere.  Whatever is wrong is a `ConfigError` of one line, raised before any array is made: it names
the key, the value and what is allowed.  There are three checks: of one value (`Field` bounds), of values against each
other (`Config`), and of the whole against the devices (`resolve`).
"""

from jzero.config.errors import ConfigError
from jzero.config.fields import show, values_of
from jzero.config.files import read_yaml, to_yaml
from jzero.config.loading import load, load_with, validate
from jzero.config.schema import Config, profile_steps, resolve
from jzero.config.sections import Comm, Data, Distributed, Log, MixtureSource, Model, Optim, Precision, Run, Zero

__all__ = [
    "Comm",
    "Config",
    "ConfigError",
    "Data",
    "Distributed",
    "Log",
    "MixtureSource",
    "Model",
    "Optim",
    "Precision",
    "Run",
    "Zero",
    "load",
    "load_with",
    "profile_steps",
    "read_yaml",
    "resolve",
    "show",
    "to_yaml",
    "validate",
    "values_of",
]
