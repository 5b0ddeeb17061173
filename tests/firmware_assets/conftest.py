"""Makes the demo's modules importable as they are when its scripts run."""

from __future__ import annotations

import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo"
sys.path.insert(0, str(DEMO))
