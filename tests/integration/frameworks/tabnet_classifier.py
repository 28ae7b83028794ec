"""pytorch-tabnet's quick example: ``TabNetClassifier.fit`` with an evaluation set."""

from __future__ import annotations

import numpy as np
import torch
from pytorch_tabnet.tab_model import TabNetClassifier

from tests.integration.frameworks.watching import begin, end


def main() -> None:
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    X_train, X_valid = generator.random((48, 6)), generator.random((16, 6))
    y_train, y_valid = generator.integers(0, 2, 48), generator.integers(0, 2, 16)
    clf = TabNetClassifier(n_d=4, n_a=4, n_steps=2, verbose=0, device_name="cpu")
    begin({})
    clf.fit(
        X_train,
        y_train,
        eval_set=[(X_valid, y_valid)],
        max_epochs=2,
        patience=0,
        batch_size=8,
        virtual_batch_size=4,
    )
    end(clf.network, steps=2 * 6, evals=2 * 2)


if __name__ == "__main__":
    main()
