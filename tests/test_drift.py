"""Copies, not imports: the same name means the same source in every script; only tools import scripts."""

import ast
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parents[1].glob("*.py"))
OWN_TO_EACH_SCRIPT = {"Args", "main", "train"}
TOOLS = {"record"}  # they call the scripts and may import them


def definitions(source: str) -> dict[str, str]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def drifted(sources: dict[str, str]) -> list[str]:
    versions: dict[str, dict[str, list[str]]] = {}
    for script, source in sources.items():
        for name, text in definitions(source).items():
            if name not in OWN_TO_EACH_SCRIPT:
                versions.setdefault(name, {}).setdefault(text, []).append(script)
    return [f"{name} in {list(texts.values())}" for name, texts in versions.items() if len(texts) > 1]


def test_copies_are_identical_to_the_letter():
    assert drifted({path.name: path.read_text() for path in SCRIPTS}) == []


def test_drift_would_be_found():
    sources = {"a.py": "def f():\n    return 1\n", "b.py": "def f():\n    return 2\n", "c.py": "def g():\n    pass\n"}
    assert len(drifted(sources)) == 1


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem not in TOOLS], ids=lambda path: path.name)
def test_no_script_imports_another(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {other.stem for other in SCRIPTS}
