"""Pictures and notation: display is a layer, data knows nothing of it."""

from . import _maps as _maps
from . import _mime as _mime
from . import _placements as _placements
from . import _plans as _plans
from . import _programs as _programs
from ._notation import from_text as from_text
from ._notation import to_text as to_text
from ._picture import Picture as Picture
from ._show import show as show
