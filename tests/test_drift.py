"""Copies, not imports: no script imports another, and what has the same name has the same text.

Every algorithm script has a border, the line that begins with "# Plumbing". Below it every name, of
a function, a class or a constant, means the same text in all scripts. Above it a name is a role
(Args, Replay, sample, make_update, ...) that each algorithm fills in its own way, except for the
mathematics listed here, which is the same everywhere. aquadqn.py's copy is the master. In files that
have no border, which are no algorithms, the same name means the same text throughout.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALGORITHMS = [
    ROOT / f"{name}.py"
    for name in ("aquadqn", "aquagail", "aquaplay", "aquacql", "bc_mdn", "sac_baselines")
]
SCRIPTS = sorted(ROOT.glob("*.py"))
TOOLS = {"record", "sweep"}  # they call the scripts and may import them
OWN_TO_EACH_SCRIPT = {"Args", "BOUNDS", "Command", "METHODS", "main", "prepare", "train"}
SAME_CONSTANTS = {  # on whatever side of the border
    "EVALUATION_SEED",
    "HUMAN_EPISODES",
    "HUMAN_REPETITIONS",
    "SINKHORN_EPSILON",
    "SINKHORN_POINTS",
    "SINKHORN_SEED",
    "SINKHORN_THRESHOLD",
}
SAME_MATHEMATICS = {
    "AgentState",
    "Batch",
    "CandidateNetwork",
    "CandidateState",
    "Discriminator",
    "DiscriminatorState",
    "Evaluation",
    "QNetwork",
    "annealed_temperature",
    "discretise",
    "discriminator_input",
    "discriminator_loss",
    "discriminator_reward",
    "dqn_target",
    "evaluate",
    "init_discriminator",
    "make_candidate_update",
    "munchausen_target",
    "n_step_returns",
    "nearest_candidate",
    "q_of",
    "soft_min_loss",
    "update_discriminator",
}
LONGEST_LINE = 100  # of the upper half


def definitions(source: str) -> list[tuple[str, str, int]]:
    """Name, text and line of all that a module defines: functions, classes, constants."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        else:
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in [node, *decorators])
        text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        found += [(name, text, first) for name in names]
    return found


def border(source: str) -> int | None:
    """The number of the line that begins the plumbing."""
    lines = source.splitlines()
    return next((i + 1 for i, line in enumerate(lines) if line.startswith("# Plumbing")), None)


def drifted(sources: dict[str, str]) -> list[str]:
    """Names with more than one text in the mathematics, the plumbing, or files without a border."""
    versions: dict[tuple[str, str], dict[str, list[str]]] = {}
    for script, source in sources.items():
        line = border(source)
        for name, text, start in definitions(source):
            if name in SAME_MATHEMATICS | SAME_CONSTANTS:
                place = "mathematics"
            elif name in OWN_TO_EACH_SCRIPT or (line and start < line):
                continue
            else:
                place = "plumbing" if line else "no border"
            versions.setdefault((place, name), {}).setdefault(text, []).append(script)
    return [
        f"{name} in {list(texts.values())}"
        for (_, name), texts in versions.items()
        if len(texts) > 1
    ]


def test_copies_are_identical_to_the_letter():
    assert drifted({path.name: path.read_text() for path in SCRIPTS}) == []


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_an_algorithm_script_has_two_halves(path):
    source = path.read_text()
    line = border(source)
    assert line is not None
    upper = source.splitlines()[: line - 1]
    assert [text for text in upper if len(text) > LONGEST_LINE] == []
    places = {name: start for name, _, start in definitions(source)}
    assert places["train"] < line < places["main"]
    assert [name for name in SAME_MATHEMATICS if places.get(name, 0) > line] == []


def test_drift_would_be_found():
    one = "def f():\n    return 1\n"
    other = "def f():\n    return 2\n"
    line = "# Plumbing.\n"
    assert len(drifted({"a.py": line + one, "b.py": line + other})) == 1
    assert drifted({"a.py": one + line, "b.py": other + line}) == []
    assert len(drifted({"a.py": one, "b.py": other, "c.py": "def g():\n    pass\n"})) == 1
    assert len(drifted({"a.py": line + "@g\n" + one, "b.py": line + one})) == 1
    loss = [text.replace("f()", "soft_min_loss()") for text in (one, other)]
    assert len(drifted({"a.py": loss[0] + line, "b.py": loss[1]})) == 1


def test_drift_of_constants_would_be_found():
    def scripts(statement: str) -> dict[str, str]:
        return {f"{i}.py": f"# Plumbing.\n{statement} = {i}\n" for i in range(2)}

    for name in ("PROBED_STEPS", "BUNDLED_DEMONSTRATIONS", "SINKHORN_POINTS", "X: int"):
        assert len(drifted(scripts(name))) == 1
    assert drifted(scripts("BOUNDS")) == []  # each script has its own arguments
    above = {f"{i}.py": f"SINKHORN_POINTS = {i}\n# Plumbing.\n" for i in range(2)}
    assert len(drifted(above)) == 1


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.stem not in TOOLS], ids=lambda path: path.name
)
def test_no_script_imports_another(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {other.stem for other in SCRIPTS}
