"""How all pictures of the library look: settings for ``matplotlib.rc_context``."""

from __future__ import annotations

from typing import Any

GREY = "#5f6b76"
STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8c0c8",
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
GRID: Any = {"axes.grid": True, "grid.color": "#e6eaee"}
