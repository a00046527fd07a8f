"""`python -m archerfish.bench.paced STEP_S TOKEN_S`: an engine process that computes nothing and takes as long as it is
told.

A step takes STEP_S and TOKEN_S for each token. All else is real: scheduler, prefix cache, admission and sockets.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from archerfish.runtime.runner import ModelRunner
from archerfish.serve import host
from archerfish.step import StepInput, StepResult

TOKEN = 7


def main(step_s: float, token_s: float) -> int:
    def launch(runner: Any, step: StepInput) -> Any:
        result = StepResult(np.full((len(step.rows), max(1, int(step.samples.max(initial=1)))), TOKEN))

        def run() -> StepResult:
            time.sleep(step_s + token_s * len(step.tokens))
            return result

        return runner._thread.submit(run)

    ModelRunner.launch = launch  # type: ignore[method-assign,assignment]
    return host.main()


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
