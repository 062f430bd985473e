"""The named optimizers and schedules as a table: which settings each takes, and what they are if nothing is said.

Plain data, so that the schema of the settings and the code that builds the optimizers read the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "muon"]
ScheduleName = Literal["constant", "linear", "cosine"]
Setting = float | bool | tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """One optimizer.

    Attributes:
        source: where it, or its usual settings, are from.
        lr: highest learning rate if none is given; each optimizer has a scale of its own.
        settings: what it takes beside, each with its default.  `weight_decay` is per step and unit of the learning
            rate, so a rate of 0 changes nothing.
    """

    source: str
    lr: float
    settings: Mapping[str, Setting] = field(default_factory=dict)


# Muon is for hidden matrices: a table that is looked up and the head have a geometry of their own.
EMBEDDING_AND_HEAD = ("*embed*", "*head*")

RECIPES: dict[OptimizerName, Recipe] = {
    "adamw": Recipe(
        "Loshchilov and Hutter 2019; b2 as in Brown et al. 2020, appendix B",
        lr=3e-3,
        settings={"weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8},
    ),
    "lion": Recipe(
        "Chen et al. 2023, section 5: AdamW's rate divided, its decay multiplied, by 3 to 10, here 3",
        lr=1e-3,
        settings={"weight_decay": 0.3, "b1": 0.9, "b2": 0.99},
    ),
    "adafactor": Recipe(
        "Shazeer and Stern 2018, algorithm 4; the rate is relative to the root mean square of each tensor",
        lr=1e-2,
        settings={"weight_decay": 0.0, "eps": 1e-30},
    ),
    "sgd": Recipe(
        "Sutskever et al. 2013; with clipping by norm",
        lr=0.1,
        settings={"weight_decay": 0.0, "momentum": 0.9, "nesterov": False},
    ),
    "muon": Recipe(
        "Jordan et al. 2024; updates of AdamW's size, 0.2, so that both share a rate: Liu et al. 2025, equation 4",
        lr=3e-3,
        settings={
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
            "adamw_leaves": EMBEDDING_AND_HEAD,
        },
    ),
}

KEYS = tuple(dict.fromkeys(key for recipe in RECIPES.values() for key in recipe.settings))


def settings_of(name: OptimizerName, given: Mapping[str, Setting | None]) -> dict[str, Setting]:
    """All settings of an optimizer: those that are given, its defaults for the rest.  A value of None is not given.

    Raises:
        ValueError: a setting is given that the optimizer does not take.
    """
    defaults = RECIPES[name].settings
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key not in defaults:
            raise ValueError(f"{key} = {value}: {name} has none; it takes {', '.join(defaults)}")
    return {**defaults, **given}


def rates() -> str:
    """The default learning rates, in words."""
    return ", ".join(f"{recipe.lr:g} for {name}" for name, recipe in RECIPES.items())


def takers(key: str) -> str:
    """The optimizers that take a setting, each with its default, in words: "0.9 for adamw, 0.95 for muon"."""
    return ", ".join(f"{recipe.settings[key]} for {name}" for name, recipe in RECIPES.items() if key in recipe.settings)
