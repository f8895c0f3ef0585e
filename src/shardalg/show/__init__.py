"""Pictures and notation: display is a layer, data knows nothing of it."""

from ._notation import from_text as from_text
from ._notation import short as short
from ._notation import to_text as to_text
