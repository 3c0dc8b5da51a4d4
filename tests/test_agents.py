"""The trained agents in agents/ can be evaluated, and do what their curves say."""

import sys
from pathlib import Path

import pytest

import aquadqn

AGENTS = sorted(path.parent for path in Path(__file__).parents[1].glob("agents/*/args.json"))


@pytest.mark.parametrize("agent", AGENTS, ids=lambda path: path.name)
def test_an_agent_succeeds_in_most_of_a_few_episodes(agent, monkeypatch, capsys):
    words = ["aquadqn.py", "--evaluate", str(agent), "--eval-episodes", "6"]
    monkeypatch.setattr(sys, "argv", words)
    aquadqn.main()
    printed = capsys.readouterr().out
    success = next(line for line in printed.splitlines() if line.startswith("success"))
    assert float(success.split()[1]) >= 0.5
    assert (
        f"step {(agent / 'evaluations.csv').read_text().splitlines()[-1].split(',')[0]}," in printed
    )


def test_agents_are_small_plain_arrays():
    files = [path for agent in AGENTS for path in agent.iterdir()]
    assert AGENTS
    assert {path.name for path in files} == {
        "args.json",
        "agent.npz",
        "candidates.npz",
        "evaluations.csv",
    }
    assert max(path.stat().st_size for path in files) < 4_000_000
