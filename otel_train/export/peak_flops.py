"""Peak FLOP/s of devices, for the utilisation of the run."""

from __future__ import annotations

from typing import Final

PEAK_FLOPS: Final = {
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
}
"""Dense BF16 with FP32 accumulation, FLOP/s, by the name that the driver tells. Source: NVIDIA's data sheets of each; those
that print the rate with sparsity alone (H200, H100, L4) are halved. What is not here is not guessed."""


def peak_flops(model: str) -> float:
    """Of a device of this model; 0 where that is not known. A part of a device (MIG) is not known."""
    if "MIG" in model:
        return 0.0
    return next(
        (peak for name, peak in PEAK_FLOPS.items() if f"{model} ".replace("-", " ").startswith(f"{name} ")),
        0.0,
    )
