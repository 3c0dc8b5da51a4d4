"""RoboDesk (Kannan et al. 2021) as Gymnasium environments, state only: `RoboDesk/<task>-v0`, episodes of 500 steps.

    env = gym.make("robodesk_env:RoboDesk/push_green-v0")
    env = gym.make("robodesk_env:RoboDesk/lift_ball-v0", robodesk_rewards="upstream", max_episode_steps=9000)

`robodesk_env:` makes Gymnasium import this file, which has to be in the program's folder or on Python's path. It needs
`pip install robodesk==1.0.0 dm_control==1.0.50 mujoco==3.17.0`. Every step's info has the task's "success". An episode
ends with the time limit only. The nine base tasks are those of the AQuaDem paper.
"""

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np

BASE_TASKS = (
    "open_slide",
    "open_drawer",
    "push_green",
    "stack",
    "upright_block_off_table",
    "flat_block_in_bin",
    "flat_block_in_shelf",
    "lift_upright_block",
    "lift_ball",
)
OTHER_TASKS = (
    "push_blue",
    "push_red",
    "flat_block_off_table",
    "ball_off_table",
    "upright_block_in_bin",
    "ball_in_bin",
    "upright_block_in_shelf",
    "ball_in_shelf",
    "lift_flat_block",
)
TASKS = BASE_TASKS + OTHER_TASKS


@functools.cache
def load_desk_model() -> Any:
    """The package's model, shared by all desks of a process; without shadows and the like, which slow the videos."""
    import mujoco

    assets = Path(importlib.util.find_spec("robodesk").origin).parent / "assets"
    model = mujoco.MjModel.from_xml_path(str(assets / "desk.xml"))
    model.light_castshadow[:], model.mat_reflectance[:], model.vis.quality.offsamples = False, 0, 0
    return model


