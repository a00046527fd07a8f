"""`python -m archerfish.cli`."""

from __future__ import annotations

import sys

from archerfish.cli.main import main

sys.exit(main())
