"""Layer norm and RMS norm of packed rows."""

from lightning_gem.kernels.norm.op import jagged_layer_norm, jagged_rms_norm

__all__ = ["jagged_layer_norm", "jagged_rms_norm"]
