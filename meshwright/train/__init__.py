"""One step, and the loop around it. Called, it trains: see `meshwright.api.train`."""

import sys

from meshwright import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
