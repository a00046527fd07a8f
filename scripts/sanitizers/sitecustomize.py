"""Python reads this at its start under `make test-sanitizers`: the native module is the one that was compiled with
checks."""

import os
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location

NAME = "archerfish.kernels.native._native"
try:
    spec = spec_from_file_location(NAME, os.environ["NATIVE_MODULE"])
    assert spec is not None and spec.loader is not None
    sys.modules[NAME] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
except BaseException:  # Python would go on, and the tests would run on the other module
    traceback.print_exc()
    os._exit(1)
