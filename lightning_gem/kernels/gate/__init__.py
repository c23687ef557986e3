"""Gated units."""

from lightning_gem.kernels.gate.op import gate, hard_swish_gate, swiglu

__all__ = ["gate", "hard_swish_gate", "swiglu"]
