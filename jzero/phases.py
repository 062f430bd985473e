"""Which part of a training step an instruction belongs to, by the name that it has from the traced function.

JAX writes into the name of every operation what it was traced under: `jvp(...)` where a function is differentiated and
`transpose(jvp(...))` on the way back.  So forward and backward can be told apart in any program of `jax.grad` or
`jax.vjp`, rematerialised operations and rules of `custom_vjp` included.  What is under neither is done with finished
gradients: reductions once a step, clipping, the optimizer.
"""

import re
from typing import Literal, get_args

from jzero.hlo_text import Instruction, Module

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_BACKWARD = re.compile(r"(?<![\w.\-])transpose\(")
_FORWARD = re.compile(r"(?<![\w.\-])jvp\(")


class Phases:
    """The phases of one program.

    Args:
        module: of a step, or of anything else: a program in which nothing is differentiated is forward as a whole.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._differentiates = any(
            _FORWARD.search(i.op_name) or _BACKWARD.search(i.op_name)
            for body in module.computations.values()
            for i in body
        )

    def of(self, i: Instruction, whiles: tuple[Instruction, ...] = ()) -> Phase:
        """The phase of an instruction.

        XLA joins the names of what it combines or finds twice, "(a:b)": that is of the phase that most of its parts are
        of, and of the earlier one if they are equally many, as that waits for it first.  What has lost its name is of
        the phase of the loop round it; a loop that has, of the phase of what is in it, if that is of one alone.

        Args:
            whiles: the `while` instructions of the loops in which it stands, outermost first.
        """
        if not self._differentiates:
            return "forward"
        found = [_named(part) for part in parts(i.op_name)]
        phase = max(PHASES, key=found.count)
        if phase == "update" and i.opcode == "while" and not i.op_name:
            phase = self._of_body(i.called("body"))
        return self.of(whiles[-1], whiles[:-1]) if whiles and phase == "update" else phase

    def _of_body(self, name: str) -> Phase:
        """The only pass that the body of a loop is part of; "update" if there is none, or both."""
        found = {_named(i.op_name) for i in self._module.computations.get(name, [])}
        passes: list[Phase] = [phase for phase in PHASES[:2] if phase in found]
        return passes[0] if len(passes) == 1 else "update"

    def layer_loop(self, whiles: tuple[Instruction, ...]) -> Instruction | None:
        """The innermost of nested loops, outermost first, that is part of a forward or backward pass.

        In a training step that is the loop over layers; a loop over microbatches has the passes inside of it.  It is
        None where there is none.
        """
        return next((i for i in reversed(whiles) if self.of(i) != "update"), None)


def parts(op_name: str) -> list[str]:
    """The names that XLA joined: "p/(a:b)" as ["p/a", "p/b"]; a name alone as itself."""
    before, opened, joined = op_name.partition("(") if op_name.startswith("(") else op_name.partition("/(")
    if not opened:
        return [op_name]
    depth, part, found = 0, "", []
    for character in joined:
        if depth == 0 and character in ":)":
            found.append(part)
            part = ""
            if character == ")":
                break
            continue
        depth += {"(": 1, ")": -1}.get(character, 0)
        part += character
    else:
        found.append(part)  # Long names are cut off.
    return [f"{before}/{part}" if before else part for part in found]


def _named(op_name: str) -> Phase:
    if _BACKWARD.search(op_name):
        return "backward"
    return "forward" if _FORWARD.search(op_name) else "update"
