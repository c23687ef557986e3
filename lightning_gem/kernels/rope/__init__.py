"""Rotary embedding of packed tokens."""

from lightning_gem.kernels.rope.op import rotary

__all__ = ["rotary"]
