"""What the pages say can be done and found: the README's own example runs, links and pictures lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "demos" / "README.md",
    ROOT / "benchmarks" / "README.md",
]

RECORDINGS = """
import gymnasium as gym
import numpy as np
import tiny_env

def record(seed):
    env = gym.make("Reach-v0")
    observations, done = [env.reset(seed=seed)[0]], False
    actions, rewards, terminations, successes = [], [], [], []
    while not done:
        action = np.clip(-env.unwrapped.position, -1, 1).astype(np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        observations.append(observation)
        actions.append(action)
        rewards.append(reward)
        terminations.append(terminated)
        successes.append(info["success"])
    return [np.array(x) for x in (observations, actions, rewards, terminations, successes)]

episodes = [record(seed) for seed in range(3)]
"""
TINY = """--candidate-steps 500 --total-timesteps 63 --eval-every 42 --eval-episodes 2 --learning-starts 21
 --num-actions 4 --batch-size 16 --quiet"""


def blocks(page: Path, heading: str) -> list[str]:
    """The code blocks under a heading."""
    (section,) = re.findall(rf"^#+ {heading}\n(.*?)^##", page.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_the_readmes_way_from_arrays_to_a_trained_agent(tmp_path):
    snippet, command = blocks(ROOT / "README.md", "Your own task, your own demonstrations")
    own = [text.replace("my_module:MyEnv-v0", "tiny_env:Reach-v0") for text in (snippet, command)]
    assert all("tiny_env" in text for text in own)
    (tmp_path / "my_recordings.py").write_text(RECORDINGS)
    (tmp_path / "snippet.py").write_text(own[0])
    python, script, *words = shlex.split(own[1])
    assert (python, script) == ("python", "aquadqn.py")
    environment = {
        **os.environ,
        "MINARI_DATASETS_PATH": str(tmp_path / "minari"),
        "PYTHONPATH": str(ROOT / "tests"),
    }
    for arguments in (["snippet.py"], [str(ROOT / script), *words, *TINY.split()]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "agent.npz").exists()
    assert len((run / "evaluations.csv").read_text().splitlines()) > 2


def test_a_trained_agent_acts_in_a_program_of_ones_own(capsys, monkeypatch):
    (snippet,) = blocks(ROOT / "docs" / "usage.md", "A trained agent in your own program")
    monkeypatch.chdir(ROOT)
    exec(snippet, {})
    assert capsys.readouterr().out.strip() in ("True", "False")


def test_the_readme_is_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"<img src=\"([^\"]+)\"", text)
    for target in targets:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_and_arguments_that_a_page_names_exist(page):
    """Of every `python SCRIPT ... --argument` in a page."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"(?:^|`)python ([^`\n]*)", text, re.MULTILINE):
        script, *words = re.sub(r"\s#.*", "", line).split()
        if not script.endswith(".py"):
            continue
        assert (ROOT / script).exists(), line
        source = (ROOT / script).read_text()
        for word in words:
            if word == "--":  # of sweep.py: the rest is for the algorithm's script
                source = (ROOT / f"{words[1]}.py").read_text()
            name = word.split("=")[0].removeprefix("--")
            if word.startswith("--") and name != "help":
                assert name in source or name.replace("-", "_") in source, (script, word)
