"""The first evaluation episode of runs as small animations for docs/gallery.md.

    python docs/tools/gallery.py aquadqn.py runs/AdroitHandDoor-v1__aquadqn__1__1700000000 [runs/...]
    python docs/tools/gallery.py --candidates runs/AdroitHandDoor-v1__aquadqn__1__1700000000

The first form evaluates each run with its script and `--capture-video`: nothing is chosen, the first episode is shown
as it was. The second replays the first demonstration and draws the candidates of its states beside it
(appendix "Visualization" as a film).
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import imageio.v2 as imageio
import minari
import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aquadqn

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "results" / "gallery"
PIXELS = 160  # side of a picture
PICTURES = 80  # of an animation, at most
FPS = 12
LARGEST = 1_500_000  # bytes


def write_gif(path: Path, frames: list[np.ndarray]) -> None:
    """With as many colours as the size allows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for colours in (64, 32, 16, 8):
        pictures = [
            Image.fromarray(frame).quantize(colours, dither=Image.Dither.NONE) for frame in frames
        ]
        first, *rest = pictures
        first.save(path, save_all=True, append_images=rest, duration=1000 // FPS, loop=0)
        if path.stat().st_size < LARGEST:
            break
    print(f"{path}: {len(frames)} pictures, {path.stat().st_size / 1e6:.2f} MB")


def small(frame: np.ndarray) -> np.ndarray:
    height, width = frame.shape[:2]
    size = (round(PIXELS * width / height), PIXELS)
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))


def film_evaluation(script: str, run: Path) -> None:
    command = [sys.executable, ROOT / script, "--evaluate", run, "--capture-video"]
    subprocess.run([*command, "--eval-episodes", "1"], check=True)
    video = max((run / "videos").glob("evaluation_*.mp4"), key=lambda path: path.stat().st_mtime)
    frames = [frame for frame in imageio.get_reader(video)]  # list() asks for its length, infinity
    every = -(-len(frames) // PICTURES)
    name = run.resolve().name.rsplit("__", 1)[0]  # without the time
    write_gif(GALLERY / f"{name}.gif", [small(frame) for frame in frames[::every]])


def draw_candidates(candidates: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Candidates (K, D) and the demonstrated action (D,), a line for each."""
    figure = Figure(figsize=(3.2, PIXELS / 100), dpi=100, layout="constrained")
    axis = figure.subplots()
    colours = colormaps["turbo"](np.linspace(0, 1, len(candidates)))
    for colour, candidate in zip(colours, candidates):
        axis.plot(candidate, color=colour, lw=0.8)
    axis.plot(action, color="black", lw=1.6)
    axis.set_ylim(-1.1, 1.1)
    axis.set_xlabel("action dimension", fontsize="small")
    axis.tick_params(labelsize="small")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def film_candidates(run: Path) -> None:
    args = aquadqn.load_args(run)
    dataset = minari.load_dataset(args.dataset_id)
    episode = next(dataset.iterate_episodes())
    metadata = next(iter(dataset.storage.get_episode_metadata([episode.id])))
    with np.load(run / "candidates_along.npz", allow_pickle=False) as file:
        candidates = file["candidates"]  # (steps, K, D)
    env: gym.Env = aquadqn.make_env(dataclasses.replace(args, reward="env"), render=True)
    env.reset(options={"initial_state_dict": metadata["options"]["initial_state_dict"]})
    every = -(-len(episode) // PICTURES)
    frames = []
    for step, action in enumerate(episode.actions):
        if step % every == 0:
            pictures = (small(aquadqn.render(env)), draw_candidates(candidates[step], action))
            frames.append(np.hstack(pictures))
        env.unwrapped.step(action)
    name = run.resolve().name.rsplit("__", 1)[0]
    write_gif(GALLERY / f"{name}__candidates.gif", frames)


def main() -> None:
    first, *runs = sys.argv[1:]
    for run in map(Path, runs):
        if first == "--candidates":
            film_candidates(run)
        else:
            film_evaluation(first, run)


if __name__ == "__main__":
    main()
