"""Root: importing this finds ``studies``, beside this folder, after all that is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