class Desk(gym.Env):
    """A Franka arm at a desk, 20 ms a step.

    Observation, 76 numbers: 9 joint positions of the robot (7 arm, 2 fingers), their 9 velocities, 3 of the end
    effector, 29 positions of the things (drawer, slide, 3 buttons, 3 lights, then position and quaternion of ball,
    upright block, flat block) and their 26 velocities (per free body 3 linear, 3 angular).
    Action, 5 numbers in [-1, 1]: end effector along x, y, z (1 is a target 1 cm away), wrist, fingers (-1 closed).

    The simulation is that of the package `robodesk`, to the last bit. Its faults are not:
    - an image in every observation, which needs OpenGL and a Pillow of long ago: none here, `render` is for videos;
    - object velocities under the name of object positions: here are both;
    - the end effector observed as a view that moves on after the step: here it is a copy;
    - random numbers from NumPy's global generator: here from Gymnasium's, so equal seeds give equal episodes;
    - the objects' initial positions kept as views of the present ones, so that nothing ever counts as moved: "lift"
      does not reward height, "off_table" not the fall, and "the others stayed" is always true. With
      robodesk_rewards="fixed" they are copies; with "upstream" reward and success are the package's.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    OBJECTS = ("ball", "upright_block", "flat_block")
    SUBSTEPS = 10

    def __init__(
        self,
        task: str = "open_slide",
        robodesk_rewards: Literal["upstream", "fixed"] = "fixed",
        render_mode: str | None = None,
    ):
        import mujoco

        self.task = task
        self.rewards = robodesk_rewards
        self.render_mode = render_mode
        self.mujoco = mujoco
        self.model = model = load_desk_model()
        self.data = mujoco.MjData(model)
        self.arm = mujoco.MjData(model)  # scratch space of the kinematics
        self.site = model.site("end_effector").id
        self.hand = self.data.site_xpos[self.site]  # a view, as all places here
        self.reached = self.arm.site_xpos[self.site]
        bodies = self.OBJECTS + ("red_button", "green_button", "blue_button")
        self.places = {name: self.data.xpos[model.body(name).id] for name in bodies}
        self.slide_handle = self.data.site_xpos[model.site("slide_handle").id]
        self.drawer_handle = self.data.geom_xpos[model.geom("drawer_handle").id]
        self.bounds = model.actuator_ctrlrange[:9].copy()
        self.jacobian = np.empty((3, model.nv))
        self.renderer: Any = None
        self.action_space = gym.spaces.Box(-1.0, 1.0, (5,), np.float32)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (76,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        mujoco, model, data, random = self.mujoco, self.model, self.data, self.np_random
        mujoco.mj_resetData(model, data)
        with_actuation = model.opt.disableflags
        model.opt.disableflags = with_actuation | int(mujoco.mjtDisableBit.mjDSBL_ACTUATION)
        mujoco.mj_forward(model, data)  # where the solver starts from, as in the package
        model.opt.disableflags = with_actuation
        joint = {
            name: data.joint(name).qpos for name in ("drawer_joint", "slide_joint", *self.OBJECTS)
        }
        joint["drawer_joint"] -= 0.10 * random.random()  # drawn in the package's order
        joint["slide_joint"] += 0.20 * random.random()
        joint["flat_block"][:2] += [0.3 * random.random(), 0.07 * random.random()]
        joint["ball"][:2] += [0.48 * random.random(), 0.08 * random.random()]
        joint["upright_block"][:2] += [0.3 * random.random() + 0.05, 0.05 * random.random()]
        data.qpos[:9] = [-0.30, -0.4, 0.28, -2.5, 0.13, 1.87, 0.91, 0.01, 0.01]
        data.qpos[:9] += 0.15 * random.uniform(self.bounds[:, 0], self.bounds[:, 1])
        data.qvel[:9] = 0
        mujoco.mj_forward(model, data)
        self.origins = {name: self.places[name].copy() for name in self.OBJECTS}
        return self.observe(), {"success": bool(self.reward_and_success()[1])}

    def observe(self) -> np.ndarray:
        qpos, qvel = self.data.qpos, self.data.qvel
        return np.concatenate([qpos[:9], qvel[:9], self.hand, qpos[9:], qvel[9:]], dtype=np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        data, action = self.data, np.asarray(action, np.float64)
        target = self.inverse_kinematics(self.hand + 0.01 * action[:3])
        (wrist_low, wrist_high), (finger_low, finger_high) = self.bounds[6:8]
        turn = (action[3] + 1) * (wrist_high - wrist_low) / 2 + wrist_low
        target[6] = min(max(0.02 * turn + data.qpos[6], wrist_low), wrist_high)
        target[7:] = (action[4] + 1) * (finger_high - finger_low) / 2 + finger_low
        data.ctrl[:] = target
        applied, bias = data.qfrc_applied[:9], data.qfrc_bias[:9]
        for _ in range(self.SUBSTEPS):
            applied[:] = bias  # gravity compensation
            self.mujoco.mj_step2(self.model, data)
            self.mujoco.mj_step1(self.model, data)
        reward, success = self.reward_and_success()
        return self.observe(), reward, False, False, {"success": success}

    def inverse_kinematics(self, target: np.ndarray) -> np.ndarray:
        """Joint positions (9,) with the end effector at the target: dm_control's search, on the six joints it may use.

        It differs in speed only. Where dm_control computes collisions, inertias and constraints for every iterate,
        the position of the arm is enough. Its least squares on the singular matrix J^T J, with a cut-off at rounding
        error, stays: the joints' drift along the null space depends on it.
        """
        mujoco, model, arm = self.mujoco, self.model, self.arm
        arm.qpos[:9] = self.data.qpos[:9]
        for _ in range(100):
            mujoco.mj_kinematics(model, arm)
            error = target - self.reached
            distance = math.sqrt(error.dot(error))
            if distance < 1e-14:
                break
            mujoco.mj_comPos(model, arm)
            mujoco.mj_jacSite(model, arm, self.jacobian, None, self.site)
            jacobian = self.jacobian[:, [0, 1, 2, 3, 4, 5]]
            update = np.linalg.lstsq(jacobian.T.dot(jacobian), jacobian.T.dot(error), rcond=-1)[0]
            norm = math.sqrt(update.dot(update))
            if distance > 20 * norm:  # hardly any progress
                break
            arm.qpos[:6] += update if norm <= 2 else update * (2 / norm)
        return arm.qpos[:9].copy()

    def reward_and_success(self, task: str | None = None) -> tuple[float, bool]:
        """The package's dense reward, in [0, 1], and its criterion of success."""
        task, places, qpos = task or self.task, self.places, self.data.qpos
        origins = (
            self.origins if self.rewards == "fixed" else places
        )  # the package compares a place with itself

        def near(place: np.ndarray) -> float:
            return max(0.0, 1 - math.dist(self.hand, place))

        def moved(name: str) -> float:
            return math.dist(places[name], origins[name])

        thing = next((name for name in self.OBJECTS if name in task), None)
        others = [name for name in self.OBJECTS if name != thing]
        if task == "open_slide":
            stayed = sum(
                weight * (moved(name) < 0.01)
                for name, weight in zip(self.OBJECTS, (0.34, 0.33, 0.33))
            )
            opened = 0.75 * qpos[10] / 0.6 + 0.25 * near(self.slide_handle - [0.15, 0, 0])
            reward, success = 0.9 * opened + 0.1 * stayed, qpos[10] > 0.55
        elif task == "open_drawer":
            reward, success = (
                0.75 * abs(qpos[9]) / 0.3 + 0.25 * near(self.drawer_handle),
                qpos[9] < -0.2,
            )
        elif task.startswith("push_"):
            colour = task.removeprefix("push_")
            success = qpos[14 + ("red", "green", "blue").index(colour)] < -0.00453  # the light
            reward = 0.25 * success + 0.75 * near(places[f"{colour}_button"])
        elif task == "stack":
            off = math.dist(places["upright_block"] - places["flat_block"], (0, 0, 0.0377804))
            reward, success = near(places["upright_block"]) - off, off < 0.04
        elif task.endswith("_off_table"):
            fallen = 1 - places[thing][2] / origins[thing][2]
            stayed = sum(0.1 * (1 - moved(name) / 5) for name in others)
            reward = 0.75 * max(0, min(1, 0.8 * fallen + stayed)) + 0.25 * near(places[thing])
            success = places[thing][2] < 0.6 and all(moved(name) < 0.01 for name in others)
        elif task.endswith("_in_bin"):
            x, y, z = places[thing]
            success = 0.28 < x < 0.52 and 0.38 < y < 0.62 and 0 < z < 0.4
            reward = 0.5 * near(places[thing]) + 0.5 * success
        elif task.endswith("_in_shelf"):
            success = places[thing][0] > 0.2 and places[thing][1] > 1.0
            inside = 1 - math.dist(places[thing][:2], (0.4, 1.1))
            arrived = 0.33 * near(places[thing]) + 0.33 * inside + 0.34 * success
            reward = 0.5 * arrived + sum(0.25 * (1 - moved(name) / 5) for name in others)
        else:  # lift
            height, enough = (
                places[thing][2],
                {"upright_block": 0.86, "ball": 0.81, "flat_block": 0.78}[thing],
            )
            lifted = max(0, min(1, 10 * (height - origins[thing][2])))
            reward, success = 0.85 * lifted + 0.15 * near(places[thing]), height > enough
        return float(max(0, min(1, reward))), bool(success)

    def render(self) -> np.ndarray:
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

        if self.renderer is None:
            camera = {
                "distance": 1.5,
                "azimuth": 110.0,
                "elevation": -35.0,
                "lookat": np.array([0.0, 0.65, 0.8]),
            }
            self.renderer = MujocoRenderer(self.model, self.data, camera, width=320, height=240)
        return self.renderer.render(self.render_mode)

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()
            self.renderer = None


for name in TASKS:
    gym.register(
        f"RoboDesk/{name}-v0",
        entry_point="robodesk_env:Desk",
        max_episode_steps=500,
        kwargs={"task": name},
    )
