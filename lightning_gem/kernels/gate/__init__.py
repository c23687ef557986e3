"""Gated units."""

from lightning_gem.kernels.gate.op import gated, hard_swish_gate, swiglu

__all__ = ["gated", "hard_swish_gate", "swiglu"]
