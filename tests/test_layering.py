"""The package is layered: a file imports from lower rows alone, and what a row may know is held here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jzero"

# A file imports only from strictly lower rows; "" is the package itself, which gathers the public names.
ROWS = [
    {"ending", "gpus", "hlo_shapes", "host_memory"},
    {"hlo_text"},
    {
        "mesh",
        "targets",
        "replica_groups",
        "phases",
        "hlo_flops",
        "directories",
        "recipes",
        "precision",
        "placement",
        "seal",
        "in_chunks",
        "step_dirs",
        "checksums",
        "launchers",
        "stop",
        "pace",
        "in_blocks",
        "waiting",
        "scratch_file",
    },
    {
        "collectives",
        "comm",
        "hlo",
        "hlo_cost",
        "dataflow",
        "reads",
        "watch",
        "compile_cache",
        "metrics_file",
        "distributed",
        "together",
        "block_files",
    },
    {"zero", "writer", "traced", "rates", "saved", "hlo_host"},
    {"use", "simulate", "host_params", "layerwise"},
    {"pullback", "host_grads", "schedule"},
    {"prefetch"},
    {"stack"},
    {"lora", "template", "optim", "schedules", "data", "models"},
    {"probe", "config", "chains"},
    {"gradients"},
    {"step", "look"},
    {"driver", "specs"},
    {"offload"},
    {"run", "hf", "stored", "piecewise"},
    {"reader"},
    {"assemble"},
    {"checkpoint"},
    {""},
    {"description", "run_dir", "journal"},
    {"build", "resume"},
    {"loop"},
    {"plan", "deepspeed"},
    {"train", "export", "generate"},
]
PACKAGES = {"config", "data", "models", "offload", "plan"}  # their files import each other, not in circles
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
# Everybody else takes explicit arguments.
READ_SETTINGS = {
    "build",
    "description",
    "run_dir",
    "journal",
    "resume",
    "plan",
    "deepspeed",
    "train",
    "export",
    "generate",
}

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), str(path)) for path in FILES}


def module_of(path: Path) -> str:
    """`jzero/step.py` as "step", everything under `jzero/models/` as "models", `jzero/__init__.py` as ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Full names of all that is imported, wherever in the file, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of the package that a file imports."""
    for name, line in imported(TREES[path]):
        package, _, rest = name.partition(".")
        if package == "jzero":
            yield rest.partition(".")[0], line


def ids(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_file_has_a_row():
    assert {module_of(path) for path in FILES} <= ROW.keys()
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_a_file_imports_from_lower_rows_alone(path):
    module = module_of(path)
    for name, line in own_imports(path):
        assert name in ROW, f"{ids(path)}:{line} imports jzero.{name}, which is in no row"
        assert ROW[name] < ROW[module] or (name == module and module in PACKAGES), (
            f"{ids(path)}:{line} imports jzero.{name} of row {ROW[name]}, not lower than its own row {ROW[module]}"
        )


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_inside_a_package_imports_do_not_run_in_circles(package):
    files = {path.stem: path for path in FILES if module_of(path) == package and path.stem != "__init__"}
    assert files
    left = {
        name: {full.split(".")[2] for full, _ in imported(TREES[path]) if full.startswith(f"jzero.{package}.")}
        & files.keys()
        for name, path in files.items()
    }
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"{sorted(left)} import each other"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_settings_are_read_by_command_lines_alone(path):
    if module_of(path) not in READ_SETTINGS | {"config"}:
        assert "config" not in {name for name, _ in own_imports(path)}


@pytest.mark.parametrize("folder", ["jzero", "tests", "examples"])
def test_only_what_is_public_in_jax_and_flax_is_used(folder):
    used = []
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        used += [f"{path.name}:{line} {name}" for name, line in imported(tree)]
        reached = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used += [f"{path.name}:{node.lineno} {ast.unparse(node)}" for node in reached]
    private = re.compile(r"\S+ (jax|jaxlib|flax|nnx|optax)\.(\w+\.)*_(?!_)")
    assert not [name for name in used if private.match(name)]


def test_there_is_no_attic():
    assert not {path.stem for path in FILES} & {"util", "utils", "helpers", "common", "misc"}


# ---- the stage is a row of a table ----------------------------------------------------------------------------------


def asks_for_the_stage(tree: ast.AST) -> Iterator[int]:
    """Lines at which something is decided by a name that speaks of a stage: compared, matched, looked up or tested."""

    def speaks(node: ast.AST) -> bool:
        names = [str(getattr(n, "id", getattr(n, "attr", ""))) for n in ast.walk(node)]
        return any(name == "STAGES" or "stage" in name.lower().split("_") for name in names)

    for node in ast.walk(tree):
        decided = {
            ast.Compare: lambda n: [n],
            ast.Match: lambda n: [n.subject],
            ast.Subscript: lambda n: [n.slice, n.value],
            ast.If: lambda n: [n.test],
            ast.IfExp: lambda n: [n.test],
            ast.While: lambda n: [n.test],
            ast.BoolOp: lambda n: n.values,
            ast.Assert: lambda n: [n.test],
        }.get(type(node), lambda _: [])
        if any(speaks(part) for part in decided(node)):
            yield node.lineno


# A plan sets what was read beside the published formulas, which are given by stage.
ASK = ("zero", "config", "deepspeed", "plan")


@pytest.mark.parametrize("path", [p for p in FILES if module_of(p) not in ASK], ids=ids)
def test_nothing_below_the_table_asks_for_the_stage(path):
    lines = sorted(set(asks_for_the_stage(TREES[path])))
    assert not lines, f"{ids(path)}: lines {lines} decide by the stage; ask the specs, or give the table a column"


@pytest.mark.parametrize("path", [p for p in FILES if ROW.get(module_of(p), 99) <= ROW["gradients"]], ids=ids)
def test_below_the_step_the_word_is_a_name_in_the_table_alone(path):
    if module_of(path) not in ("zero", "config"):
        names = {getattr(node, field, None) for node in ast.walk(TREES[path]) for field in ("id", "attr", "arg")}
        assert "stage" not in names


@pytest.mark.parametrize(
    "source",
    [
        "if stage == 3: pass",
        "x = a if run.stage else b",
        "x = TABLE[stage]",
        "x = STAGES.get(0) or STAGES[0]",
        "match settings.zero_stage:\n    case 3: pass",
        "while not stage: pass",
        "assert stage in (0, 1)",
        "x = stage and 1",
    ],
)
def test_the_check_sees_a_decision(source):
    assert list(asks_for_the_stage(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "setup(stage=stage)",
        "layouts(leaves, stage)",
        "print(f'stage {stage}')",
        "if staged: pass",
        "x: list[jax.stages.Compiled]",
    ],
)
def test_the_check_lets_the_stage_be_handed_on(source):
    assert not list(asks_for_the_stage(ast.parse(source)))


# ---- public names say what they are ---------------------------------------------------------------------------------


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and their public methods; what stands inside a function is nobody's business."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_everything_public_has_a_docstring_and_annotations(path):
    assert ast.get_docstring(TREES[path])
    for name, node in public_definitions(TREES[path]):
        assert ast.get_docstring(node), f"{ids(path)}: {name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            assert not bare, f"{ids(path)}: {name} has no annotation for {bare}"
            assert node.returns is not None, f"{ids(path)}: {name} does not say what it returns"
