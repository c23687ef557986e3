"""Low-precision training: the MXFP8 format, linear layers in it, conversion of models, and the Lightning plugin."""
