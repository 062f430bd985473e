"""Settings in YAML files: read strictly, written so that they read back."""

import re
from pathlib import Path
from typing import Any

import yaml

from jzero.config.errors import ConfigError
from jzero.config.schema import Config


def to_yaml(config: Config) -> str:
    """`config` as YAML that `load` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_yaml(path: str) -> dict[str, Any]:
    """The nested mapping a YAML file holds; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, gives a key twice, or is not a mapping.
    """
    try:
        # StrictLoader is a SafeLoader: it makes plain values only.
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=StrictLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: not a text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold keys and values, not {type(values).__name__}")
    return values


class StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001 (as in PyYAML)
        """The mapping `node` describes, each key once."""
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in a number with an exponent and takes 1e-3 for text; everybody who writes it means the number.
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+$")
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
