"""Settings of the whole suite."""

import os

# The suite runs one process per core: more threads would only fight over them. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
