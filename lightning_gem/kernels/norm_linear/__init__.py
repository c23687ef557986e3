"""Norm and linear map in one GEMM."""

from lightning_gem.kernels.norm_linear.op import norm_linear

__all__ = ["norm_linear"]
