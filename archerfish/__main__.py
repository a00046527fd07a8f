"""`python -m archerfish`: the command line."""

from __future__ import annotations

import sys

from archerfish.cli.main import main

sys.exit(main())
