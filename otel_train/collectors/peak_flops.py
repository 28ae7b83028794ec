"""Peak FLOP/s of devices, for the utilisation of the run."""

from __future__ import annotations

from typing import Final

PEAK_FLOPS: Final = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L4": 121e12,
}
"""Dense BF16 with FP32 accumulation, FLOP/s, by the name that the driver tells.

Source: NVIDIA's data sheets of each, as tables that quote them print them. Of H200, H100 and L4 these print the rate with
sparsity (1979, 1671, 1513, 242 TFLOP/s), which is twice this. A model that is not here is not guessed.
"""


def peak_flops(model: str) -> float:
    """Of a device of exactly this model; 0 where that is not known, as of a part of a device (MIG)."""
    return PEAK_FLOPS.get(model, 0.0)
