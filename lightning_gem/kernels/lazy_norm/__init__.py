"""Norm and linear map in one GEMM."""

from lightning_gem.kernels.lazy_norm.op import norm_linear

__all__ = ["norm_linear"]
