"""TorchRec's models. Version 1.6 imports its readers of public data sets together with them."""

import importlib.util
import sys
from unittest.mock import MagicMock

if importlib.util.find_spec("iopath") is None:
    sys.modules.update({name: MagicMock() for name in ("iopath", "iopath.common", "iopath.common.file_io")})

from torchrec.models.dlrm import DLRM, DLRM_DCN

__all__ = ["DLRM", "DLRM_DCN"]
