"""`python -m specverify_dpex` is the command specverify-dpex."""

from __future__ import annotations

import sys

from specverify_dpex.cli import main

if __name__ == "__main__":
    sys.exit(main())
