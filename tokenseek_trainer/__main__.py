"""`python -m tokenseek_trainer` is `tokenseek`."""

import sys

from .cli import main


sys.exit(main())
