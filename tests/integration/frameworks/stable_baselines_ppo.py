"""Stable-Baselines3's first example: PPO on CartPole. No loader; the policy is called by several of its methods, which call its parts."""

from __future__ import annotations

import gymnasium as gym
from stable_baselines3 import PPO

from tests.integration.frameworks.watching import begin, end


def main() -> None:
    env = gym.make("CartPole-v1")
    model = PPO("MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu")
    begin({"policy": model.policy})
    model.learn(total_timesteps=128)
    # Two rollouts of 64, each trained on twice in two batches of 32.
    end(model.policy, steps=2 * 2 * 2, evals=2 * 64)


if __name__ == "__main__":
    main()
