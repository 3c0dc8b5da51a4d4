"""Copies, not imports: no script imports another, and what has the same name has the same text.

A script in the two halves of docs/architecture.md has a border, the line that begins with "# Plumbing". Below it every
name means the same text in all such scripts. Above it a name is a role (Args, Replay, sample, make_update, ...) that
each algorithm fills in its own way, except for the mathematics listed here, which is the same everywhere. In scripts
that have no border yet, the same name means the same text throughout.
"""

import ast
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parents[1].glob("*.py"))
OWN_TO_EACH_SCRIPT = {"Args", "main", "train"}
SAME_MATHEMATICS = set(
    """CandidateNetwork QNetwork soft_min_loss nearest_candidate munchausen_target dqn_target n_step_returns
    CandidateState AgentState Batch Evaluation start_temperature annealed_temperature make_candidate_update averaged
    evaluated_params Discriminator discriminator_input discriminator_loss discriminator_reward""".split()
)
TOOLS = {"record", "sweep"}  # they call the scripts and may import them


def definitions(source: str) -> list[tuple[str, str, int]]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [(node.name, ast.get_source_segment(source, node), node.lineno) for node in nodes]


def border(source: str) -> int | None:
    """The number of the line that begins the plumbing."""
    lines = source.splitlines()
    return next((i + 1 for i, line in enumerate(lines) if line.startswith("# Plumbing")), None)


def drifted(sources: dict[str, str]) -> list[str]:
    """Names with more than one text, by the kind of their place: mathematics, plumbing, or a script without border."""
    versions: dict[tuple[str, str], dict[str, list[str]]] = {}
    for script, source in sources.items():
        line = border(source)
        for name, text, start in definitions(source):
            if name in SAME_MATHEMATICS:
                place = "mathematics"
            elif name in OWN_TO_EACH_SCRIPT or (line and start < line):
                continue
            else:
                place = "plumbing" if line else "no border"
            versions.setdefault((place, name), {}).setdefault(text, []).append(script)
    return [f"{name} in {list(texts.values())}" for (_, name), texts in versions.items() if len(texts) > 1]


def test_copies_are_identical_to_the_letter():
    assert drifted({path.name: path.read_text() for path in SCRIPTS}) == []


def test_drift_would_be_found():
    one, other = "def f():\n    return 1\n", "def f():\n    return 2\n"
    line = "# Plumbing.\n"
    assert len(drifted({"a.py": one, "b.py": other, "c.py": "def g():\n    pass\n"})) == 1
    assert len(drifted({"a.py": line + one, "b.py": line + other})) == 1
    assert drifted({"a.py": one + line, "b.py": other + line}) == []
    loss = [text.replace("f()", "soft_min_loss()") for text in (one, other)]
    assert len(drifted({"a.py": loss[0] + line, "b.py": loss[1]})) == 1


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem not in TOOLS], ids=lambda path: path.name)
def test_no_script_imports_another(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {other.stem for other in SCRIPTS}
