"""Loops without a loader: an environment is asked, or rows are sampled by index."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from tests.integration.loops.evaluating import glance
from tests.integration.loops.truth import EVAL, TRAIN, Net, Slow, Truth, Watch, loop, sgd, slow_loader, timed


class Replay:
    """Transitions that are sampled by index."""

    def __init__(self, size: int = 64) -> None:
        self.states = torch.randn(size, 4)
        self.next_states = torch.randn(size, 4)
        self.rewards = torch.randn(size, 1)

    def sample(self, number: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        where = torch.randint(len(self.states), (number,))
        return self.states[where], self.next_states[where], self.rewards[where]


def follow(target: nn.Module, model: nn.Module) -> None:
    """Move the target network a little towards the model."""
    for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
        slow.data.lerp_(fast.data, 0.05)


def descend(truth: Truth, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One backward and one update."""
    truth.backward(loss)
    truth.update(optimizer)


def act(truth: Truth, model: nn.Module, name: str, rows: torch.Tensor) -> torch.Tensor:
    """A forward without gradients of a model that trains afterwards: it is evaluation."""
    truth.forward(EVAL, model=name)
    truth.step(EVAL)
    with torch.no_grad():
        return model(rows)


@loop
def soft_actor_critic(watch: Watch) -> None:
    """Critic, actor and temperature update once each per environment step: that is one step, not two or three."""
    truth = watch.truth(partial=None)
    actor, critic, target = Net(4, 2), Net(6, 1), Net(6, 1)
    target.load_state_dict(critic.state_dict())
    temperature = torch.zeros(1, requires_grad=True)
    optimizers = [sgd(critic), sgd(actor), torch.optim.SGD([temperature], lr=0.01)]
    watch({"actor": actor, "critic": critic, "target": target})
    replay = Replay()
    for _ in range(10):
        act(truth, actor, "actor", torch.randn(1, 4))
        states, following, rewards = replay.sample()
        after = torch.cat([following, act(truth, actor, "actor", following)], 1)
        with torch.no_grad():
            truth.forward(model="target")
            wanted = rewards + 0.9 * target(after)
        truth.forward(model="critic")
        value = critic(torch.cat([states, torch.randn(8, 2)], 1))
        descend(truth, optimizers[0], (value - wanted).square().mean())
        truth.forward(model="actor")
        truth.forward(model="critic")
        action = actor(states)
        descend(truth, optimizers[1], -critic(torch.cat([states, action], 1)).mean())
        descend(truth, optimizers[2], (temperature * action.detach().mean()).sum())
        follow(target, critic)
        truth.step()


@loop
def twin_critics_with_a_delayed_actor(watch: Watch) -> None:
    """TD3: two critics update in every environment step, the actor in every second one, and in the same step."""
    truth = watch.truth(partial=None)
    actor, followers = (
        Net(4, 2),
        {"target_actor": Net(4, 2), "target_left": Net(6, 1), "target_right": Net(6, 1)},
    )
    critics = {"left": Net(6, 1), "right": Net(6, 1)}
    optimizers = {name: sgd(critic) for name, critic in critics.items()}
    actor_optimizer = sgd(actor)
    watch({"actor": actor, **critics, **followers})
    replay = Replay()
    for i in range(8):
        states, following, rewards = replay.sample()
        with torch.no_grad():
            for name in followers:
                truth.forward(model=name)
            after = torch.cat([following, followers["target_actor"](following)], 1)
            wanted = rewards + torch.minimum(
                followers["target_left"](after), followers["target_right"](after)
            )
        for name, critic in critics.items():
            truth.forward(model=name)
            value = critic(torch.cat([states, torch.randn(8, 2)], 1))
            descend(truth, optimizers[name], (value - wanted).square().mean())
        if i % 2 == 1:
            truth.forward(model="actor")
            truth.forward(model="left")
            descend(truth, actor_optimizer, -critics["left"](torch.cat([states, actor(states)], 1)).mean())
            follow(followers["target_actor"], actor)
        truth.step()


@loop
def deep_q_learning(watch: Watch) -> None:
    """Four environment steps act, then one update learns with a target network: one step per update."""
    truth = watch.truth(partial=None)
    model, target = Net(4, 2), Net(4, 2)
    optimizer = sgd(model)
    watch({"model": model, "target": target})
    replay = Replay()
    for i in range(24):
        act(truth, model, "model", torch.randn(1, 4))
        if i % 4 == 3:
            states, following, rewards = replay.sample()
            with torch.no_grad():
                truth.forward(model="target")
                wanted = rewards + 0.9 * target(following).max(1, keepdim=True).values
            truth.forward()
            descend(truth, optimizer, (model(states)[:, :1] - wanted).square().mean())
            truth.step()
            if i % 8 == 7:
                target.load_state_dict(model.state_dict())


