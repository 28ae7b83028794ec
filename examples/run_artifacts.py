"""A run that leaves its artifacts: settings, metrics, times per step and epoch, operators, a trace.

    python examples/run_artifacts.py
    otel-train validate --analysis --report runs/example-artifacts/artifacts

The same without these settings in the code: otel-train profile --steps 50 --output-dir DIR -- train.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train


def main():
    model = torch.nn.Sequential(
        torch.nn.Conv1d(4, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(224, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(16_000, 4, 16), torch.randn(16_000, 1)), batch_size=16)

    with otel_train.instrument(model, {"rollouts": loader}, run_id="example-artifacts", artifacts=True):
        otel_train.capture(steps=5)  # a profiler trace of the next five steps
        for _ in range(3):
            for inputs, targets in loader:
                with otel_train.stage("reward"):
                    rewards = targets.tanh()
                torch.nn.functional.mse_loss(model(inputs), rewards).backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
