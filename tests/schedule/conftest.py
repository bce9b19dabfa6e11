"""The helpers of this folder by their short names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