@timed
def policy_optimization_over_rollouts(watch: Watch) -> None:
    """PPO: the policy acts without gradients, then learns from the rollout in several epochs of minibatches.

    It acts once more after the last answer of the environment, to know what the state is worth.
    """
    truth, (policy, optimizer) = watch.slow_training({})
    for _ in range(3):
        truth.at(EVAL)
        with torch.no_grad():
            for last in (*itertools.repeat(False, 4), True):
                truth.forward(EVAL)
                policy(torch.randn(1, 4))
                truth.step(EVAL)
                if not last:
                    truth.work(0.015)  # the environment
        truth.at(TRAIN)
        rollout = torch.randn(8, 4)
        for _ in range(2):
            for rows in rollout.split(4):
                truth.forward()
                descend(truth, optimizer, policy(rows).square().mean())
                truth.step()


@timed
def evaluation_of_a_loader_between_rollouts(watch: Watch) -> None:
    """The policy acts without gradients after an evaluation as before it: no batch was requested for the step that follows."""
    truth, (policy, optimizer, val) = watch.slow_training({"val": 2}, rated={"val": EVAL})
    for _ in range(3):
        glance(truth, policy, torch.randn(1, 4), 3)
        truth.at(TRAIN)
        for _ in range(2):
            truth.forward()
            descend(truth, optimizer, policy(torch.randn(4, 4)).square().mean())
            truth.step()
        truth.evaluate_on(policy, val)


@timed
def policy_optimization_with_loaders_of_rollouts(watch: Watch) -> None:
    """PPO whose every rollout becomes a loader: the policy acts between the passes, without gradients."""
    truth, (policy, optimizer) = watch.slow_training({}, names=1)
    for _ in range(3):
        truth.at(EVAL)
        with torch.no_grad():
            for last in (*itertools.repeat(False, 3), True):
                truth.forward(EVAL)
                policy(torch.randn(1, 4))
                truth.step(EVAL)
                if not last:
                    truth.work(0.015)  # the environment
        rollout = slow_loader(truth, "?", 2)
        for _ in range(2):
            truth.at(TRAIN, "?")
            for rows, _ in rollout:
                truth.batch("?")
                truth.forward()
                descend(truth, optimizer, policy(rows).square().mean())
                truth.step()


@timed
def learning_while_the_environment_is_slow(watch: Watch) -> None:
    """The agent acts with gradients on, and learns from the episode: the environment's time is the step's."""
    truth, (policy, optimizer) = watch.slow_training({})
    truth.at(TRAIN)
    for _ in range(4):
        chances = []
        for _ in range(3):
            truth.forward()
            chances.append(torch.log_softmax(policy(torch.randn(1, 4)), 1)[0, 0])
            truth.work(0.02)
        descend(truth, optimizer, -torch.stack(chances).mean())
        truth.step()


@timed
def rows_sampled_by_index(watch: Watch) -> None:
    """Minibatches are cut out of a tensor: there is nothing to wait for that could be seen."""
    truth, (model, optimizer) = watch.slow_training({})
    rows = torch.randn(32, 4)
    truth.sleep(0.1, "init")
    truth.at(TRAIN)
    for _ in range(8):
        batch = rows[torch.randint(len(rows), (4,))]
        truth.forward()
        out = model(batch)
        truth.work(0.02)
        descend(truth, optimizer, F.cross_entropy(out, torch.zeros(4, dtype=torch.long)))
        truth.step()


@loop
def an_adversary_with_two_critic_updates(watch: Watch) -> None:
    """Without a loader, the critic updates twice, the generator once: the critic twice in a row closes a step."""
    truth = watch.truth(partial=None)
    generator, critic = Net(4, 4), Net(4, 1)
    generator_optimizer, critic_optimizer = sgd(generator), sgd(critic)
    watch({"G": generator, "D": critic})
    for _ in range(5):
        for _ in range(2):
            truth.forward(model="G")
            truth.forward(model="D")
            fake = generator(torch.randn(4, 4)).detach()
            descend(truth, critic_optimizer, critic(fake).mean())
            truth.step()
        truth.forward(model="G")
        truth.forward(model="D")
        descend(truth, generator_optimizer, -critic(generator(torch.randn(4, 4))).mean())


@timed
def a_frozen_encoder_without_a_loader(watch: Watch) -> None:
    """The encoder of the model runs without gradients, and its head trains on what that gives: both are training."""
    truth = watch.truth()
    model = nn.ModuleDict({"encoder": Slow(truth), "head": Slow(truth)})
    optimizer = sgd(model["head"])
    watch(model)
    for _ in range(8):
        rows, classes = torch.randn(4, 4), torch.randint(0, 2, (4,))
        with torch.no_grad():
            truth.forward()
            hidden = model["encoder"](rows).repeat(1, 2)
        truth.forward()
        truth.backward(F.cross_entropy(model["head"](hidden), classes))
        truth.update_that_ends_a_step(optimizer)
