"""Makes ``studies`` importable from the repository root, after all installed packages."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
