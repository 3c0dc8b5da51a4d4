"""A human demonstration replayed, and beside it the trained agent from the same initial state, as an animation.

    python docs/tools/door_gif.py runs/AdroitHandDoor-v1__aquadqn__1__1700000000

Goes through the demonstrations that reach the goal, says from which of their initial states the agent reaches it too,
and draws the first of those.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import gymnasium as gym
import jax
import minari
import numpy as np
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from record import aquadqn, load_policy

PIXELS, EVERY, FPS = (
    240,
    4,
    12,
)  # side of a picture; steps from one picture to the next; pictures per second
AGENT_STEPS = 200  # the environment's own limit; demonstrations are longer


@dataclass
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """run folder of a finished aquadqn.py run"""
    out: Path = Path(__file__).parents[1] / "results" / "figures" / "door_human_and_agent.gif"


class Episode(NamedTuple):
    success: bool
    pictures: list[np.ndarray]


def picture(env: gym.Env) -> np.ndarray:
    """A small picture of the environment: the mean of blocks of pixels."""
    frame = aquadqn.render(env)
    factor = len(frame) // PIXELS
    return frame.reshape(PIXELS, factor, PIXELS, factor, 3).mean((1, 3)).astype(np.uint8)


def play(
    env: gym.Env, initial_state: dict, choose: Callable[[np.ndarray, int], np.ndarray], steps: int
) -> Episode:
    observation, _ = env.reset(options={"initial_state_dict": initial_state})
    success, pictures = False, [picture(env)]
    for step in range(steps):
        observation, _, _, _, info = env.step(choose(np.asarray(observation, np.float32), step))
        success = success or bool(info["success"])
        if (step + 1) % EVERY == 0:
            pictures.append(picture(env))
    return Episode(success, pictures)


def write_gif(path: Path, human: list[np.ndarray], agent: list[np.ndarray]) -> None:
    """Side by side; the shorter one waits at its end."""
    length = max(len(human), len(agent))
    human, agent = (
        pictures + [pictures[-1]] * (length - len(pictures)) for pictures in (human, agent)
    )
    frames = [
        Image.fromarray(np.hstack(pair)).quantize(48, dither=Image.Dither.NONE)
        for pair in zip(human, agent)
    ]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 // FPS, loop=0)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    args = aquadqn.load_args(options.run)
    dataset = minari.load_dataset(args.dataset_id)
    env = aquadqn.make_env(dataclasses.replace(args, reward="env"), render=True)
    policy, key, written = load_policy(options.run, env), jax.random.PRNGKey(0), False
    for episode in dataset.iterate_episodes():
        if not np.any(episode.infos["success"]):
            continue
        metadata = next(iter(dataset.storage.get_episode_metadata([episode.id])))
        initial_state = metadata["options"]["initial_state_dict"]
        human = play(
            env, initial_state, lambda _, step, actions=episode.actions: actions[step], len(episode)
        )
        agent = play(
            env, initial_state, lambda state, _: np.asarray(policy(state, key, 0.0)[0]), AGENT_STEPS
        )
        print(f"demonstration {episode.id}: human {human.success}, agent {agent.success}")
        if human.success and agent.success and not written:
            write_gif(options.out, human.pictures, agent.pictures)
            written = True
    if not written:
        raise aquadqn.UserError(
            "no demonstration from whose initial state the agent succeeds too: nothing was drawn"
        )


if __name__ == "__main__":
    try:
        main()
    except aquadqn.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
