"""Grouped matrix products of experts."""

from lightning_gem.kernels.grouped.op import grouped_mm

__all__ = ["grouped_mm"]
