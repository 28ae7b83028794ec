"""skorch's quick start: a scikit-learn classifier around a module."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import make_classification
from skorch import NeuralNetClassifier
from torch import nn

from tests.integration.frameworks.watching import begin, end


class MyModule(nn.Module):
    def __init__(self, num_units: int = 10) -> None:
        super().__init__()
        self.dense0 = nn.Linear(20, num_units)
        self.nonlin = nn.ReLU()
        self.dropout = nn.Dropout(0.5)
        self.dense1 = nn.Linear(num_units, num_units)
        self.output = nn.Linear(num_units, 2)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, X, **kwargs):
        X = self.nonlin(self.dense0(X))
        X = self.dropout(X)
        X = self.nonlin(self.dense1(X))
        return self.softmax(self.output(X))


def main() -> None:
    torch.manual_seed(0)
    X, y = make_classification(100, 20, n_informative=10, random_state=0)
    X, y = X.astype(np.float32), y.astype(np.int64)
    net = NeuralNetClassifier(
        MyModule, max_epochs=2, lr=0.1, batch_size=8, iterator_train__shuffle=True, verbose=0
    )
    net.initialize()
    begin({"module": net.module_})
    net.partial_fit(X, y)
    net.predict_proba(X)
    end(net.module_, steps=2 * 10, evals=2 * 3 + 13)


if __name__ == "__main__":
    main()
