"""Machinery that the attention ops share: what is computed (spec), where it runs (dispatch), and the kernels."""
